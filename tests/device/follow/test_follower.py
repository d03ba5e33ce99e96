"""The follower fetches from a registry, installs and tries releases, with real commands and a real daemon."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from edgert.checks.channel_status import ChannelStatus, WantedRelease, read_channel_status
from edgert.cli import main
from edgert.config import read_config
from edgert.follow.follower import ChannelFollower
from edgert.follow.set_up import open_registry, reporter
from edgert.protocol.control import ask
from edgert.telemetry.messages import Topics
from edgert.telemetry.spool import Spool
from edgert.versions.latest_time import LatestTime
from edgert.versions.slot_store import SlotStore
from tests.support.devices import Device, a_device, wait_until
from tests.support.devices import events as sent_events
from tests.support.servers.hostile_registry import HostileRegistry
from tests.support.stand_ins.following import Events, failure_of, followed, following

pytestmark = pytest.mark.usefixtures("edgertd_is_forked")


@pytest.fixture
def device() -> Iterator[Device]:
    with a_device() as prepared:
        yield prepared


def kept(device: Device) -> ChannelStatus:
    return read_channel_status(device.state, read_config(device.state))


def until_kept(device: Device) -> None:
    wait_until(lambda: not SlotStore(device.state.models / "echo").read().on_trial, "the trial is over")


def test_a_release_is_fetched_and_installed_and_kept_after_its_trial(device: Device, registry: HostileRegistry) -> None:
    follower = following(device, registry.address)
    registry.put_channel(device.key, 1, registry.put_release(device.bundle(release=3)))
    assert followed(follower) == ["release 3 of echo is on trial"]
    until_kept(device)
    assert followed(follower) == ["release 3 of echo is live"]
    assert device.model()["live"]["release"] == 3
    assert not list(device.state.incoming.iterdir()), "nothing that was fetched is left"


def test_installed_files_are_not_fetched_and_an_unchanged_channel_needs_one_request(
    device: Device, registry: HostileRegistry
) -> None:
    follower = following(device, registry.address)
    device.put(release=1, padding=b"w" * 200_000)
    registry.put_channel(device.key, 1, registry.put_release(device.bundle(release=2, padding=b"w" * 200_000)))
    assert followed(follower) == ["release 2 of echo is on trial"]
    assert registry.sent_bytes < 20_000
    until_kept(device)
    registry.asked.clear()
    assert followed(follower) == ["release 2 of echo is live"]
    assert len(registry.asked) == 1


def test_a_release_that_breaks_a_limit_is_rolled_back_and_not_tried_again(
    device: Device, registry: HostileRegistry
) -> None:
    follower = following(device, registry.address)
    device.put(release=1)
    bad = replace(registry.put_release(device.bundle(release=2)), limits={"min_requests": 1000.0})
    registry.put_channel(device.key, 1, bad)
    assert followed(follower) == ["release 2 of echo is on trial"]
    until_kept(device)
    assert device.model()["live"]["release"] == 1
    registry.asked.clear()
    (text,) = followed(follower)
    assert text.startswith("release 2 of echo is not tried again: it was rolled back (min_requests is 0")
    registry.put_channel(device.key, 2, replace(bad, share=0.999999))
    assert "not tried again" in followed(follower)[0]
    registry.put_channel(device.key, 3, replace(bad, attempt=2))
    assert followed(follower) == ["release 2 of echo is on trial"]


def test_a_halted_release_is_not_started(device: Device, registry: HostileRegistry) -> None:
    follower = following(device, registry.address)
    entry = registry.put_release(device.bundle(release=2))
    registry.put_channel(device.key, 1, replace(entry, halted=True))
    assert followed(follower) == ["release 2 of echo is halted"]
    registry.put_channel(device.key, 2, entry)
    assert followed(follower) == ["release 2 of echo is on trial"]


def test_a_bundle_that_is_not_for_this_device_is_refused_once(device: Device, registry: HostileRegistry) -> None:
    events = Events()
    follower = following(device, registry.address, events)
    registry.put_channel(device.key, 1, registry.put_release(device.bundle(profile="other-profile")))
    for _ in range(2):
        assert "is not tried again: the bundle is for other-profile" in followed(follower)[0]
    assert [(event, model, fields["code"]) for event, model, fields in events] == [
        ("refused", "echo", "bundle.not_compatible")
    ]


def test_a_release_of_the_channel_waits_for_a_deployment_over_ssh(device: Device, registry: HostileRegistry) -> None:
    follower = following(device, registry.address)
    registry.put_channel(device.key, 1, registry.put_release(device.bundle(release=2)))
    token = device.run("claim", "echo", "--by", "me@host")["token"]
    (text,) = followed(follower)
    assert text.startswith("release 2 of echo waits: another deployment of echo is in progress")
    device.run("unclaim", token)
    assert followed(follower) == ["release 2 of echo is on trial"]


def test_a_release_that_a_deployment_replaced_is_not_installed_again(device: Device, registry: HostileRegistry) -> None:
    follower = following(device, registry.address)
    registry.put_channel(device.key, 1, registry.put_release(device.bundle(release=2)))
    followed(follower)
    until_kept(device)
    device.put(release=3)
    assert followed(follower) == ["release 2 of echo is not tried again: another release became live here after it"]
    assert device.model()["live"]["release"] == 3


def test_a_device_outside_the_share_of_a_newer_release_keeps_its_release_without_a_refusal(
    device: Device, registry: HostileRegistry
) -> None:
    """A smaller share replaces the entry of the device's release, so an older release is the first that selects it."""
    events = Events()
    follower = following(device, registry.address, events)
    device.put(release=2)
    older = registry.put_release(device.bundle(release=1))
    registry.put_channel(device.key, 1, replace(older, release=3, share=1e-9), older)
    for _ in range(2):
        assert "release 1 of echo is not tried again" in followed(follower)[0]
    assert (events, kept(device).wanted) == ([], {})
    registry.put_channel(device.key, 2, replace(older, attempt=2))
    assert "is older than 2, which was live here" in followed(follower)[0], "now the channel has no newer release"
    assert events.names == ["refused"]


