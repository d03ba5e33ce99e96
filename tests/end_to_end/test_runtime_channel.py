"""A device changes its runtime for a channel in a real registry, with real wheels, pip and daemons."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from edgert.bundle.channel import Entry
from edgert.bundle.signing import read_public_key
from edgert.config import read_config
from edgert.follow.set_up import open_registry
from edgert.names import RUNTIME
from edgert_deploy.bootstrap.own_wheel import own_wheel
from edgert_deploy.bootstrap.runtime_release import publish_runtime
from edgert_deploy.rollout.channels import Channels, SeenCounters
from tests.support.devices import events, wait_until
from tests.support.runtime_homes import FIRST, HomeDevice, a_device_with_home, release_of, wheel_with
from tests.support.servers.registries import RegistryServer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RegistryServer]:
    with RegistryServer.in_folder(tmp_path_factory.mktemp("registry")) as running:
        yield running


@pytest.fixture
def device(server: RegistryServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HomeDevice]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with a_device_with_home(
        own_wheel(), f"oci+http://localhost:{server.port}/{tmp_path.name.replace('_', '-').lower()}"
    ) as made:
        yield made


def offer(server: RegistryServer, device: HomeDevice, number: int, wheel: Path, **changes: object) -> str:
    """Publish a runtime and offer it on `stable`; return its id."""
    registry, release = open_registry(read_config(device.state)), release_of(number, wheel.read_bytes(), device)
    published = publish_runtime(registry, release, {release.targets[0].wheels[0].sha256: wheel}, device.key)
    entry = Entry(RUNTIME, number, published.digest, published.envelope, published.oci_manifest, **changes)  # type: ignore[arg-type]
    trusted = (read_public_key(device.state.keys / "test.pem"),)
    channels = Channels(registry, trusted, SeenCounters(device.folder / "seen.json"))
    channels.change("stable", lambda entries: (entry,), device.key)
    return release.targets[0].id


def until_decided(device: HomeDevice) -> None:
    wait_until(lambda: not (device.home / "trial").exists(), "the trial of the runtime is over", 200.0, pause_s=0.2)
    wait_until(lambda: device.edgertd("status", "--json").returncode == 0, "edgertd answers", pause_s=0.5)


def follow_until(device: HomeDevice, *says: str) -> None:
    """Run rounds until the text of one contains any of `says`. The daemon may run rounds of its own."""
    said = [""]

    def done() -> bool:
        said[0] = device.follow()
        return any(text in said[0] for text in says)

    try:
        wait_until(done, says[-1], pause_s=0.5)
    except AssertionError as error:
        raise AssertionError(f"{error}: it says {said[0]}\n{device.log()}") from error


@pytest.mark.timeout(900)
def test_a_runtime_that_serves_is_kept_after_its_trial_and_a_runtime_that_fails_is_rolled_back(
    server: RegistryServer, device: HomeDevice, tmp_path: Path
) -> None:
    new = offer(
        server, device, 1, wheel_with(tmp_path / "good", "edgert/extras.py", "\n# another version\n"), watch_s=200.0
    )
    live = f"release 1 of {RUNTIME} is live"
    follow_until(device, "is on trial", live)
    until_decided(device)
    follow_until(device, live)
    wait_until(lambda: device.in_use == device.daemon_runtime() == new, "the daemon of that runtime runs")
    assert device.runtimes == {FIRST, new}, "the one before is kept for the way back"
    wait_until(lambda: device.serving()["state"] == "ready", "it serves")
    assert not list(device.state.incoming.glob("*.part")), "nothing that was fetched is left"

    broken = wheel_with(tmp_path / "broken", "edgert/daemon/supervisor.py", "\nraise SystemExit('it does not serve')\n")
    offer(server, device, 2, broken, watch_s=3.0)
    back = f"release 2 of {RUNTIME} is not tried again: it was rolled back (the daemon did not come up"
    follow_until(device, "is on trial", back)
    until_decided(device)
    follow_until(device, back)
    wait_until(lambda: device.in_use == device.daemon_runtime() == new, "the daemon of that runtime runs")
    wait_until(lambda: device.serving()["state"] == "ready", "it serves")
    told = {(event["event"], event.get("release")) for event in events(device) if event.get("model") == RUNTIME}
    assert {("kept", 1), ("rolled_back", 2)} <= told
    steps = device.status()["channel"]["steps"]
    assert any("not tried again" in step for step in steps)
