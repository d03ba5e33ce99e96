"""Discovery by Home Assistant: ids that no two devices share."""

from __future__ import annotations

import json
import re
from itertools import product

from edgert.telemetry.home_assistant import discovery, node_id
from edgert.telemetry.messages import Topics


def test_each_device_has_its_own_ids_at_the_broker_and_in_home_assistant() -> None:
    names = ["a" + "".join(rest) for length in range(3) for rest in product("a_-.", repeat=length)]
    fleet = [Topics(site, device) for site, device in product(names, names)]
    assert len({topics.client_id for topics in fleet}) == len(fleet)
    said = [discovery(topics, "ha", names, {}, 60.0) for topics in fleet]
    assert len({topic for topic, _ in said}) == len(fleet)
    assert all(re.fullmatch(r"ha/device/[A-Za-z0-9_-]+/config", topic) for topic, _ in said)
    components = [each for _, payload in said for each in json.loads(payload)["components"].values()]
    assert len({each["unique_id"] for each in components}) == len(components)
    # Names that an access list uses as %u stay unchanged.
    assert node_id(Topics("plant-a", "pi_07")) == "edgert_plant-a_pi_07"
