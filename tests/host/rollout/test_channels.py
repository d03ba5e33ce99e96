"""Hosts write channels to a real registry."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgert.bundle.channel import Entry
from edgert.bundle.signing import SigningKey, new_key
from edgert.errors import ChannelTooOld, ConfigInvalid, NotInRegistry, SignatureInvalid, StorageFailed
from edgert.registry.address import parse_repository
from edgert.registry.artifacts import channel_tag
from edgert_deploy.rollout.channel_entries import Entries
from edgert_deploy.rollout.channels import ChannelChanged, Channels, SeenCounters
from tests.support.servers.registries import RegistryServer

NOW_S = float(int(time.time()))
DIGEST = "1" * 64
ENTRY = Entry("digits", 1, DIGEST, DIGEST, DIGEST)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RegistryServer]:
    with RegistryServer.in_folder(tmp_path_factory.mktemp("registry")) as running:
        yield running


@pytest.fixture
def key() -> SigningKey:
    return new_key()


def host(server: RegistryServer, key: SigningKey, seen: Path, now_s: float = NOW_S) -> Channels:
    return Channels(server.registry(), (key.public,), SeenCounters(seen), lambda: now_s)


def one(entries: Entries) -> Entries:
    return (ENTRY,)


def same(entries: Entries) -> Entries:
    return entries


def test_each_change_of_a_channel_raises_the_counter(server: RegistryServer, key: SigningKey, tmp_path: Path) -> None:
    channels = host(server, key, tmp_path / "seen")
    first = channels.change("first", one, key)
    assert (first.counter, first.entries) == (int(NOW_S), (ENTRY,))
    second = channels.change("first", same, key)
    assert second.counter == first.counter + 1  # in the same second
    later = host(server, key, tmp_path / "seen", NOW_S + 1000).change("first", same, key)
    assert later.counter == int(NOW_S) + 1000
    assert channels.read("first") == later


def test_a_revoked_key_stays_revoked_in_later_statements(
    server: RegistryServer, key: SigningKey, tmp_path: Path
) -> None:
    channels = host(server, key, tmp_path / "seen")
    channels.change("revoking", one, key, lasts_s=3600, revoked=("0" * 16,))
    assert channels.change("revoking", same, key).revoked == ("0" * 16,)


def test_a_statement_of_an_unknown_key_is_not_continued(
    server: RegistryServer, key: SigningKey, tmp_path: Path
) -> None:
    host(server, key, tmp_path / "one").change("foreign", one, key)
    other = new_key()
    with pytest.raises(SignatureInvalid, match="that this project knows"):
        host(server, other, tmp_path / "two").change("foreign", same, other)


def test_the_error_names_a_missing_channel(server: RegistryServer, key: SigningKey, tmp_path: Path) -> None:
    with pytest.raises(NotInRegistry, match="no channel nothing"):
        host(server, key, tmp_path / "seen").read("nothing")


def test_an_older_statement_of_the_registry_is_noticed(server: RegistryServer, key: SigningKey, tmp_path: Path) -> None:
    channels, registry = host(server, key, tmp_path / "seen"), server.registry()
    channels.change("old", one, key)
    older = registry.manifest(channel_tag("old"))
    channels.change("old", same, key)
    assert older is not None
    registry.put_manifest(channel_tag("old"), older.data)
    with pytest.raises(ChannelTooOld, match="restored from an older copy"):
        channels.change("old", same, key)
    assert host(server, key, tmp_path / "another user").read("old").entries == (ENTRY,)


def test_the_loss_of_a_channel_in_the_registry_is_noticed(
    server: RegistryServer, key: SigningKey, tmp_path: Path
) -> None:
    SeenCounters(tmp_path / "seen").record(server.repository, "lost", 7)
    with pytest.raises(ConfigInvalid, match="any more"):
        host(server, key, tmp_path / "seen").change("lost", one, key)


def test_a_change_whose_counter_cannot_be_written_is_reported_as_done(
    server: RegistryServer, key: SigningKey, tmp_path: Path
) -> None:
    (tmp_path / ".seen.lock").mkdir()  # like a full disk
    with pytest.raises(StorageFailed, match=r"channel full is changed.*cannot write .*do not repeat the change"):
        host(server, key, tmp_path / "seen").change("full", one, key)
    assert host(server, key, tmp_path / "another user").read("full").entries == (ENTRY,)


@pytest.mark.parametrize("begun", [True, False])
def test_a_change_of_another_host_at_the_same_time_is_not_overwritten(
    server: RegistryServer, key: SigningKey, tmp_path: Path, begun: bool
) -> None:
    name = f"race-{str(begun).lower()}"
    channels, other = host(server, key, tmp_path / "one"), host(server, key, tmp_path / "two", NOW_S + 5)
    if begun:
        channels.change(name, one, key)

    def meanwhile(entries: Entries) -> Entries:
        other.change(name, one, key)
        return ()

    with pytest.raises(ChannelChanged):
        channels.change(name, meanwhile, key)
    assert channels.read(name).entries == (ENTRY,)


def test_a_host_whose_clock_is_behind_refuses_to_sign(server: RegistryServer, key: SigningKey, tmp_path: Path) -> None:
    host(server, key, tmp_path / "seen").change("clock", one, key)
    with pytest.raises(ConfigInvalid, match="set this clock"):
        host(server, key, tmp_path / "seen", NOW_S - 1000).change("clock", same, key)


def test_a_host_whose_clock_is_years_ahead_refuses_to_sign_and_a_future_time_is_corrected(
    server: RegistryServer, key: SigningKey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a host signed with a future time, devices would store that time.

    No other host could then sign the channel until that time.
    """
    ahead = host(server, key, tmp_path / "ahead", NOW_S + 1e8)
    with pytest.raises(ConfigInvalid, match=r"on this host, and .* at oci.*: set the clock that is wrong"):
        ahead.change("future", one, key)
    monkeypatch.setattr("edgert_deploy.rollout.channels.CLOCK_S_MAX", 1e9)  # the registry's clock was wrong, too
    wrong = ahead.change("future", one, key)
    monkeypatch.undo()
    right = host(server, key, tmp_path / "seen").change("future", same, key)
    assert (right.counter, right.issued < wrong.issued) == (wrong.counter + 1, True)


def test_the_error_names_a_damaged_file_of_counters(tmp_path: Path, server: RegistryServer, key: SigningKey) -> None:
    (tmp_path / "seen").write_text("{")
    with pytest.raises(ConfigInvalid, match="seen cannot be read"):
        host(server, key, tmp_path / "seen").change("damaged", one, key)


def test_simultaneous_commands_lose_no_counter(tmp_path: Path) -> None:
    repository, counters, processes = parse_repository("oci://registry.example/models"), 20, 4
    children = []
    for number in range(processes):
        if (child := os.fork()) == 0:
            code = 1
            try:
                for counter in range(1, counters + 1):
                    SeenCounters(tmp_path / "seen").record(repository, f"channel-{number}", counter)
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * processes
    seen = SeenCounters(tmp_path / "seen")
    assert [seen.counter(repository, f"channel-{number}") for number in range(processes)] == [counters] * processes
