"""The forwarder's process: `python -m edgert.telemetry.forwarder_process --state DIR --boot ID`.

The process sends the spool to the broker. It is a separate process, so that workers and supervisor load no paho and no
TLS, and never wait for a slow network. It reads the device's configuration. The supervisor holds the other end of the
process's standard input. The process stops within 2 s of SIGTERM, of SIGINT, or of the supervisor's death.

With `--clear` instead of `--boot`, the process forwards nothing. It removes the messages that the broker retains of
this device, or only shows them, and ends. An uninstall runs this.

Exit status: 0, or the exit code of an error in the configuration (an unreachable broker is no error).
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from edgert import __version__, machine
from edgert.config import PASSWORD_CREDENTIAL, DeviceConfig, credential, read_config
from edgert.errors import EdgeRTError
from edgert.log import log
from edgert.protocol.control import ask
from edgert.state_dir import StateDir
from edgert.stop import Stop, stop_with_supervisor_or_signal
from edgert.telemetry import messages
from edgert.telemetry.forwarder import Forwarder, ForwarderSettings, retained_topics
from edgert.telemetry.messages import Topics
from edgert.telemetry.mqtt import MqttSettings
from edgert.telemetry.retained import retain
from edgert.telemetry.sketch import SCALE
from edgert.telemetry.spool import Spool

HINT_ANSWER_S_MAX = 1.0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="edgert.telemetry.forwarder_process", description="Send the spool to the broker."
    )
    parser.add_argument("--state", type=Path, required=True, metavar="DIR")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--boot", metavar="ID", help="the id of the daemon's start")
    action.add_argument(
        "--clear",
        choices=("show", "remove"),
        help="clear the messages that the broker retains of this device, or show what would be cleared, and end",
    )
    args = parser.parse_args(argv)
    state = StateDir(args.state)
    try:
        if args.clear:
            print(_cleared(state, remove=args.clear == "remove"))
            return 0
        stop = stop_with_supervisor_or_signal()
        forward(state, read_config(state), args.boot, stop)
    except EdgeRTError as error:
        log(f"telemetry: {error.message}")
        return error.exit_code
    return 0


def forward(state: StateDir, config: DeviceConfig, boot: str, stop: Stop) -> None:
    """Forward until `stop` is set. Raises ConfigInvalid."""
    follow = config.follow
    following = {"channel": follow.channel, "channel_tags": ",".join(follow.tags)} if follow.registry else {}
    # The units and the scale define the meaning of this device's numbers for subscribers.
    units = {"lat_unit": "ms", "sketch_scale": SCALE}
    settings = ForwarderSettings(
        broker_settings(config),
        Topics(config.site, config.device),
        boot,
        info={**units, "edgert": __version__, "profile": config.profile, "machine": config.machine, **following},
        sys_interval_s=config.serving.window_s,
        home_assistant=config.mqtt.home_assistant,
        hint_topic=messages.hint_topic(follow.channel) if follow.registry else "",
    )

    def sys_fields() -> Mapping[str, object]:
        return machine.sys_fields(state.spool.parent)

    def hinted() -> None:
        with contextlib.suppress(EdgeRTError, OSError):  # the next round starts at its interval in any case
            ask(state.control_socket, {"op": "follow"}, HINT_ANSWER_S_MAX)

    spool = Spool(state.spool, log=log)
    Forwarder(settings, spool, sys_fields=sys_fields, on_hint=hinted, log=log).run(stop)
    spool.close()


def _cleared(state: StateDir, *, remove: bool) -> str:
    """Clear, or only name, this device's retained messages at the broker; return a line for uninstall."""
    config = read_config(state)
    if not config.mqtt.host:
        return ""
    settings, topics = broker_settings(config), Topics(config.site, config.device)
    retained = f"the messages that the broker {settings.address} retains of {config.site}/{config.device}"
    try:
        if remove:
            retain(settings, dict.fromkeys(retained_topics(topics, config.mqtt.home_assistant), b""), topics.client_id)
    except EdgeRTError as error:
        return f"left {retained} ({error.message}): `edgert fleet forget {config.device}` clears them"
    return f"removed {retained}"


def broker_settings(config: DeviceConfig) -> MqttSettings:
    """Return the settings in `[mqtt]`, with the service manager's password if there is one."""
    mqtt = config.mqtt
    login = {**mqtt.login, "password_file": credential(PASSWORD_CREDENTIAL, mqtt.password_file)}
    return MqttSettings(mqtt.host, mqtt.port, **login)


if __name__ == "__main__":
    sys.exit(main())