def test_an_expired_channel_raises_an_alarm_until_a_newer_statement_exists(
    device: Device, registry: HostileRegistry
) -> None:
    events = Events()
    follower = following(device, registry.address, events)
    registry.put_channel(device.key, 1, registry.put_release(device.bundle(release=2)))
    follower.query_registry()
    late = following(device, registry.address, events, now_s=4102444800.0)  # in 2100
    for _ in range(2):
        assert "expired at 2099" in followed(late)[0]
        assert "expired at 2099" in kept(device).stale
    assert not device.state.model_names()
    registry.put_channel(device.key, 2, expires="2199-01-01T00:00:00Z")
    followed(late)
    assert kept(device).stale == ""
    assert [(name, fields["alarm"]) for name, _, fields in events] == [
        ("alarm_raised", "channel_stale"),
        ("alarm_cleared", "channel_stale"),
    ]


def test_a_registry_that_is_silent_for_longer_than_stated_raises_the_alarm(
    device: Device, registry: HostileRegistry
) -> None:
    with device.state.config.open("a") as file:
        file.write("[alarms]\nchannel_stale_s = 7200\n")
    events, now_s = Events(), 4070000000.0  # in 2098
    for later_s, raised in ((0.0, False), (7100.0, False), (7300.0, True), (9000.0, True)):
        failure_of(following(device, registry.address, events, now_s=now_s + later_s))
        assert bool(kept(device).stale) is raised
    registry.put_channel(device.key, 1)
    followed(following(device, registry.address, events, now_s=now_s + 10000.0))
    registry.manifests.clear()
    failure_of(following(device, registry.address, events, now_s=now_s + 17000.0))
    told = [(name, fields["value"], fields["limit"]) for name, _, fields in events if "alarm" in fields]
    assert told == [("alarm_raised", 7300, 7200.0), ("alarm_cleared", 0, 7200.0)]


def test_a_round_with_a_clock_years_ahead_does_not_delay_the_alarm_of_a_silent_registry(
    device: Device, registry: HostileRegistry
) -> None:
    registry.put_channel(device.key, 1)
    followed(following(device, registry.address, now_s=4070000000.0))  # in 2098
    registry.manifests.clear()
    for now_s, raised in ((2e9, False), (2e9 + 86_000, False), (2e9 + 87_000, True)):
        failure_of(following(device, registry.address, now_s=now_s))
        assert bool(kept(device).stale) is raised


