"""Every point at which a slot operation can be interrupted, and the state after the interruption.

    python -m hil.crash_points              # try all points, and print the table of docs/reliability.md
    python -m hil.crash_points --list       # try all points, and print a row for each point
    python -m hil.crash_points --only "follow a channel"

A point is a call of the C library that changes files: open for writing, write, fsync, rename, mkdir, unlink ... At
each point, the operation of a new device is killed, or the call fails with ENOSPC or EIO. Then four things must hold.
The device has every byte of the old version or of the new version. A reported error is an EdgeRTError. The same release
can be deployed again. No leftover file stays. The preloaded library `faults.c` counts the calls and injects the fault.

An operation changes the slots, for example installs a bundle. One operation installs a delta that has a patch, a
compressed file and an unchanged file, and omits the files that the device already has. In other operations, the device
itself follows a channel, from its request to the beginning of the trial. If the channel names a runtime, the points end
when the environment of the runtime is complete. hil/runtime_cuts.py tests the trial of a runtime.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import gc
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from edgert.bundle.bundle_file import open_bundle
from edgert.bundle.delta import ENCODINGS, parts_of
from edgert.config import read_config
from edgert.errors import BundleCorrupt, ConfigInvalid, DaemonUnreachable, EdgeRTError
from edgert.versions.install import held_files, install
from edgert.versions.installed import load_version
from edgert.versions.slot_store import STAGE_NAME, SlotStore
from edgert.versions.slots import ON_TRIAL, SLOT_NAMES
from edgert.versions.trial_limits import TrialLimits
from edgert_deploy.rollout.delta import Deltas, DeviceFiles
from tests.support.devices import Device
from tests.support.paths import IN_MEMORY, ROOT
from tests.support.runtime_homes import FIRST, WHEEL, release_of, stand_in_home
from tests.support.servers.hostile_registry import HostileRegistry, hostile_registry
from tests.support.stand_ins.following import followed, following

MODEL = "echo"
# Numbers of releases, which also determine the weights.
OLD = 1
NEW = 2
OTHER = 3  # no release has this number; it only gives other weights
WEIGHTS, WEIGHTS_BYTES = "null/weights.bin", 64 * 1024
FAULTS = {"killed": 0, "ENOSPC": errno.ENOSPC, "EIO": errno.EIO}
NEVER = 1 << 30
RUN_S_MAX = 600.0
SOURCE = ROOT / "hil/support/faults.c"


@dataclass(frozen=True)
class Point:
    """One operation, interrupted at one call. `serves` is the release that is live afterwards.

    `problem` is "" if the device kept the promise.
    """

    operation: str
    index: int
    call: str
    fault: str
    serves: int | None
    problem: str = ""


@dataclass(frozen=True)
class Delivery:
    """The new release. The host sends the file `sent`; if the device cannot use it, the host sends `bundle`.

    If `registry` is an address, the device itself fetches the release from this registry. If `runtime` is the id of a
    runtime, the release is this runtime.
    """

    bundle: Path
    sent: Path
    registry: str = ""
    runtime: str = ""


Act = Callable[[Device, Delivery], object]


def try_all(say: Callable[[Point], None] = lambda _: None, only: str = "") -> list[Point]:
    """Try every point of every operation (or of the operation `only`) with every fault. Raises ConfigInvalid."""
    # On a busy disk, the flushes alone would take minutes.
    with (
        tempfile.TemporaryDirectory(prefix="edgert-crash-") as made,
        tempfile.TemporaryDirectory(prefix="edgert-crash-", dir=IN_MEMORY) as folder,
    ):
        library = Path(made) / "faults.so"
        compiler = shutil.which("cc")
        if compiler is None:
            raise ConfigInvalid("no C compiler is installed: apt-get install gcc libc6-dev")
        words = [compiler, "-shared", "-fPIC", "-O1", "-U_FORTIFY_SOURCE", "-o", str(library), str(SOURCE), "-ldl"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=120)
        if done.returncode != 0:
            raise ConfigInvalid(f"{SOURCE.name} does not compile: {done.stderr.strip()[-600:]}")
        command = [sys.executable, "-m", "hil.crash_points", "--inside", str(library), folder]
        command += ["--only", only] if only else []
        # The registry of this test has no TLS. So no follower reads the authorities of the system, which takes 20 ms.
        environment = {**os.environ, "LD_PRELOAD": str(library), "SSL_CERT_FILE": os.devnull}
        (Path(made) / "sync").symlink_to("/bin/true")
        environment["PATH"] = f"{made}:{os.environ['PATH']}"
        process = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        points = []
        assert process.stdout is not None
        for line in process.stdout:
            points.append(Point(**json.loads(line)))
            say(points[-1])
        assert process.wait(RUN_S_MAX) == 0, "the process that tries the points ended early"
        return points


def _inside(library: str, folder: Path, only: str) -> None:
    faults = _Faults(library)
    with hostile_registry() as running:
        for name, (prepare, pack, act) in OPERATIONS.items():
            if only not in ("", name):
                continue
            template = Device(folder / name)
            template.prepare()
            prepare(template)
            for point in _points(faults, template, pack(template, running), folder / f"{name}-now", name, act):
                print(json.dumps(asdict(point)), flush=True)


def _points(faults: _Faults, template: Device, new: Delivery, at: Path, name: str, act: Act) -> Iterator[Point]:
    known: dict[str, tuple[int | None, str]] = {}  # only the files decide how a device recovers: do equal ones once
    for index, call in enumerate(_calls(faults, template, new, at, act)):
        for fault, number in FAULTS.items():
            device = _copy(template, at)
            run, arm = partial(act, device, new), partial(faults.arm, device.folder, index, number)
            code, said = (_in_child if fault == "killed" else _ended)(run, arm, faults)
            files = _files(device)
            if files not in known:
                known[files] = _recovered(device, new)
            serves, problem = known[files]
            yield Point(name, index, call, fault, serves, _wrong_end(fault, code, said) or problem)


def _calls(faults: _Faults, template: Device, new: Delivery, at: Path, act: Act) -> list[str]:
    """Return the calls of an undisturbed operation."""
    device, log = _copy(template, at), at.with_name("calls")
    run, arm = partial(act, device, new), partial(faults.arm, device.folder, NEVER, 0, log)
    code, said = _ended(run, arm, faults)
    assert code == 0, said
    return log.read_text().splitlines()


def _wrong_end(fault: str, code: int, said: str) -> str:
    """Return the problem if the operation did not end as it must after `fault`; else ""."""
    if fault == "killed":
        return "" if code == -signal.SIGKILL else f"it was not killed: {code} {said}"
    # If a clean-up failed, the next clean-up may do its work. A reported error must be an EdgeRTError.
    return "" if code in (0, 1) else f"it ended with another error: {said}"


def _files(device: Device) -> str:
    """Return a digest of the names, modes and contents of all files of `device`."""
    digest = hashlib.sha256()
    for path in sorted(device.folder.rglob("*")):
        content = b""
        if path.is_symlink():
            content = os.fsencode(os.readlink(path))
        elif path.is_file():
            content = path.read_bytes()
        name = path.relative_to(device.folder)
        digest.update(f"{name} {path.lstat().st_mode} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _recovered(device: Device, new: Delivery) -> tuple[int | None, str]:
    """Return the release that is live, and the problem if `device` broke the promise."""
    live = None
    try:
        live = active_release(device)
        assert live in (OLD, NEW), f"release {live} is live"
        recover(device, new)
    except (AssertionError, EdgeRTError, OSError) as error:
        return live, f"{type(error).__name__}: {error}"
    return live, ""


def active_release(device: Device) -> int | None:
    """Return the live release, after checking every byte of it."""
    store = _store(device)
    slots = store.read()
    if slots.live is None:
        return None
    config = read_config(device.state)
    version = load_version(store.live_folder(slots), slots.live.digest, config)
    for entry in version.manifest.files_for(version.manifest.target_for(config.profile, config.machine)):
        there = (version.folder / entry.path).read_bytes()
        assert hashlib.sha256(there).hexdigest() == entry.sha256, (
            f"{entry.path} of release {slots.live.release} is not whole"
        )
    return slots.live.release


def recover(device: Device, new: Delivery) -> None:
    """Deploy the same release without an operator, and check that no garbage is left."""
    store = _store(device)
    if store.read().state in ON_TRIAL:
        store.mark_good(force=True)
    if new.runtime:
        _runtime_again(device, new)
        return
    if new.registry:
        _followed_again(device, new)
        return
    try:
        installed = install(new.sent, device.state, read_config(device.state))
    except BundleCorrupt:  # the base of the delta is gone, so the host sends the whole bundle
        assert new.sent != new.bundle
        installed = install(new.bundle, device.state, read_config(device.state))
    if not installed.already_live:
        store.activate(60)
        store.mark_good()
    assert active_release(device) == NEW, "the release cannot be deployed again"
    with store.installing():
        store.collect()
    named = {slot for slot in SLOT_NAMES if store.read().version(slot) is not None}
    folders = {path.name for path in store.folder.iterdir() if path.is_dir()}
    assert folders == named, f"garbage stays: {folders - named}"


def _followed_again(device: Device, new: Delivery) -> None:
    """Let the device follow its channel again, and check that no fetched file is left."""
    shutil.rmtree(device.state.root / "claims", ignore_errors=True)  # the claim of a killed round ends by itself
    followed(following(device, new.registry))
    if _store(device).read().state in ON_TRIAL:
        _store(device).mark_good(force=True)
    assert active_release(device) == NEW, "the release is not live after the next round"
    followed(following(device, new.registry))
    left = [path.name for path in device.state.incoming.iterdir()]
    left += [path.name for path in device.state.follow.iterdir() if path.name.endswith(".new")]
    assert not left, f"garbage stays: {left}"


def _runtime_again(device: Device, new: Delivery) -> None:
    """Let the device follow again. Check that the runtime in use stays, and that the new runtime becomes complete."""
    home = device.folder / "home"
    _follow_runtime(device, new)
    assert (home / "venv").readlink().name == FIRST, "a runtime is in use that was not on trial"
    about = json.loads((home / "venvs" / new.runtime / ".complete").read_bytes())
    assert list(about["wheels"]) == [WHEEL], "the new runtime is not whole"
    left = [path.name for path in home.iterdir() if path.name == "wheels" or path.name.endswith(".new")]
    left += [path.name for path in device.state.follow.iterdir() if path.name.endswith(".new")]
    assert not left, f"garbage stays: {left}"


# --- the operations, and the state before each ----------------------------------------------------------


def _keep(device: Device, release: int) -> None:
    _install(device, device.bundle(release=release, padding=_weights(release)))
    _store(device).activate(60)
    _store(device).mark_good()


def _install(device: Device, bundle: Path) -> None:
    install(bundle, device.state, read_config(device.state))


def _serving_old(device: Device) -> None:
    _keep(device, OLD)


def _staged(device: Device) -> None:
    _serving_old(device)
    _install(device, device.bundle(release=NEW))


def _on_trial(device: Device) -> None:
    _staged(device)
    _store(device).activate(60)


def _watched(device: Device) -> None:
    """Put a version on trial with limits, and begin the measurement."""
    _to_watch(device)
    _store(device).start_watch()


def _to_watch(device: Device, *, unattended: bool = False) -> None:
    _staged(device)
    _store(device).activate(60, TrialLimits({"p99_ms": 8.0}, unattended=unattended))


def _unattended(device: Device) -> None:
    _to_watch(device, unattended=True)
    _store(device).start_watch()


def _littered(device: Device) -> None:
    """Leave a version that failed its trial, and an incomplete installation that no state names."""
    _on_trial(device)
    _store(device).rollback()
    stage = _store(device).folder / STAGE_NAME
    shutil.copytree(_store(device).slot_folder("b"), stage)
    next(stage.glob("null/*")).unlink()


def _staged_otherwise(device: Device) -> None:
    """Stage a release that has the number of the new release and other weights."""
    _serving_old(device)
    _install(device, device.bundle(release=NEW, padding=_weights(OTHER)))


def _weights(release: int) -> bytes:
    """Return incompressible weights. The weights of two releases differ only a little."""
    data = bytearray(random.Random(0).randbytes(WEIGHTS_BYTES))
    data[: 64 * release] = random.Random(release).randbytes(64 * release)
    return bytes(data)


def _whole(device: Device, _: HostileRegistry) -> Delivery:
    bundle = device.bundle(release=NEW)
    return Delivery(bundle, bundle)


def _delta(device: Device, _: HostileRegistry) -> Delivery:
    """Make the delta of a release with a patch, a compressed file and an unchanged file.

    The device keeps its other files. The host has the weights that the device received last.
    """
    long = {"op": "copy", "note": " ".join(map(str, range(500)))}
    bundle = device.bundle(release=NEW, padding=_weights(NEW), program=long, reference={"op": "copy"})
    deltas = Deltas(device.folder / "cache")
    has = DeviceFiles.from_answer(device.run("list-files", MODEL))
    sha256 = [file[1] for file in has.files if file[0] == WEIGHTS][-1]
    deltas.files.put(sha256, [held_files(device.state, MODEL)[sha256]])
    with open_bundle(bundle, trusted=None) as opened:
        target = opened.manifest.targets[0]
    shipment = deltas.make(bundle, target, has)
    assert {part.encoding for part in parts_of(shipment.path)} == set(ENCODINGS)
    assert shipment.had > 0
    return Delivery(bundle, shipment.path)


def _channel(device: Device, registry: HostileRegistry) -> Delivery:
    """Publish a release that shares only the program with the old release. Make the device follow the channel."""
    # The files are small, so that each arrives in one piece, and every run makes the same calls.
    bundle = device.bundle(release=NEW, padding=_weights(NEW)[:4096])
    registry.put_channel(device.key, 1, registry.put_release(bundle))
    following(device, registry.address)
    return Delivery(bundle, bundle, registry.address)


def _follow(device: Device, new: Delivery) -> None:
    followed(following(device, new.registry))


def _with_home(device: Device) -> None:
    _serving_old(device)
    stand_in_home(device.folder / "home")


def _runtime_channel(device: Device, registry: HostileRegistry) -> Delivery:
    """Publish a runtime with one small wheel."""
    release = release_of(1, b"a wheel" * 100, device)
    registry.put_channel(device.key, 1, registry.put_runtime(release, b"a wheel" * 100, device.key))
    following(device, registry.address)
    return Delivery(device.folder, device.folder, registry.address, release.targets[0].id)


def _follow_runtime(device: Device, new: Delivery) -> None:
    """Fetch the runtime and make its environment. No trial begins, because no daemon runs."""
    with contextlib.suppress(DaemonUnreachable):
        followed(following(device, new.registry, home=device.folder / "home"))


def _collect(device: Device, _: Delivery) -> None:
    store = _store(device)
    with store.installing():
        store.collect()


def _held(device: Device, _: Delivery) -> None:
    live = _store(device).read().live
    assert live is not None
    _store(device).pass_limits(live.digest)


def _deliver(device: Device, new: Delivery) -> None:
    _install(device, new.sent)


# name: (the function that makes the state before, the function that makes the new release, the operation to interrupt)
OPERATIONS: dict[str, tuple[Callable[[Device], None], Callable[[Device, HostileRegistry], Delivery], Act]] = {
    "install": (_serving_old, _whole, _deliver),
    "install while another version is staged": (_staged, _whole, _deliver),
    "install over leftovers": (_littered, _whole, _deliver),
    "install a delta": (_serving_old, _delta, _deliver),
    "install a delta over its base version": (_staged_otherwise, _delta, _deliver),
    "activate": (_staged, _whole, lambda device, _: _store(device).activate(60)),
    "mark-good": (_on_trial, _whole, lambda device, _: _store(device).mark_good()),
    "rollback": (_on_trial, _whole, lambda device, _: _store(device).rollback()),
    "start to watch limits": (_to_watch, _whole, lambda device, _: _store(device).start_watch()),
    "limits held": (_watched, _whole, _held),
    "limits held, unattended": (_unattended, _whole, _held),
    "collect": (_littered, _whole, _collect),
    "follow a channel": (_serving_old, _channel, _follow),
    "follow a channel's runtime": (_with_home, _runtime_channel, _follow_runtime),
}


def _store(device: Device) -> SlotStore:
    return SlotStore(device.state.models / MODEL)


# --- one interrupted run -------------------------------------------------------------------------------------


class _Faults:
    """The preloaded library."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        self._library.faults_arm.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int, ctypes.c_int]
        self._library.faults_disarm.restype = ctypes.c_char_p

    def arm(self, below: Path, index: int, number: int, log: Path | None = None) -> None:
        descriptor = -1 if log is None else os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._library.faults_arm(os.fsencode(below), index, number, descriptor)

    def disarm(self) -> None:
        self._library.faults_disarm()


