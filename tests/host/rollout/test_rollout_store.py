"""Rollouts on disk: their order, their lock, two hosts of a team, and files that are not rollouts."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from edgert.errors import ConfigInvalid
from edgert_deploy.fleet.store.rollouts import StoredRollouts
from edgert_deploy.fleet.store.store import Store
from edgert_deploy.rollout.deployment import Outcome, Result
from edgert_deploy.rollout.rollout_record import RolloutState
from edgert_deploy.rollout.rollout_store import READ_MAX, RolloutStore
from tests.support.rollouts import ROLLOUT

A_LIVE, B_LIVE = (Outcome(name, Result.LIVE) for name in "ab")


def test_rollouts_are_ordered_by_their_numbers_and_not_by_the_clock(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path)
    begun = [store.begin(replace(ROLLOUT, started_at=clock)) for clock in (3000.0, 1000.0, 2000.0)]  # the clock jumps
    assert [rollout.number for rollout in begun] == [1, 2, 3]
    assert store.all() == begun[::-1]
    assert store.last() == begun[-1]


def test_two_processes_never_get_the_same_number(tmp_path: Path) -> None:
    numbers: list[int] = []
    begin = lambda: numbers.append(RolloutStore(tmp_path).begin(ROLLOUT).number)  # noqa: E731
    threads = [threading.Thread(target=begin) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == list(range(1, 9))


def test_only_one_process_at_a_time_works_on_a_rollout(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path)
    store.write(replace(ROLLOUT, id="x"))
    with store.at_work("x"), pytest.raises(ConfigInvalid, match="running in another process"), store.at_work("x"):
        raise AssertionError("two at once")
    assert not store.is_at_work("never")
    assert not (tmp_path / "never.lock").exists()  # a reader does not change a file
    with store.at_work("x"):
        assert RolloutStore(tmp_path).is_at_work("x")
    # A reader holds the lock for an instant. Another reader, or a command that begins, does not treat this as work.
    with open(tmp_path / "x.lock") as looked_at:
        fcntl.flock(looked_at, fcntl.LOCK_SH)
        assert not store.is_at_work("x")
        threading.Timer(0.02, fcntl.flock, (looked_at, fcntl.LOCK_UN)).start()
        with store.at_work("x"):
            pass


def test_only_the_newest_rollouts_are_read_and_no_file_is_removed(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path)
    for number in range(1, READ_MAX + 6):
        store.write(replace(ROLLOUT, id=f"echo-r2-{number}", number=number))
    found = [rollout.number for rollout in store.all()]
    assert (found[0], found[-1], len(found)) == (READ_MAX + 5, 6, READ_MAX)
    assert store.read("echo-r2-1").number == 1


def test_the_beginning_of_an_id_names_a_rollout_if_it_is_unique(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path)
    first, second = store.begin(ROLLOUT), store.begin(ROLLOUT)
    assert store.find("echo-r2-1") == first
    assert store.find(second.id) == second
    with pytest.raises(ConfigInvalid, match="give more of the id"):
        store.find("echo-r2-")
    with pytest.raises(ConfigInvalid, match="there is no rollout"):
        store.find("digits")


def test_a_line_that_a_power_cut_left_unfinished_is_ignored(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path)
    begun = store.begin(ROLLOUT)
    with store.path(begun.id).open("ab") as file:
        file.write(b'{"n":2,"device":"a","outc')
    assert store.all() == [begun]
    ended = replace(begun, state=RolloutState.DONE, outcomes={"a": A_LIVE})
    RolloutStore(tmp_path).write(ended)
    assert store.all() == [ended]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "cannot be read"),
        ("{\n", "cannot be read"),
        ("[]\n", "cannot be read"),
        ('{"rollout": {"id": "x"}}\n', "cannot be read"),
        ("<<<<<<< HEAD\n{}\n", "conflict markers"),
    ],
)
def test_the_error_about_a_file_that_is_not_a_rollout_names_the_file(tmp_path: Path, text: str, what: str) -> None:
    (tmp_path / "x.jsonl").write_text(text)
    notes: list[str] = []
    store = RolloutStore(tmp_path, None, notes.append)
    with pytest.raises(ConfigInvalid, match=what):
        store.read("x")
    assert store.all() == []
    assert [what in note and str(tmp_path) in note for note in notes] == [True]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_a_rollout_that_a_full_disk_refused_leaves_no_file(tmp_path: Path) -> None:
    """Otherwise each later command would report an unreadable rollout."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", tmp_path], check=True)
    try:
        store = RolloutStore(tmp_path)
        begun = store.begin(ROLLOUT)
        with (tmp_path / "full").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass
        with pytest.raises(ConfigInvalid, match="No space left"):
            store.begin(ROLLOUT)
        assert store.ids() == [begun.id]
    finally:
        subprocess.run(["umount", tmp_path], check=True)


