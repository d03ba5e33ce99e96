"""A backup during a recorder's writes is a complete store. It answers, and accepts later reports."""

from __future__ import annotations

import sqlite3
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from edgert_deploy.fleet.store.recorder import Recorder
from edgert_deploy.fleet.store.store import Store
from tests.support.fleet import NOW_MS, Sent, a_fleet, ask, feed, record, replayed
from tests.support.servers.databases import new_database, postgres_folder

Copy = Callable[[str, Path], str]


def by_vacuum(url: str, folder: Path) -> str:
    with sqlite3.connect(url.removeprefix("sqlite:///")) as database:
        database.execute(f"VACUUM INTO '{folder}/copy.db'")
    database.close()
    return f"sqlite:///{folder}/copy.db"


def by_backup(url: str, folder: Path) -> str:
    """Copy the store like `sqlite3 fleet.db ".backup copy.db"`."""
    source, copy = sqlite3.connect(url.removeprefix("sqlite:///")), sqlite3.connect(folder / "copy.db")
    source.backup(copy)
    source.close()
    copy.close()
    return f"sqlite:///{folder}/copy.db"


def by_dump(url: str, folder: Path) -> str:
    binaries = postgres_folder()
    assert binaries is not None
    server, _, _ = url.rpartition("/")
    restored = new_database(f"{server}/postgres")
    dump = str(folder / "fleet.dump")
    for words in (["pg_dump", "-Fc", "-f", dump, url], ["pg_restore", "--exit-on-error", "-d", restored, dump]):
        done = subprocess.run([str(binaries / words[0]), *words[1:]], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    return restored


@pytest.mark.parametrize(
    ("store_url", "copy"),
    [("sqlite", by_vacuum), ("sqlite", by_backup), ("postgresql", by_dump)],
    indirect=["store_url"],
)
def test_a_backup_made_during_recording_answers_queries_and_can_be_continued(
    store_url: str, copy: Copy, tmp_path: Path
) -> None:
    sent = replayed(a_fleet(3, 100))
    store = Store(store_url)
    recorder = Recorder(store, lambda: NOW_MS)

    def go_on(messages: Sent) -> None:
        feed(recorder, messages)
        recorder.flush()

    go_on(sent[: len(sent) // 2])
    before = ask(store_url, 3, ("device", "version"))
    restored = copy(store_url, tmp_path)
    go_on(sent[len(sent) // 2 :])
    assert ask(store_url, 3, ("device", "version")) != before
    assert ask(restored, 3, ("device", "version")) == before
    assert record(restored, sent).duplicates > 0
    assert ask(restored, 3, ("device", "version")) == ask(store_url, 3, ("device", "version"))
    store.close()
