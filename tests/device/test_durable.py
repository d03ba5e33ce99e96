"""A file is replaced whole or not at all; a lock has one holder."""

from __future__ import annotations

import errno
import fcntl
import inspect
import os
import threading
from pathlib import Path

import pytest

from edgert.durable import (
    LOCK_S_MAX,
    check_free,
    is_locked,
    locked,
    make_private,
    os_error_as,
    replace_file,
    replacing,
    store_file,
    storing,
)
from edgert.errors import ConfigInvalid, SlotsBusy, StorageFailed


def test_an_error_leaves_the_old_file_and_no_partial_file(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    replace_file(path, b"old")

    def fails() -> None:
        with replacing(path) as file:
            file.write(b"half of the n")
            raise ValueError

    with pytest.raises(ValueError):
        fails()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_pipe_or_a_device_is_never_replaced_by_a_file(tmp_path: Path) -> None:
    """Otherwise, root could replace /dev/null."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StorageFailed, match=r"cannot write .*: it is a folder, a pipe or a device, not a file"):
        store_file(tmp_path / "pipe", b"x")
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]
    assert (tmp_path / "pipe").is_fifo()


def test_a_disk_without_enough_free_space_is_named_with_both_sizes(tmp_path: Path) -> None:
    check_free(tmp_path, 1, "release 1 of cam")
    with pytest.raises(
        StorageFailed, match=rf"^release 1 of cam needs 1000000000001 MB in {tmp_path}, but \d+ MB are free: "
    ):
        check_free(tmp_path, 10**18, "release 1 of cam")


def test_a_fault_of_the_disk_and_a_held_lock_raise_different_errors(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "state.json"
    with pytest.raises(StorageFailed, match=rf"^cannot write {path}: No such file or directory$"):
        store_file(path, b"new")
    with (
        pytest.raises(ConfigInvalid, match=r"^cannot read it: full; give another file$"),
        os_error_as(ConfigInvalid, "cannot read it", "give another file"),
    ):
        raise OSError(errno.ENOSPC, "full")
    with (
        pytest.raises(StorageFailed, match=r"^cannot write it: full; free some space$"),
        storing("cannot write it"),
    ):
        raise OSError(errno.ENOSPC, "full")
    with (
        pytest.raises(StorageFailed, match=r"^cannot use it: Permission denied; run this as the owner, or as root$"),
        storing("cannot use it"),
    ):
        raise PermissionError(errno.EACCES, "Permission denied")
    with locked(tmp_path / "lock"):
        with pytest.raises(SlotsBusy, match="wait"), storing("cannot use it", busy=SlotsBusy("wait")):
            locked(tmp_path / "lock", 0.0)
        with (
            pytest.raises(StorageFailed, match="cannot use it: another process has locked it"),
            storing("cannot use it"),
        ):
            locked(tmp_path / "lock", 0.0)


def test_the_next_write_replaces_a_file_that_a_power_cut_left_behind(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    (tmp_path / ".state.json.new").write_bytes(b"half of something long")
    replace_file(path, b"new", mode=0o640)
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("shared", [False, True])
def test_no_link_under_the_name_of_the_partial_file_is_followed(tmp_path: Path, shared: bool) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    (tmp_path / (f".it.{os.getpid()}.new" if shared else ".it.new")).symlink_to(victim)
    with pytest.raises(OSError):
        replace_file(tmp_path / "it", b"new", shared=shared)
    assert victim.read_bytes() == b"mine"


@pytest.mark.parametrize("durable", [False, True])
def test_a_durable_change_is_synced_to_the_disk(tmp_path: Path, durable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    replace_file(tmp_path / "it", b"new", durable=durable)
    assert (tmp_path / "it").read_bytes() == b"new"
    assert len(synced) == (2 if durable else 0)  # the file, and its folder


def test_a_lock_has_only_one_holder_until_it_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not is_locked(path)
    assert not path.exists()  # the check creates no file
    with locked(path):
        assert is_locked(path)
        with pytest.raises(BlockingIOError):
            locked(path, wait_s=0)
    assert not is_locked(path)
    locked(path, wait_s=0).close()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_named(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Examples are NFS without its lock daemon, and some FUSE file systems."""

    def flock(file: object, how: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with (
        pytest.raises(
            StorageFailed, match=r"^cannot write it: this file system cannot lock files; use a folder on a local"
        ),
        storing("cannot write it"),
    ):
        locked(tmp_path / "lock", 0.0)


def test_a_caller_waits_for_a_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    held = locked(path)
    threading.Timer(0.05, held.close).start()
    locked(path, wait_s=10).close()


def test_a_wait_for_a_lock_ends(tmp_path: Path) -> None:
    assert inspect.signature(locked).parameters["wait_s"].default == LOCK_S_MAX < 60
    with locked(tmp_path / "lock"), pytest.raises(BlockingIOError) as caught:
        locked(tmp_path / "lock", 0.05)
    assert caught.value.strerror == "another process has locked it"


def test_modes_do_not_follow_the_umask(tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        (tmp_path / "old").touch()
        (tmp_path / "wide").mkdir()
        for name in ("old", "new"):
            locked(tmp_path / name).close()
        replace_file(tmp_path / "state", b"")
        for name in ("wide", "narrow"):
            make_private(tmp_path / name)
    finally:
        os.umask(mask)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == {"old": 0o600, "new": 0o600, "state": 0o600, "wide": 0o700, "narrow": 0o700}