@pytest.mark.parametrize("id", ["../x", "", "a/b", ".x"])
def test_an_id_with_the_form_of_a_path_is_refused(tmp_path: Path, id: str) -> None:
    with pytest.raises(ConfigInvalid, match="not an id of a rollout"):
        RolloutStore(tmp_path).read(id)


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    done = subprocess.run(["git", "-C", folder, *identity, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Clone:
    """A clone of a project: its `rollouts` folder is committed, pulled and pushed."""

    def __init__(self, folder: Path, origin: Path) -> None:
        git(folder.parent, "clone", "-q", str(origin), folder.name)
        self.folder, self.store = folder, RolloutStore(folder / "rollouts")

    def publish(self, *, push: bool = True) -> None:
        git(self.folder, "add", "-A")
        git(self.folder, "commit", "-qm", "rollouts")
        if push:
            self.pull()
            git(self.folder, "push", "-q", "origin", "HEAD:main")

    def pull(self) -> None:
        git(self.folder, "pull", "-q", "--no-rebase", "--no-edit", "origin", "main")


@pytest.fixture
def clones(tmp_path: Path) -> tuple[Clone, Clone]:
    git(tmp_path, "init", "-q", "--bare", "-b", "main", "origin")
    first = Clone(tmp_path / "a", tmp_path / "origin")
    (first.folder / "edgert.toml").touch()
    git(first.folder, "add", "-A")
    git(first.folder, "commit", "-qm", "a project")
    git(first.folder, "push", "-q", "origin", "HEAD:main")
    return first, Clone(tmp_path / "b", tmp_path / "origin")


def test_commits_of_two_hosts_that_roll_out_at_the_same_time_never_conflict(clones: tuple[Clone, Clone]) -> None:
    a, b = clones
    for _ in range(3):  # the first time, both hosts also create the folder
        begun = [clone.store.begin(replace(ROLLOUT, started_at=1.0)) for clone in clones]
        assert begun[0].number == begun[1].number, "neither knew of the other"
        for clone, rollout in zip(clones, begun, strict=True):
            clone.store.write(replace(rollout, state=RolloutState.DONE, outcomes={"a": A_LIVE}))
        b.publish(push=False)
        a.publish()
        b.pull()
        git(b.folder, "push", "-q", "origin", "HEAD:main")
        a.pull()
        assert a.store.all() == b.store.all()
    assert len(a.store.all()) == 6
    assert git(a.folder, "status", "--porcelain") == "", "locks are not committed"
    assert a.store.begin(ROLLOUT).number == 4


def test_commits_of_two_hosts_that_continued_one_rollout_merge(clones: tuple[Clone, Clone]) -> None:
    a, b = clones
    begun = a.store.begin(ROLLOUT)
    a.publish()
    b.pull()
    a.store.write(replace(begun, state=RolloutState.STOPPED, outcomes={"a": A_LIVE}))
    b.store.write(replace(begun, state=RolloutState.ABORTED, outcomes={"b": B_LIVE}))
    b.publish(push=False)
    a.publish()
    b.pull()
    merged = b.store.read(begun.id)
    assert (merged.state, merged.outcomes) == (RolloutState.ABORTED, {"a": A_LIVE, "b": B_LIVE})


@contextmanager
def two_hosts(tmp_path: Path, url: str, notes: list[str]) -> Iterator[tuple[RolloutStore, RolloutStore]]:
    with closing(StoredRollouts(url)) as a, closing(StoredRollouts(url)) as b:
        yield (
            RolloutStore(tmp_path / "a" / "rollouts", a, notes.append),
            RolloutStore(tmp_path / "b" / "rollouts", b, notes.append),
        )


def test_hosts_with_one_store_see_the_same_rollouts(tmp_path: Path, store_url: str) -> None:
    notes: list[str] = []
    with two_hosts(tmp_path, store_url, notes) as (a, b):
        begun = a.begin(replace(ROLLOUT, by="ann@a"))
        a.write(replace(begun, outcomes={"a": A_LIVE}))
        alone = b.without_team().begin(ROLLOUT)  # during that time, b had no connection
        b.sync()
        assert b.read(begun.id) == replace(begun, outcomes={"a": A_LIVE})
        a.sync()
        assert a.all() == b.all()
        assert {rollout.id for rollout in a.all()} == {begun.id, alone.id}
        b.write(replace(b.read(begun.id), state=RolloutState.ABORTED))
        a.sync()
        assert a.read(begun.id).state == RolloutState.ABORTED
        path = a.path(begun.id)
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))  # as git writes it with core.autocrlf
        before = [store.path(begun.id).read_bytes() for store in (a, b)]
        a.sync()
        b.sync()
        assert [store.path(begun.id).read_bytes() for store in (a, b)] == before
        assert b.begin(ROLLOUT).number == 2
    assert notes == []


def test_one_host_of_a_team_works_on_a_rollout_at_a_time(tmp_path: Path, store_url: str) -> None:
    with two_hosts(tmp_path, store_url, []) as (a, b):
        begun = a.begin(replace(ROLLOUT, by="ann@a"))
        b.sync()
        assert not b.is_at_work(begun.id)
        with a.at_work(begun.id):
            assert b.is_at_work(begun.id)
            assert b.without_team().is_at_work(begun.id) is None, "this host never worked on it"
            with pytest.raises(ConfigInvalid, match="running in another process"), b.at_work(begun.id):
                raise AssertionError("two at once")
            a.write(replace(begun, state=RolloutState.STOPPED))
        assert not b.is_at_work(begun.id)
        with b.at_work(begun.id):
            assert b.read(begun.id).state == RolloutState.STOPPED, "what its last holder wrote is there"
            assert a.is_at_work(begun.id)


def test_the_tables_of_reports_and_of_rollouts_may_be_created_in_either_order(store_url: str, tmp_path: Path) -> None:
    """A store of rollouts does not create or migrate the tables of reports, because the recorder does."""
    for _ in range(2):
        with two_hosts(tmp_path, store_url, []) as (a, _b):
            a.begin(ROLLOUT)
        Store(store_url).close()
    with two_hosts(tmp_path, store_url, []) as (_a, b):
        b.sync()
        assert len(b.all()) == 2
