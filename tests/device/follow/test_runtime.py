"""The follower changes the runtime, waits or refuses. Complete changes are in tests/end_to_end."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from edgert.bundle.channel import Entry
from edgert.config import read_config
from edgert.durable import locked
from edgert.environment import RuntimeOutcome, RuntimeResult, home_of
from edgert.errors import ChannelInvalid, DaemonUnreachable
from edgert.follow.decision import Action
from edgert.follow.record import Attempt, RecordStore
from edgert.follow.runtime import InstalledRuntimes, decide_runtime
from edgert.names import RUNTIME
from edgert.versions.boot_clock import BootClock
from edgert.versions.install import install
from edgert.versions.slot_store import SlotStore
from tests.support.devices import Device
from tests.support.runtime_homes import FIRST, release_of, stand_in_home
from tests.support.servers.hostile_registry import HostileRegistry
from tests.support.stand_ins.following import Events, failure_of, followed, following

NEW, OTHER = "2" * 16, "3" * 16
ENTRY = Entry(RUNTIME, 4, *("0" * 64,) * 3)
BYTES = b"a wheel"
NOBODY = 65534


@pytest.fixture
def device() -> Iterator[Device]:
    """A device with a HOME in a folder that every user may enter. Its daemon does not run."""
    device = Device(Path(tempfile.mkdtemp(prefix="edgert-")))
    device.folder.chmod(0o755)
    device.prepare()
    stand_in_home(device.folder / "home")
    yield device
    shutil.rmtree(device.folder, ignore_errors=True)


def home(device: Device) -> Path:
    return device.folder / "home"


def offer(device: Device, registry: HostileRegistry) -> str:
    """Offer a runtime; return its id."""
    release = release_of(4, BYTES, device)
    registry.put_channel(device.key, 1, registry.put_runtime(release, BYTES, device.key))
    return release.targets[0].id


@pytest.mark.parametrize(
    ("runtimes", "tried", "newest", "action", "says"),
    [
        (InstalledRuntimes(FIRST), None, 0, Action.FETCH, "is wanted"),
        (InstalledRuntimes(NEW), None, 0, Action.NOTHING, "is live"),
        (InstalledRuntimes(NEW, NEW), Attempt("a"), 0, Action.WAIT, "is on trial"),
        (InstalledRuntimes(OTHER, OTHER), None, 0, Action.WAIT, "waits for another trial"),
        (
            InstalledRuntimes(FIRST, "", RuntimeOutcome(RuntimeResult.ROLLED_BACK, NEW, "slow")),
            Attempt("a"),
            0,
            Action.NOTHING,
            "it was rolled back (slow)",
        ),
        (
            InstalledRuntimes(FIRST, "", RuntimeOutcome(RuntimeResult.ROLLED_BACK, NEW, "slow")),
            None,
            0,
            Action.FETCH,
            "is wanted",
        ),
        (InstalledRuntimes(FIRST), Attempt("a", "it is bad"), 0, Action.NOTHING, "it is bad"),
        (
            InstalledRuntimes(FIRST, "", RuntimeOutcome(RuntimeResult.RUNNING, NEW)),
            Attempt("a"),
            0,
            Action.FETCH,
            "is wanted",
        ),
        (
            InstalledRuntimes(OTHER, "", RuntimeOutcome(RuntimeResult.KEPT, OTHER)),
            Attempt("a"),
            4,
            Action.NOTHING,
            "another runtime became live here",
        ),
        (
            InstalledRuntimes(FIRST, "", RuntimeOutcome(RuntimeResult.KEPT, NEW)),
            Attempt("a"),
            0,
            Action.NOTHING,
            "another runtime became live here",
        ),
    ],
)
def test_the_decision_follows_from_the_runtimes_and_the_earlier_attempt(
    runtimes: InstalledRuntimes, tried: Attempt | None, newest: int, action: Action, says: str
) -> None:
    decision = decide_runtime(ENTRY, NEW, runtimes, tried, newest)
    assert (decision.action, says in decision.text) == (action, True), decision


def test_a_halted_runtime_is_not_installed() -> None:
    assert decide_runtime(replace(ENTRY, halted=True), NEW, InstalledRuntimes(FIRST), None, 0).action is Action.NOTHING


def test_a_runtime_has_no_trial_limits() -> None:
    with pytest.raises(ChannelInvalid, match="golden samples"):
        replace(ENTRY, limits={"p99_ms": 8.0})


def test_the_new_environment_is_made_once_and_is_complete_before_the_daemon_is_asked(
    device: Device, registry: HostileRegistry
) -> None:
    new = offer(device, registry)
    for _ in range(2):
        assert isinstance(failure_of(following(device, registry.address, home=home(device))), DaemonUnreachable)
        assert (home(device) / "venvs" / new / ".complete").exists()
    assert sum("blobs" in path for path in registry.asked) == 3, "the statement, the envelope and the wheel, once each"
    assert (home(device) / "venv").readlink().name == FIRST


def test_a_runtime_waits_for_a_bootstrap_and_for_a_deployment_and_for_the_trial_of_a_model(
    device: Device, registry: HostileRegistry
) -> None:
    offer(device, registry)

    def waits(says: str) -> None:
        (text,) = followed(following(device, registry.address, home=home(device)))
        assert "waits" in text
        assert says in text

    with locked(home(device) / "working"):
        waits("a bootstrap runs on this device")
    clock = BootClock()
    (home(device) / "setup").write_text(
        f"token=x\nboot={clock.boot_id}\nuntil={clock.now_s() + 600:.0f}\nwho=me@host\n"
    )
    waits("a bootstrap is in progress on this device, by me@host")
    (home(device) / "setup").unlink()
    token = device.run("claim", "echo", "--by", "me@host")["token"]
    waits("a deployment of echo is in progress")
    device.run("unclaim", token)
    install(device.bundle(), device.state, read_config(device.state))
    SlotStore(device.state.models / "echo").activate(600)
    waits("echo is on trial")


def test_models_wait_for_the_trial_of_a_runtime(device: Device, registry: HostileRegistry) -> None:
    registry.put_channel(device.key, 1, registry.put_release(device.bundle(release=2)))
    (home(device) / "trial").write_text(f"old={FIRST}\nnew={NEW}\n")
    (text,) = followed(following(device, registry.address, home=home(device)))
    assert text == "release 2 of echo waits: a new runtime is on trial"


def test_a_runtime_that_the_follower_may_not_change_is_refused(device: Device, registry: HostileRegistry) -> None:
    offer(device, registry)
    events, follower = Events(), following(device, registry.address, home=home(device))
    for folder in (home(device) / "venvs", home(device)):
        folder.chmod(0o555)
    if os.geteuid() == 0:
        for path in (device.state.root, *device.state.root.rglob("*")):
            os.chown(path, NOBODY, NOBODY)
        os.seteuid(NOBODY)
    try:
        follower = following(device, registry.address, events, home=home(device))
        for _ in range(2):
            assert "so the follower cannot change it: run edgert bootstrap" in followed(follower)[0]
    finally:
        if os.getuid() == 0:
            os.seteuid(0)
        for folder in (home(device), home(device) / "venvs"):
            folder.chmod(0o755)
    assert events.names == ["refused"]


def test_a_runtime_that_bootstrap_brought_counts_as_the_release_with_the_same_content(
    device: Device, registry: HostileRegistry
) -> None:
    new = offer(device, registry)
    shutil.copytree(home(device) / "venvs" / FIRST, home(device) / "venvs" / new)
    (home(device) / "venv").unlink()
    (home(device) / "venv").symlink_to(f"venvs/{new}")
    assert followed(following(device, registry.address, home=home(device))) == [f"release 4 of {RUNTIME} is live"]
    assert RecordStore(device.state).read().runtime == 4
    assert (home(device) / "venvs" / new / "release").read_text() == "4\n"


def test_the_home_of_an_environment_is_the_folder_that_bootstrap_made(device: Device) -> None:
    assert home_of(home(device) / "venvs" / FIRST) == home(device).resolve()
    assert home_of(home(device) / "venv") == home(device).resolve()
    assert home_of(device.folder) is None
