"""Two hosts of a team with one project: each host sees the rollouts of the other host."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from edgert.bundle.signing import read_signing_key
from edgert.versions.slot_store import SlotStore
from edgert_deploy.devices.inventory import Inventory
from hil.support.sshd import SshDevice
from tests.support.bundles import make_null_bundle
from tests.support.commands import stop
from tests.support.servers.ports import free_port
from tests.support.shell import EDGERT, ShellHere

pytestmark = pytest.mark.usefixtures("edgertd_is_forked")


class Host:
    """`edgert` on one host, with its own home and configuration, in its clone of the project."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "home").mkdir(parents=True)
        self.shell = ShellHere(folder)
        self.shell.folder = self.project = folder / "fleet"

    def __call__(self, *words: object) -> tuple[int, dict[str, Any]]:
        done = self.shell(*map(str, words), "--json")
        assert "Traceback" not in done.stderr, done.stderr
        self.said = done.stderr
        return done.returncode, json.loads(done.stdout)

    @contextmanager
    def deploying(self, stopped_by: signal.Signals) -> Iterator[subprocess.Popen[str]]:
        """A process that deploys release 1 to `here`. It receives a signal while the installation waits."""
        words = [*EDGERT, "deploy", str(self.folder / "bundles" / "echo-1.edgert"), "here"]
        slots = SlotStore(Path(Inventory(self.project / "inventory.toml").device("here").state) / "models" / "echo")
        with slots.locked():
            process = subprocess.Popen(
                words,
                cwd=self.project,
                env=self.shell.env,
                text=True,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
            assert process.stderr is not None
            for line in process.stderr:
                if line.strip() == "[here] install":
                    break
            process.send_signal(stopped_by)
        with process:
            yield process

    def git(self, *words: str) -> None:
        identity = ("-c", "user.name=x", "-c", "user.email=x@example.org")
        done = subprocess.run(["git", "-C", self.project, *identity, *words], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    def commit(self) -> None:
        self.git("add", "-A")
        self.git("commit", "-qm", "work")

    def pull(self, other: Host) -> None:
        self.git("pull", "-q", "--no-rebase", "--no-edit", str(other.project), "main")

    def drift(self, device: str) -> tuple[int | None, list[str]]:
        """Return the wanted release of `echo` on a device, and the kinds of drift."""
        _, answer = self("status", device)
        (model,) = answer["devices"][0]["models"]
        return model["wanted"] and model["wanted"]["release"], [one["kind"] for one in model["drift"]]


@pytest.fixture
def hosts(tmp_path: Path, sshd: SshDevice) -> Iterator[tuple[Host, Host]]:
    """Two hosts with a local device `here` and an unreachable device `gone`. Only the first host can sign."""
    a, b = Host(tmp_path / "a"), Host(tmp_path / "b")
    a.project.mkdir()
    assert a("init")[0] == 0
    a("device", "add", "here", "--local", str(tmp_path / "dev"))
    key = read_signing_key(a.folder / "config" / "keys" / "default.key.pem")
    for release in (1, 2, 3):
        make_null_bundle(a.folder / "bundles", key, release=release)
    _add(a, sshd, "gone", free_port())
    a.git("init", "-q", "-b", "main")
    a.commit()
    subprocess.run(["git", "clone", "-q", a.project, b.project], check=True)
    yield a, b
    stop(tmp_path / "dev")


def _add(host: Host, sshd: SshDevice, name: str, port: int) -> None:
    Inventory(host.project / "inventory.toml").add(sshd.device(name, port=port))


def test_a_committed_project_contains_no_secret_and_is_sufficient_for_another_host(hosts: tuple[Host, Host]) -> None:
    a, b = hosts
    committed = subprocess.run(["git", "-C", a.project, "ls-files"], capture_output=True, text=True).stdout.split()
    assert committed == [".gitignore", "edgert.toml", "inventory.toml", "keys/default.pem"]
    assert not any("PRIVATE" in (a.project / name).read_text() for name in committed)
    assert b("init")[1]["made"] == [], "the project has a key, so no other one is made"
    assert "not on this host" in b.said
    (listed,) = b("keys", "list")[1]["keys"]
    (own,) = a("keys", "list")[1]["keys"]
    assert (listed["key_id"], listed["can_sign"], own["can_sign"]) == (own["key_id"], False, True)
    assert b("bundle", "verify", a.folder / "bundles" / "echo-1.edgert")[0] == 0
    assert b("deploy", a.folder / "bundles" / "echo-1.edgert", "here")[0] == 0, "the device trusts the project's key"


def test_a_host_can_list_and_resume_and_abort_a_rollout_of_another_host(hosts: tuple[Host, Host]) -> None:
    a, b = hosts
    code, begun = a("deploy", a.folder / "bundles" / "echo-1.edgert", "here,gone")
    assert code == 6
    first = begun["rollout"]["id"]
    a.commit()
    b.pull(a)
    (listed,) = b("rollout", "list")[1]["rollouts"]
    assert (listed["rollout"]["id"], listed["rollout"]["left"]) == (first, ["gone"])
    assert listed["rollout"]["by"] == begun["rollout"]["by"]
    assert [host.drift("here") for host in hosts] == [(1, []), (1, [])]

    # The second host has a copy of the bundle. It finishes the rollout without the device that is gone.
    moved = shutil.copy(a.folder / "bundles" / "echo-1.edgert", b.folder / "moved.edgert")
    os.rename(a.folder / "bundles" / "echo-1.edgert", a.folder / "echo-1.edgert")
    code, refused = b("rollout", "resume", first)
    assert (code, "--bundle FILE" in refused["error"]["message"]) == (4, True)
    assert (
        "other content"
        in b("rollout", "resume", "--bundle", a.folder / "bundles" / "echo-2.edgert")[1]["error"]["message"]
    )
    b("device", "remove", "gone")
    code, resumed = b("rollout", "resume", "echo-r1-1", "--bundle", moved)
    assert (code, resumed["rollout"]["state"], resumed["rollout"]["left"]) == (0, "done", [])

    # Both hosts roll out at the same time. Then the first host aborts the rollout of the second host.
    second, third = [
        host("deploy", a.folder / "bundles" / f"echo-{release}.edgert", "here")[1]["rollout"]["id"]
        for host, release in ((a, 2), (b, 3))
    ]
    for host in hosts:
        host.commit()
    a.pull(b)
    b.pull(a)
    assert [one["rollout"]["id"] for one in a("rollout", "list")[1]["rollouts"]] == [third, second, first]
    assert a("rollout", "list")[1] == b("rollout", "list")[1]
    assert [host.drift("here") for host in hosts] == [(3, []), (3, [])]


def test_a_host_asks_before_it_takes_over_a_rollout_that_may_still_run_on_another_host(
    hosts: tuple[Host, Host],
) -> None:
    a, b = hosts
    with a.deploying(signal.SIGKILL):
        pass
    a.commit()
    b.pull(a)
    assert [host("rollout", "list")[1]["rollouts"][0]["rollout"]["state"] for host in hosts] == ["cut off", "running"]
    for verb in ("resume", "abort"):
        code, refused = b("rollout", verb)
        assert (code, "may still run on that host" in refused["error"]["message"]) == (2, True)
    code, aborted = b("rollout", "abort", "--yes")
    assert (code, aborted["rollout"]["state"]) == (0, "aborted")
    b.commit()
    a.pull(b)
    assert a("rollout", "resume")[1]["error"]["message"].endswith("start a new one with edgert deploy")
    assert not any(model["live"] for model in a("status", "here")[1]["devices"][0]["models"])


def test_hosts_that_share_a_store_see_the_rollouts_of_each_other_at_once(
    hosts: tuple[Host, Host], store_url: str
) -> None:
    a, b = hosts
    for host in hosts:
        store = store_url.removeprefix("sqlite:///")
        (host.project / "edgert.toml").write_text(f'store = "{store}"\n')
    with a.deploying(signal.SIGSTOP) as deploying:
        try:
            (seen,) = b("rollout", "list")[1]["rollouts"]
            assert seen["rollout"]["state"] == "running"
            for verb in ("resume", "abort"):
                code, refused = b("rollout", verb)
                assert (code, "running in another process" in refused["error"]["message"]) == (4, True)
        finally:
            deploying.send_signal(signal.SIGCONT)
        deploying.communicate()
    assert deploying.returncode == 0
    (seen,) = b("rollout", "list")[1]["rollouts"]
    assert (seen["rollout"]["state"], seen["devices"][0]["result"]) == ("done", "live")
    assert [host.drift("here") for host in hosts] == [(1, []), (1, [])]
    assert b("deploy", a.folder / "bundles" / "echo-2.edgert", "here")[0] == 0
    assert [host.drift("here") for host in hosts] == [(2, []), (2, [])]


def test_without_its_store_a_host_shows_its_own_copy_and_refuses_a_deployment(hosts: tuple[Host, Host]) -> None:
    a, _ = hosts
    bundle = a.folder / "bundles" / "echo-1.edgert"
    assert a("deploy", bundle, "here")[0] == 0
    (a.project / "edgert.toml").write_text('store = "postgresql://ops@127.0.0.1:1/fleet"\n')
    assert a.drift("here") == (1, [])
    assert "The output shows only this host's copy" in a.said
    code, refused = a("deploy", bundle, "here")
    assert (code, refused["error"]["code"]) == (6, "fleet.store_failed")
    assert len(a("rollout", "list")[1]["rollouts"]) == 1
