"""One host at a time sets a device up. This machine is the device, and two cache folders stand for two hosts.

tests/end_to_end/test_ssh.py has two real bootstraps at once.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgert.errors import DeployUnderWay, DeviceError, DeviceUnreachable, StorageFailed
from edgert_deploy.bootstrap.runtime import _WITH_LOCK
from edgert_deploy.bootstrap.uninstall import uninstall
from edgert_deploy.devices.claims import check_not_set_up, claimed, record_folders, setting_up
from edgert_deploy.devices.inventory import Device
from edgert_deploy.devices.remote_daemon import RemoteDaemon
from edgert_deploy.devices.transports import Result
from edgert_deploy.devices.transports.local import LocalTransport
from tests.support.devices import WAIT_S_MAX

LONG_S = 1000.0  # a command that lasts longer than the first claim


@pytest.fixture
def device(tmp_path: Path) -> Device:
    return Device(
        "board", "ssh", "pi@board", "p", str(tmp_path / "a/state"), home=str(tmp_path / "b/home"), host_key="k"
    )


@pytest.fixture
def on_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Become another host."""
    return lambda name: monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "hosts" / name))


def refused(device: Device) -> str:
    with pytest.raises(DeployUnderWay) as caught, setting_up(device, LocalTransport(device)):
        pass
    return caught.value.message


def test_a_second_host_is_refused_and_a_device_that_was_not_set_up_keeps_no_file(
    device: Device, on_host: Callable[[str], None], tmp_path: Path
) -> None:
    on_host("one")
    with setting_up(device, LocalTransport(device)) as held:
        assert held.run(["echo", "hello"], LONG_S).stdout == "hello\n"
        assert "from this host" in refused(device)
        on_host("two")
        assert "for at most" in refused(device)
        with pytest.raises(DeployUnderWay):
            uninstall(device, LocalTransport(device), purge=True)
        on_host("one")
    assert not (tmp_path / "b").exists()
    on_host("two")
    with setting_up(device, LocalTransport(device)):
        Path(device.home, "venvs").mkdir()
    assert sorted(os.listdir(device.home)) == ["lock", "receipt", "venvs", "working"]


def test_a_host_that_has_lost_its_claim_runs_no_further_command(
    device: Device, on_host: Callable[[str], None], tmp_path: Path
) -> None:
    on_host("one")
    with setting_up(device, LocalTransport(device)) as held:
        claim = Path(device.home, "setup")
        claim.write_text(claim.read_text().replace("token=", "token=f"))
        for work in (
            lambda: held.run(["touch", str(tmp_path / "done")], LONG_S),
            lambda: held.put(tmp_path / "large", str(tmp_path / "done")),
        ):
            with (tmp_path / "large").open("wb") as file:
                file.truncate(100_000_000)
            with pytest.raises(DeployUnderWay, match="took the claim"):
                work()
    assert not (tmp_path / "done").exists()
    assert claim.exists()  # the other host's claim


