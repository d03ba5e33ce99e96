"""A device simulated at the transport seam: the real transition table, and commands that fail on request."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from edgert.bundle.signing import SigningKey
from edgert.errors import DeployUnderWay, DeviceUnreachable, EdgeRTError
from edgert.versions.slots import SlotEvent, Slots, SlotState, Version, step
from edgert_deploy.devices.inventory import Device
from edgert_deploy.devices.transports import PLAIN, LineSink, PutOptions, Result
from edgert_deploy.rollout.request import read_offer

BOARD = Device("board", "ssh", "pi@board", "this-machine", "/state", "/home")
_EVENTS = {
    "install": SlotEvent.INSTALL,
    "activate": SlotEvent.ACTIVATE,
    "mark-good": SlotEvent.MARK_GOOD,
    "rollback": SlotEvent.ROLLBACK,
}


class SimulatedDevice:
    """Answers `edgertd` as a device; `faults[verb]` is raised there, or on the link if unreachable."""

    def __init__(self, key: SigningKey, slots: Slots | None = None, **faults: EdgeRTError) -> None:
        self.key, self.slots = key, slots or Slots()
        self.faults = {verb.replace("_", "-"): error for verb, error in faults.items()}
        self.done: list[str] = []
        self.before: Callable[[str], None] = lambda verb: None  # called with each verb as it comes
        self.reason = ""  # of a rollback
        self.name = "board"
        self.claims: dict[str, str] = {}
        self.hidden: set[str] = set()  # models that were removed there
        self.damaged = ""  # the reason why the model's slots cannot be read
        self.files: set[str] = set()
        self.digest = ""
        self.closed = 0

    def run(
        self, argv: Sequence[str], timeout_s: float, input: bytes = b"", on_stderr: LineSink | None = None
    ) -> Result:
        if argv[0] == "sh" and "rm" in argv:  # in a folder: see transports.in_folder
            self.files.discard(f"{argv[5]}/{argv[-1].removeprefix('./')}")
            return Result(tuple(argv), 0, "", "")
        if argv[0] == "sh" and argv[4] == "look":  # nobody sets it up
            return Result(tuple(argv), 0, "", "")
        if argv[0] != "/home/venv/bin/edgertd":
            return Result(tuple(argv), 1, "", "no systemd here")
        verb = argv[3]
        self.before(verb)
        if verb in ("claim", "unclaim"):
            return self._claim(verb, list(argv))
        assert verb == "status" or self.claims["echo"] in argv, "each step shows the claim"
        if verb != "status":
            self.done.append(verb)
        if verb == "rollback" and "--reason" in argv:
            self.reason = argv[argv.index("--reason") + 1]
        error = self.faults.get(verb)
        if isinstance(error, DeviceUnreachable):
            raise error
        if error is not None:
            told = json.dumps({"error": {"code": error.code, "message": error.message}})
            return Result(tuple(argv), error.exit_code, told + "\n", "")
        return Result(tuple(argv), 0, json.dumps(self._answer(verb)) + "\n", "")

    def put(self, local: Path, remote: str, how: PutOptions = PLAIN) -> None:
        if "put" in self.faults:
            raise self.faults["put"]
        self.files.add(remote)
        self.digest = read_offer(local).digest

    def close(self) -> None:
        self.closed += 1

    def _claim(self, verb: str, argv: list[str]) -> Result:
        if verb == "unclaim":
            assert argv[4] == self.claims.pop("echo")
            return Result(tuple(argv), 0, "{}", "")
        if "echo" in self.claims and self.claims["echo"] not in argv:
            told = json.dumps(
                {"error": {"code": DeployUnderWay.code, "message": "another deployment of echo is in progress"}}
            )
            return Result(tuple(argv), 7, told, "")
        self.claims["echo"] = argv[argv.index("--token") + 1]
        if "claim" in self.faults:  # its answer is lost
            raise self.faults.pop("claim")
        return Result(tuple(argv), 0, json.dumps({"token": self.claims["echo"], "status": self._status()}), "")

    def _answer(self, verb: str) -> dict[str, Any]:
        if verb in _EVENTS:
            version = Version(2, self.digest, good=False) if verb == "install" else None
            self.slots = step(self.slots, _EVENTS[verb], version=version)
        return self._status() if verb == "status" else {}

    def _status(self) -> dict[str, Any]:
        def described(version: Version | None) -> dict[str, Any] | None:
            return None if version is None else dict(vars(version))

        slots = self.slots
        model = {
            "model": "echo",
            "state": slots.state.value,
            "ratchet": slots.ratchet,
            "live": described(slots.live),
            "spare": described(slots.spare),
            "serving": None,
            "damaged": self.damaged,
        }
        return {
            "edgert": "0.1.0",
            "machine": "aarch64",
            "device": self.name,
            "profile": "this-machine",
            "daemon": {"running": True, "pid": 1},
            "disk_free_bytes": 10**10,
            "engines": {"null": "1"},
            "keys": [self.key.public.key_id],
            "models": [] if (slots.state is SlotState.EMPTY and not self.done) or self.hidden else [model],
        }


RELEASE_1 = Slots(SlotState.STEADY, "a", a=Version(1, "one", good=True), ratchet=1)