def test_the_daemon_retains_an_alarm_of_the_channel_beyond_a_restart(registry: HostileRegistry) -> None:
    with a_device(f'[follow]\nregistry = "{registry.address}"\ninterval_s = 86400\n', started=False) as device:

        def retained() -> object:
            with contextlib.closing(Spool(device.state.spool)) as spool:
                slots = spool.retained(Topics(config.site, config.device).deploy)
            return None if slots is None else json.loads(slots.payload).get("alarms")

        config = read_config(device.state)
        device.start()
        registry.put_channel(device.key, 1)
        following(device).round()
        now_s = 0.0
        latest = LatestTime(device.state, lambda: now_s, lambda: False)
        follower = ChannelFollower(device.state, config, open_registry(config), reporter(device.state), latest=latest)
        for now_s in (4102444800.0, 4070000000.0, 4102444801.0):
            follower.round()
            if now_s > 4.1e9:
                wait_until(lambda: retained() == "channel_stale", "the alarm is retained")
            else:
                wait_until(lambda: retained() is None, "it is no more")
        assert [event["event"] for event in sent_events(device)] == ["alarm_raised", "alarm_cleared", "alarm_raised"]
        device.stop()
        device.state.spool.unlink()
        device.start()
        wait_until(lambda: device.state.spool.exists() and retained() == "channel_stale", "the new daemon knows it")


def test_the_wanted_release_is_kept_until_a_deployment_replaces_it(device: Device, registry: HostileRegistry) -> None:
    follower = following(device, registry.address)
    entry = registry.put_release(device.bundle(release=2))
    registry.put_channel(device.key, 1, replace(entry, halted=True))
    followed(follower)
    assert kept(device).wanted == {}
    registry.put_channel(device.key, 2, entry)
    followed(follower)
    assert kept(device).wanted == {"echo": WantedRelease(2, entry.digest)}
    until_kept(device)
    followed(follower)
    late = following(device, registry.address, now_s=4102444800.0)  # the channel has expired
    followed(late)
    assert kept(device).wanted["echo"].release == 2
    device.put(release=3)
    followed(follower)
    assert kept(device).wanted == {}


def test_edgertd_follow_does_a_round_and_status_shows_the_channel(device: Device, registry: HostileRegistry) -> None:
    following(device, registry.address)
    registry.put_channel(device.key, 7, registry.put_release(device.bundle(release=2)))
    assert device.run("follow", code=75) == {"channel": "stable", "steps": ["release 2 of echo is on trial"]}
    until_kept(device)
    assert device.run("follow") == {"channel": "stable", "steps": ["release 2 of echo is live"]}
    shown = device.run("status")["channel"]
    assert (shown["registry"], shown["counter"], shown["error"]) == (registry.address, 7, "")


def test_status_describes_the_channel_in_words(
    device: Device, registry: HostileRegistry, capsys: pytest.CaptureFixture[str]
) -> None:
    follower = following(device, registry.address)
    registry.put_channel(device.key, 7, registry.put_release(device.bundle(profile="other-profile")))
    followed(follower)
    registry.manifests.clear()
    follower.round()
    assert main(["--state", str(device.state.root), "status"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("channel")]
    assert f"stable in {registry.address}: statement 7, which expires 2099-01-01T00:00:00Z; last answer 20" in lines[0]
    assert "the last request to the registry failed" in lines[1]
    assert "release 1 of echo is not tried again: the bundle is for other-profile" in lines[2]


def test_a_hint_begins_a_round_within_seconds_and_a_flood_of_hints_begins_no_second_round(
    registry: HostileRegistry,
) -> None:
    with a_device(f'[follow]\nregistry = "{registry.address}"\n', started=False) as device:
        registry.put_channel(device.key, 7)
        device.start()
        device.run("follow", "--soon")
        for _ in range(20):
            ask(device.state.control_socket, {"op": "follow"}, 5.0)
        wait_until(lambda: len(registry.asked) == 2, "the round after a hint")  # the manifest, the statement
        for _ in range(20):
            ask(device.state.control_socket, {"op": "follow"}, 5.0)
        assert len(registry.asked) == 2


def test_the_daemon_starts_the_follower(registry: HostileRegistry) -> None:
    follow = f'[follow]\nregistry = "{registry.address}"\ninterval_s = 1\n[mqtt]\n'
    with a_device(follow, started=False) as device:
        registry.put_channel(device.key, 7, registry.put_release(device.bundle(release=2)))
        device.start()
        kept = ["release 2 of echo is live"]
        wait_until(lambda: device.run("status")["channel"]["steps"] == kept, "it is kept", pause_s=1.0)
        channel = device.run("status")["channel"]
        assert (channel["counter"], channel["error"]) == (7, "")
        assert channel["asked_at"] > 0