def test_the_claim_of_a_dead_host_blocks_other_hosts_until_it_expires_but_not_its_own(
    device: Device, on_host: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = Path(device.home, "setup")

    def vanish() -> None:
        on_host("one")
        with setting_up(device, LocalTransport(device)):
            there = claim.read_text()
            note = next(Path(os.environ["XDG_CACHE_HOME"], "edgert/claims").iterdir())
            noted = note.read_text()
        Path(device.home).mkdir(parents=True, exist_ok=True)
        claim.write_text(there)
        note.write_text(noted)

    vanish()
    with setting_up(device, LocalTransport(device)):
        pass
    vanish()
    on_host("two")
    assert "for at most" in refused(device)
    lines = claim.read_text().splitlines()
    claim.write_text("".join(f"{'until=1' if line.startswith('until=') else line}\n" for line in lines))
    with setting_up(device, LocalTransport(device)):
        pass
    vanish()
    on_host("two")
    monkeypatch.setenv("EDGERT_BOOT_ID", "another")
    with setting_up(device, LocalTransport(device)):
        pass


def test_claims_whose_answers_were_lost_do_not_block_their_own_host(
    device: Device, on_host: Callable[[str], None]
) -> None:
    class Cut(LocalTransport):
        """A link that breaks before the answer of the first command."""

        def run(self, *words: Any) -> Result:
            super().run(*words)
            raise DeviceUnreachable("no link")

    on_host("one")
    for _ in range(2):
        with pytest.raises(DeviceUnreachable), setting_up(device, Cut(device)):
            pass
    on_host("two")
    for _ in range(2):
        assert "for at most" in refused(device)
    on_host("one")
    check_not_set_up(device, LocalTransport(device))
    with setting_up(device, LocalTransport(device)):
        pass
    on_host("two")
    with setting_up(device, LocalTransport(device)):
        pass


def test_a_command_that_continues_without_its_host_blocks_others_until_it_ends(
    device: Device, on_host: Callable[[str], None]
) -> None:
    on_host("one")
    Path(device.home).mkdir(parents=True)
    words = ["sh", "-c", _WITH_LOCK, "sh", f"{device.home}/working", "sh", "-c", "echo begun; exec cat"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as orphan:
        assert orphan.stdout is not None
        assert orphan.stdin is not None
        orphan.stdout.readline()
        assert "is still running" in refused(device)
        orphan.stdin.close()
        orphan.wait(WAIT_S_MAX)
    with setting_up(device, LocalTransport(device)):
        pass


@pytest.fixture
def daemon(device: Device) -> RemoteDaemon:
    """Set the device up, without a daemon that runs."""
    program = Path(device.home, "venv/bin/edgertd")
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m edgert.cli "$@"\n')
    program.chmod(0o755)
    Path(device.home, "receipt").touch()
    Path(device.state).mkdir(parents=True)
    Path(device.state, "config.toml").write_text('device = "board"\nprofile = "this-machine"\n')
    return RemoteDaemon(LocalTransport(device), device)


def test_a_deployment_and_a_bootstrap_of_the_same_device_exclude_each_other(
    device: Device, daemon: RemoteDaemon, on_host: Callable[[str], None]
) -> None:
    link = daemon.transport
    on_host("one")
    with claimed(daemon, "digits"):
        assert re.search("deployment of digits is in progress .* from this host", refused(device))
        on_host("two")
        assert re.search(r"deployment of digits is in progress .*, by .*@", refused(device))
        on_host("one")
    with setting_up(device, link):  # the refused deployment and the refused set-up have left no claim
        with pytest.raises(DeployUnderWay, match="from this host"), claimed(daemon, "digits"):
            pass
        on_host("two")
        with pytest.raises(DeployUnderWay, match="for at most"), claimed(daemon, "digits"):
            pass
        on_host("one")


def test_the_claim_of_a_dead_deployment_blocks_set_ups_by_other_hosts_but_not_by_its_own(
    device: Device, daemon: RemoteDaemon, on_host: Callable[[str], None], tmp_path: Path
) -> None:
    on_host("one")
    places = {tmp_path / "hosts": tmp_path / "hosts.kept", Path(device.state, "claims"): tmp_path / "claims.kept"}
    with claimed(daemon, "digits"):
        for there, kept in places.items():
            shutil.copytree(there, kept)
    for there, kept in places.items():
        shutil.copytree(kept, there, dirs_exist_ok=True)
    on_host("two")
    assert "a deployment of digits is in progress" in refused(device)
    on_host("one")
    with setting_up(device, daemon.transport):
        assert daemon.status().claims == ()


def test_a_trial_of_a_runtime_is_not_disturbed_by_any_host(device: Device, on_host: Callable[[str], None]) -> None:
    on_host("one")
    trial = Path(device.home, "trial")
    trial.parent.mkdir(parents=True)
    now_s = int(float(Path("/proc/uptime").read_text().split()[0]))
    trial.write_text(f"old=1\nnew=2\nboot=b\nuntil={now_s + 600}\nstarts=1\nunit=\n")
    with pytest.raises(DeployUnderWay, match=r"new runtime .* within (600|59\d) s\. .*edgert bootstrap board"):
        check_not_set_up(device, LocalTransport(device))
    trial.unlink()
    check_not_set_up(device, LocalTransport(device))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a file in place of /proc/uptime")
def test_a_claim_does_not_outlast_the_restart_of_a_container(
    device: Device, on_host: Callable[[str], None], tmp_path: Path
) -> None:
    """An LXC container has its own uptime and its host's boot id. In older versions, a claim stayed for weeks."""

    class Container(LocalTransport):
        uptime_s = 3e6

        def run(self, argv: Sequence[str], timeout_s: float, input: bytes = b"", on_stderr: Any = None) -> Result:
            (tmp_path / "uptime").write_text(f"{self.uptime_s:.2f} 0.00\n")
            mount = 'mount --bind "$0" /proc/uptime && exec "$@"'
            words = ["unshare", "--mount", "sh", "-c", mount, str(tmp_path / "uptime"), *argv]
            return super().run(words, timeout_s, input, on_stderr)

    there = Container(device)
    on_host("one")
    with setting_up(device, there):
        there.uptime_s = 5.0
        on_host("two")
        with pytest.raises(DeployUnderWay) as caught, setting_up(device, there):
            pass
        on_host("one")
    found = re.search(r"for at most (\d+) s", caught.value.message)
    assert found is not None, caught.value.message
    assert int(found[1]) <= 1000


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a file system")
@pytest.mark.parametrize("place", ["home", "state"])
def test_folders_that_cannot_be_written_are_reported_before_any_file_is_sent(
    device: Device, on_host: Callable[[str], None], tmp_path: Path, place: str
) -> None:
    """An example is a read-only root. In older versions, a bootstrap sent 39 MB and then failed."""
    on_host("one")
    there = tmp_path / "read-only"
    there.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", there], check=True)
    try:
        device = Device(**{**vars(device), place: str(there / "deep" / "edgert")})
        with (
            pytest.raises(DeviceError, match=f"{there} cannot be written by root: .*--home and --state"),
            setting_up(device, LocalTransport(device)),
        ):
            pass
    finally:
        subprocess.run(["umount", there], check=True)
    assert not Path(device.home).exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a file system")
def test_the_error_about_a_full_disk_names_what_to_remove(
    device: Device, on_host: Callable[[str], None], tmp_path: Path
) -> None:
    on_host("one")
    home, source = Path(device.home), tmp_path / "source"
    home.mkdir(parents=True)
    source.write_bytes(bytes(100_000))
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k,mode=755", "tmpfs", home], check=True)
    try:
        with pytest.raises(OSError, match="No space left"):
            (home / "ballast").write_bytes(bytes(100_000))
        with pytest.raises(StorageFailed) as claim, setting_up(device, LocalTransport(device)):
            pass
        with pytest.raises(StorageFailed) as copy:
            LocalTransport(device).put(source, str(home / "copy"))
    finally:
        subprocess.run(["umount", home], check=True)
    for caught in (claim, copy):
        assert caught.value.message.startswith("the disk of board is full (No space left on device)")
        assert f"{device.state}/cache may be removed" in caught.value.message


def test_folders_that_bootstrap_made_for_the_state_are_removed_with_the_state(
    device: Device, on_host: Callable[[str], None], tmp_path: Path
) -> None:
    """The first uninstall keeps the receipt, because the folders above the models cannot be removed yet."""
    on_host("one")
    transport = LocalTransport(device)
    before = set(tmp_path.iterdir()) | {tmp_path / "hosts"}
    with setting_up(device, transport):
        record_folders(device, [device.home, device.state], transport)
        Path(device.home, "venvs").mkdir()
        Path(device.state, "models").mkdir(parents=True)
        Path(device.state, "config.toml").touch()
    shown = uninstall(device, transport, purge=False, dry_run=True)
    gone = uninstall(device, transport, purge=False)
    receipt = Path(device.home, "receipt")
    assert str(receipt) in shown.left
    assert str(receipt) in gone.left
    assert list(Path(device.home).iterdir()) == [receipt]
    assert Path(device.state, "models").exists()
    assert str(Path(device.state).parent) in uninstall(device, transport, purge=True).removed
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize("place", ["home", "state"])
def test_folders_with_other_content_are_refused(
    device: Device, on_host: Callable[[str], None], tmp_path: Path, place: str
) -> None:
    """--state /var/lib would give all of /var/lib to the daemon's user, and an uninstall would remove its `cache`."""
    on_host("one")
    others = tmp_path / "others"
    for name in ("venvs", "cache", "spool", "mail"):
        (others / name).mkdir(parents=True)
    device = replace(device, home=str(others)) if place == "home" else replace(device, state=str(others))
    with (
        pytest.raises(DeviceError, match=f"{others} has .* in it.*--state"),
        setting_up(device, LocalTransport(device)),
    ):
        pass
    gone = uninstall(device, LocalTransport(device), purge=True, dry_run=True)
    assert not [path for path in gone.removed if path.startswith(f"{others}/")]
    assert sorted(os.listdir(others)) == ["cache", "mail", "spool", "venvs"]


def test_a_state_folder_may_contain_the_home_folder_and_files_of_an_interrupted_bootstrap(
    device: Device, on_host: Callable[[str], None]
) -> None:
    on_host("one")
    device = replace(device, home=f"{device.state}/runtime")
    Path(device.state, "keys").mkdir(parents=True)
    Path(device.home, "venvs").mkdir(parents=True)
    Path(device.home, "receipt").touch()
    with setting_up(device, LocalTransport(device)) as held:
        assert held.run(["true"], 1.0).ok
