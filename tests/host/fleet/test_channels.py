"""The progress of a channel follows from the reports of its devices."""

from __future__ import annotations

from typing import Any

from edgert.bundle.channel import Entry, Statement
from edgert.versions.slots import BY_COMMAND
from edgert_deploy.fleet.channels import STALE_MS, Progress, ReleaseState, progress_of, releases_of

NOW_MS = 1_800_000_000_000
SHA = "ab" * 32


def entry(release: int, share: float = 1.0, **fields: Any) -> Entry:
    return Entry("digits", release, SHA, SHA, SHA, share, **fields)


def statement(*entries: Entry) -> Statement:
    return Statement("stable", 1, "2026-11-22T08:00:00Z", "2026-12-22T08:00:00Z", entries)


def device(
    name: str, release: int = 1, state: str = "steady", channel: str = "stable", heard_ms: int = NOW_MS, tags: str = ""
) -> dict[str, Any]:
    return {
        "site": "lab",
        "device": name,
        "profile": "generic-x86",
        "heard_ms": heard_ms,
        "info": {"channel": channel, "channel_tags": tags},
        "deploy": {"digits_state": state, "digits_active": f"r{release}"},
    }


def event(name: str, kind: str, release: int, reason: str) -> dict[str, Any]:
    return {"site": "lab", "device": name, "event": kind, "model": "digits", "release": release, "reason": reason}


def states(progress: Progress) -> dict[str, str]:
    return {one.device: one.state.value for one in progress.devices}


def test_each_device_is_in_one_state() -> None:
    devices = [
        device("kept", 2),
        device("on-trial", 2, "trial"),
        device("first-trial", 2, "first-trial"),
        device("rolled-back", 1),
        device("refused", 1),
        device("by-command", 1),
        device("waiting", 1),
        device("stale", 1, heard_ms=NOW_MS - STALE_MS - 1),
        device("stale-on-trial", 2, "trial", heard_ms=NOW_MS - STALE_MS - 1),
        device("switched-off", 2, heard_ms=NOW_MS - STALE_MS - 1),
        device("follows-another", 1, channel="canary"),
    ]
    events = [
        event("rolled-back", "rolled_back", 2, "p99_ms is 9 ms"),
        event("refused", "refused", 2, "it is signed by ..."),
        event("by-command", "rolled_back", 2, BY_COMMAND),
    ]
    (found,) = progress_of(statement(entry(2)), devices, events, NOW_MS)
    assert states(found) == {
        "kept": "kept",
        "on-trial": "on_trial",
        "first-trial": "on_trial",
        "rolled-back": "rolled_back",
        "refused": "rolled_back",
        "by-command": "rolled_back_by_command",
        "waiting": "waiting",
        "stale": "stale",
        "stale-on-trial": "stale",
        "switched-off": "kept",
    }
    assert [found.counts[state] for state in ReleaseState] == [2, 2, 2, 1, 1, 2]
    assert [one.reason for one in found.failed] == ["p99_ms is 9 ms", "it is signed by ..."]
    assert (found.begun, found.done) == (7, False)


def test_a_device_that_became_stale_on_trial_does_not_count_as_on_trial() -> None:
    (found,) = progress_of(statement(entry(2)), [device("off", 2, "trial", heard_ms=NOW_MS - STALE_MS - 1)], [], NOW_MS)
    assert (states(found), found.done) == ({"off": "stale"}, True)


def test_a_release_that_was_kept_in_the_end_counts_as_kept() -> None:
    (found,) = progress_of(statement(entry(2)), [device("late", 2)], [event("late", "rolled_back", 2, "why")], NOW_MS)
    assert (states(found), found.done) == ({"late": "kept"}, True)


def test_the_failure_of_another_release_does_not_count_for_this_one() -> None:
    (found,) = progress_of(statement(entry(3)), [device("one")], [event("one", "rolled_back", 2, "why")], NOW_MS)
    assert states(found) == {"one": "waiting"}


def test_each_device_belongs_to_the_first_entry_that_selects_it() -> None:
    devices = [device(f"d-{i}", 1) for i in range(200)]
    part, rest = progress_of(statement(entry(2, 0.25), entry(1)), devices, [], NOW_MS)
    assert 25 < len(part.devices) < 75
    assert len(part.devices) + len(rest.devices) == 200
    assert part.counts[ReleaseState.WAITING] == len(part.devices)
    assert rest.counts[ReleaseState.KEPT] == len(rest.devices)


def test_entries_select_devices_by_the_tags_that_the_devices_report() -> None:
    devices = [device("a", 2, tags="line=3,rack"), device("b", 1, tags="line=4"), device("c", 1)]
    tagged, _ = progress_of(statement(entry(2, tags=("line=3",)), entry(1)), devices, [], NOW_MS)
    assert states(tagged) == {"a": "kept"}


def test_the_page_counts_releases_without_a_statement() -> None:
    devices = [
        device("a", 2),
        device("b", 2, "trial"),
        device("c", 1),
        device("d", 1, "trial", heard_ms=NOW_MS - STALE_MS - 1),
        device("e", 2, channel="canary"),
        device("f", 1),
        device("by-ssh", 2, channel=""),
    ]
    events = [
        event("c", "rolled_back", 2, "p99_ms is 9 ms"),
        event("f", "rolled_back", 2, BY_COMMAND),
        event("by-ssh", "rolled_back", 1, "why"),
    ]
    counted = ("channel", "version", "kept", "on_trial", "rolled_back", "rolled_back_by_command", "stale")
    rows = releases_of(devices, events, NOW_MS)
    shown = [[row[key] for key in counted] for row in rows]
    assert shown == [["canary", "r2", 1, 0, 0, 0, 0], ["stable", "r2", 1, 1, 1, 1, 0], ["stable", "r1", 2, 0, 0, 0, 1]]
    assert rows[1]["failed"] == [{"site": "lab", "device": "c", "reason": "p99_ms is 9 ms"}]
