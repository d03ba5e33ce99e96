"""Stand-ins for devices: folders behind one sshd, whose `edgertd` is a shell script with ready answers.

They cost little, so that the host's own cost can be measured with many of them on one machine. A real device answers
the same commands; the answers come from the simulated device of the tests.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgert.bundle.signing import SigningKey
from edgert.checks.status import DELTA_FORMAT, LIMITS_FORMAT
from edgert.versions.slots import Slots
from edgert_deploy.devices.inventory import Device
from tests.support.bundles import make_null_bundle
from tests.support.stand_ins.simulated_device import SimulatedDevice

# `edgertd --state DIR VERB ...`. Each answer is one line.
SCRIPT = """\
#!/bin/sh
answers={answers} state=$2
read -r phase <"$state/phase"
case $3 in
  status) cat "$answers/$phase" ;;
  claim) printf '{{"token": "echo.1", "status": %s}}\\n' "$(cat "$answers/$phase")" ;;
  list-files) echo '{{"files": [], "zstd": true, "patch_bytes_max": 0}}' ;;
  install) echo staged >"$state/phase" && echo '{{}}' ;;
  activate) echo trial >"$state/phase" && echo '{{}}' ;;
  mark-good) echo good >"$state/phase" && echo '{{}}' ;;
  *) echo '{{}}' ;;
esac
"""


def stand_ins(folder: Path, count: int, key: SigningKey, there: Device) -> list[Device]:
    """Make `count` devices at the address of `there`, on which nothing was deployed yet."""
    script = folder / "edgertd"
    answers = folder / "answers"
    answers.mkdir(parents=True)
    for phase, status in phases(folder, key).items():
        (answers / phase).write_text(json.dumps(status) + "\n")
    script.write_text(SCRIPT.format(answers=answers))
    script.chmod(0o755)
    devices = []
    for n in range(count):
        home, state = folder / f"d{n}", folder / f"d{n}" / "state"
        (home / "venv" / "bin").mkdir(parents=True)
        state.mkdir()
        os.symlink(script, home / "venv" / "bin" / "edgertd")
        (state / "phase").write_text("none\n")
        devices.append(replace(there, name=f"d{n}", home=str(home), state=str(state)))
    return devices


def phases(folder: Path, key: SigningKey) -> dict[str, dict[str, Any]]:
    """Return the answers to `edgertd status` before a deployment, and after each of its steps."""
    simulated = SimulatedDevice(key, Slots())

    def told(*words: str) -> dict[str, Any]:
        answer = json.loads(simulated.run(["/home/venv/bin/edgertd", "--state", "/state", *words], 1.0).stdout)
        return dict(answer)

    def status() -> dict[str, Any]:
        return {**told("status"), "delta_format": DELTA_FORMAT, "limits_format": LIMITS_FORMAT}

    found = {"none": status()}
    token = told("claim", "echo")["token"]
    simulated.put(make_null_bundle(folder, key), "/state/incoming/one")
    for verb, phase in (("install", "staged"), ("activate", "trial"), ("mark-good", "good")):
        told(verb, "echo", "--claim", token)
        found[phase] = status()
    return found
