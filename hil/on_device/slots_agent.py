"""The agent of a power-cut test on the device: it takes a JSON line over TCP, acts, and answers with one.

It imports everything before the first command, so that an operation consists of its disk changes and little else.
Each operation runs in a fork, as the owner of the state folder, like `edgertd`.

    python slots_agent.py PORT SIGNING_KEY STATE SOCKET
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from edgert import Client
from edgert.bundle.signing import read_signing_key
from edgert.cli.owner import act_as_owner
from edgert.config import FollowConfig, read_config
from edgert.errors import EdgeRTError
from edgert.protocol.control import ask
from edgert.state_dir import StateDir
from edgert.tensors import InferResponse
from edgert.versions.boot_clock import BOOT_ID_VARIABLE
from edgert.versions.install import install
from edgert.versions.slot_store import SlotStore
from tests.support.bundles import make_null_bundle  # sent to the device with this file

MODEL, PROFILE = "echo", "generic-x86-64"
PORT, KEY_FILE, STATE, SOCKET = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
DISK = "/dev/vdb"
BUNDLES = KEY_FILE.parent / "bundles"
DROP_IN = Path("/run/systemd/system/edgertd.service.d")
BALLAST_BYTES = 192 * 1024
SERVES_S_MAX = 400.0
GOLDEN = np.linspace(-1.0, 1.5, 4, dtype=np.float32).reshape(1, 4)


def begin(boot: str) -> dict[str, Any]:
    """Wait until the daemon answers; return the live release, and the time since the daemon's start.

    After a real boot, systemd has mounted the disk and started the daemon. After a resume this function does both,
    and `boot` is the boot id.
    """
    if not os.path.ismount(STATE):
        os.environ[BOOT_ID_VARIABLE] = boot
        DROP_IN.mkdir(parents=True, exist_ok=True)
        (DROP_IN / "boot.conf").write_text(f"[Service]\nEnvironment={BOOT_ID_VARIABLE}={boot}\n")
        _sh("systemctl", "daemon-reload")
        _sh("blockdev", "--flushbufs", DISK)  # the machine read it before it was saved
        _sh("mount", DISK, os.fspath(STATE))
        _sh("systemctl", "start", "--no-block", "edgertd")
    answer = _first_answer()
    return {
        "release": answer.release,
        "exact": answer.outputs["y"].tobytes() == expected(answer.release).tobytes(),
        "serves_after_s": time.clock_gettime(time.CLOCK_BOOTTIME) - _daemon_started_s(),
        **slots(),
    }


def _daemon_started_s() -> float:
    """Return when the daemon's process began, in seconds since the boot."""
    fields = Path(f"/proc/{StateDir(STATE).pid.read_text().split()[0]}/stat").read_text().rpartition(")")[2].split()
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")


def _first_answer() -> InferResponse:
    until = time.monotonic() + SERVES_S_MAX
    while True:
        try:
            with Client(SOCKET, timeout_s=30) as client:
                return client.infer(MODEL, GOLDEN, trace=True)
        except (EdgeRTError, OSError) as error:
            if time.monotonic() > until:
                said = subprocess.run(
                    ["journalctl", "-b", "-u", "edgertd", "-n", "30", "--no-pager"], capture_output=True
                )
                tail = said.stdout.decode(errors="replace")
                raise RuntimeError(f"nothing is served after {SERVES_S_MAX:.0f} s: {error}; {tail}") from error
            time.sleep(0.05)


def slots() -> dict[str, Any]:
    state = SlotStore(StateDir(STATE).models / MODEL).read()
    spare = state.spare
    return {
        "state": state.state.value,
        "live": getattr(state.live, "release", None),
        "spare": None if spare is None else [spare.release, spare.good],
        "ratchet": state.ratchet,
        "unattended": state.on_trial and state.limits is not None and state.limits.unattended,
    }


def expected(release: int) -> Any:
    """Return the right answer of a release; releases answer differently, so it shows which one answered."""
    return GOLDEN if release % 2 else np.full_like(GOLDEN, GOLDEN.sum(axis=1))


def make(release: int) -> dict[str, Any]:
    """Make a bundle of a release outside the disk under test."""
    path = make_null_bundle(
        BUNDLES, KEY, MODEL, release, PROFILE, op="copy" if release % 2 else "sum", padding_bytes=BALLAST_BYTES
    )
    return {"bundle": os.fspath(path)}


def operate(operation: str, bundle: str = "", registry: str = "") -> dict[str, Any]:
    """Run one slot operation, or a round of the follower at `registry`: {"s": duration} or {"error": ...}."""
    begun = time.monotonic()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        said = ""
        try:
            state = StateDir(STATE)
            act_as_owner(state)
            if os.environ.get("EDGERT_RIG_WITHOUT_FSYNC"):
                os.fsync = lambda fd: None
            store = SlotStore(state.models / MODEL)
            if operation == "install":
                install(Path(bundle), state, read_config(state))
            elif operation == "activate":
                store.activate(3600)
            elif operation == "mark-good":
                store.mark_good()
            elif operation == "rollback":
                store.rollback()
            elif operation == "channel":
                from edgert.follow.follower import ChannelFollower
                from edgert.follow.set_up import open_registry

                config = replace(read_config(state), follow=FollowConfig(registry))
                done = ChannelFollower(state, config, open_registry(config)).round()
                assert done.failure is None, done.failure
            elif operation == "collect":
                with store.installing():
                    store.collect()
        except BaseException as error:  # noqa: BLE001  # told, whatever it is
            said = f"{type(error).__name__}: {error}"
        os.write(writer, pickle.dumps(said))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        said = pickle.loads(pipe.read())
    os.waitpid(child, 0)
    return {"error": said} if said else {"s": time.monotonic() - begun}


def follow() -> dict[str, Any]:
    return ask(StateDir(STATE).control_socket, {"op": "sync", "model": MODEL}, 120.0)


def _sh(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


COMMANDS: dict[str, Callable[..., dict[str, Any]]] = {
    "begin": begin,
    "slots": slots,
    "make": make,
    "operate": operate,
    "follow": follow,
}
KEY = read_signing_key(KEY_FILE)


def main() -> None:
    if find_spec("urllib3"):  # else this device follows no channel
        importlib.import_module("edgert.follow.follower")
    with socket.create_server(("0.0.0.0", PORT)) as listener:
        while True:
            link, _ = listener.accept()
            with link, link.makefile("rw") as lines:
                for line in lines:
                    words = json.loads(line)
                    try:
                        answer = COMMANDS[words.pop("do")](**words)
                    except Exception as error:  # noqa: BLE001  # the host judges it
                        answer = {"error": f"{type(error).__name__}: {error}"}
                    lines.write(json.dumps(answer) + "\n")
                    lines.flush()


if __name__ == "__main__":
    main()