def _ended(act: Callable[[], object], arm: Callable[[], object], faults: _Faults) -> tuple[int, str]:
    """Run `act`. Return 0, or 1 after an EdgeRTError, or 2 after another error; also return the message."""
    try:
        arm()
        act()
    except EdgeRTError as error:
        return 1, error.message
    except Exception as error:  # noqa: BLE001  # it is what must not happen, and is told
        return 2, f"{type(error).__name__}: {error}"
    finally:
        faults.disarm()
    return 0, ""


def _in_child(act: Callable[[], object], arm: Callable[[], object], faults: _Faults) -> tuple[int, str]:
    """Do the same in a fork. If the fault kills the fork, the code is -SIGKILL."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code, said = 2, "it ended otherwise"
        try:
            gc.disable()  # a collection would copy all the memory that this fork shares with its parent
            code, said = _ended(act, arm, faults)
        finally:
            os.write(writer, said.encode()[:4000])
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read().decode()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said


def _copy(template: Device, at: Path) -> Device:
    """Copy the files that an operation changes, but neither the bundles nor the host's cache."""
    shutil.rmtree(at, ignore_errors=True)
    for folder in (template.state.root, template.folder / "home"):
        if folder.exists():
            shutil.copytree(folder, at / folder.name, symlinks=True)
    return Device(at, template.key)


def table(points: list[Point]) -> str:
    """Return Markdown: a row per call, and the live release after each fault."""
    lines = ["| operation | | call | killed | ENOSPC | EIO |", "|---|---|---|---|---|---|"]
    rows: dict[tuple[str, int, str], dict[str, str]] = {}
    for point in points:
        word = "FAILED" if point.problem else {OLD: "old", NEW: "new"}[point.serves or 0]
        rows.setdefault((point.operation, point.index, point.call), {})[point.fault] = word
    for (operation, index, call), words in rows.items():
        name, _, path = call.partition(" ")
        cells = " | ".join(words[fault] for fault in FAULTS)
        lines.append(f"| {operation} | {index + 1} | {name} `{path.removeprefix('state/models/echo/')}` | {cells} |")
    return "\n".join(lines)


def summary(points: list[Point]) -> str:
    """Return Markdown: a row per operation, with the number of runs that left each release live."""
    lines = [
        "| operation | points | runs | old version live | new version live | failed |",
        "|---|---|---|---|---|---|",
    ]
    for operation in OPERATIONS:
        if not (runs := [point for point in points if point.operation == operation]):
            continue
        live = [sum(point.serves == release and not point.problem for point in runs) for release in (OLD, NEW)]
        calls, failed = len({point.index for point in runs}), sum(bool(point.problem) for point in runs)
        lines.append(f"| {operation} | {calls} | {len(runs)} | {live[0]} | {live[1]} | {failed} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=OPERATIONS, default="", help="one operation")
    parser.add_argument("--list", action="store_true", help="show every call")
    parser.add_argument("--inside", nargs=2, metavar=("LIBRARY", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        _inside(options.inside[0], Path(options.inside[1]), options.only)
        return
    points = try_all(only=options.only)
    print(table(points) if options.list else summary(points))
    failed = [point for point in points if point.problem]
    for point in failed:
        print(point, file=sys.stderr)
    print(f"{len(points)} runs, {len(failed)} failed", file=sys.stderr)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
