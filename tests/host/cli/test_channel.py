"""`edgert publish`, `promote` and `channel`, against a real registry with TLS and a login."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edgert.bundle.signing import SigningKey
from edgert.telemetry.messages import hint_topic
from edgert.telemetry.mqtt import Connection
from edgert_deploy.cli import main
from edgert_deploy.common.keys import key_paths
from edgert_deploy.devices.inventory import Inventory
from tests.support.bundles import make_null_bundle
from tests.support.commands import Edgert, own_key
from tests.support.devices import wait_until
from tests.support.fleet import Pi, record
from tests.support.servers.brokers import Broker
from tests.support.servers.registries import RegistryServer

channel_watch = importlib.import_module("edgert_deploy.cli.channel.watch")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RegistryServer]:
    with RegistryServer.in_folder(tmp_path_factory.mktemp("registry"), secured=True) as running:
        yield running


@pytest.fixture
def project(inventory: Inventory, tmp_path: Path, server: RegistryServer) -> SigningKey:
    """A project with a repository of the test's own and a key."""
    key = own_key(tmp_path)
    name = f"oci://localhost:{server.port}/{tmp_path.name.replace('_', '-').strip('-').lower()}"
    (tmp_path / "edgert.toml").write_text(
        f'[registry]\naddress = "{name}"\nca = "{server.ca}"\nlogin = "{server.login_file}"\n'
    )
    for release in (1, 2, 3):
        make_null_bundle(tmp_path, key, "digits", release)
    return key


def entries(answer: dict[str, Any]) -> list[tuple[int, float, bool]]:
    return [(one["release"], one["share"], one["halted"]) for one in answer["channel"]["entries"]]


def test_a_release_is_promoted_from_a_share_of_the_canary_to_all_devices(project: SigningKey, edgert: Edgert) -> None:
    code, answer = edgert("publish", "digits-1.edgert", "--channel", "stable")
    assert (code, entries(answer)) == (0, [(1, 1.0, False)])
    code, answer = edgert(
        "publish", "digits-2.edgert", "--channel", "canary", "--share", "5%", "--limit", "p99_ms=8", "--watch", "10m"
    )
    assert (code, entries(answer)) == (0, [(2, 0.05, False)])
    assert answer["channel"]["entries"][0]["limits"] == {"p99_ms": 8}
    answer = edgert("promote", "digits", "--from", "canary", "--to", "later", "--watch", "20m")[1]
    entry = answer["channel"]["entries"][0]
    assert (entry["limits"], entry["watch_s"]) == ({"p99_ms": 8}, 1200), "the release keeps its limits"
    code, answer = edgert("channel", "halt", "canary", "digits")
    assert (code, entries(answer)) == (0, [(2, 0.05, True)])
    code, answer = edgert("promote", "digits", "--from", "canary", "--to", "stable")
    assert code == 4
    assert "is halted" in answer["error"]["message"]
    assert edgert("publish", "digits-3.edgert", "--channel", "canary", "--share", "5%", "--site", "plant-a")[0] == 0
    code, answer = edgert("promote", "digits", "--to", "canary", "--share", "50%")
    assert answer["channel"]["entries"][0]["sites"] == ["plant-a"]  # the release keeps its sites
    assert (code, entries(answer)[0]) == (0, (3, 0.5, False))
    code, answer = edgert("promote", "digits", "--from", "canary", "--to", "stable", "--share", "50%")
    assert (code, entries(answer)) == (0, [(3, 0.5, False), (1, 1.0, False)])
    code, answer = edgert("promote", "digits", "--to", "stable")
    assert (code, entries(answer)) == (0, [(3, 1.0, False)])
    code, shown = edgert("channel", "show", "stable")
    assert (code, shown["channel"]) == (0, answer["channel"])


def test_a_release_that_was_trained_worse_is_not_offered_silently(
    project: SigningKey, edgert: Edgert, tmp_path: Path
) -> None:
    make_null_bundle(tmp_path, project, "digits", 4, score=0.93)
    told = (
        "warning: release 4 of digits scored 0.9300 at its build (top1, 2 samples); release 1, in channel {} before, "
        "scored 1.0000 (2 samples): this-machine"
    )
    for channel in ("canary", "stable"):
        assert edgert("publish", "digits-1.edgert", "--channel", channel)[0] == 0
        assert "warning" not in edgert.stderr
    assert edgert("publish", "digits-4.edgert", "--channel", "canary")[0] == 0
    assert told.format("canary") in edgert.stderr
    assert edgert("promote", "digits", "--from", "canary", "--to", "stable")[0] == 0
    assert told.format("stable") in edgert.stderr
    assert edgert("promote", "digits", "--to", "stable")[0] == 0
    assert "warning" not in edgert.stderr, "it is the channel's own release"


def test_a_channel_can_be_renewed_and_resumed_and_can_lose_a_model(
    project: SigningKey, edgert: Edgert, tmp_path: Path
) -> None:
    assert edgert("publish", "digits-1.edgert", "--channel", "stable")[0] == 0
    own_key(tmp_path, "second")
    own = project.public.key_id
    code, answer = edgert("channel", "renew", "stable", "--revoke", own)
    assert code == 5  # a key cannot revoke itself
    assert "another trusted key" in answer["error"]["message"]
    key_file = key_paths(tmp_path / "conf" / "keys", "second")[0]
    code, answer = edgert("channel", "renew", "stable", "--revoke", own, "--key", key_file, "--expires", "60d")
    assert (code, answer["channel"]["revoked"]) == (0, [own])
    assert edgert("channel", "resume", "stable")[0] == 5  # the revoked key signs again
    code, answer = edgert("channel", "remove", "stable", "digits", "--key", key_file)
    assert (code, entries(answer)) == (0, [])


def stored(url: Path, kept: int, rolled_back: int) -> None:
    now_ms = time.time_ns() // 1_000_000
    for i in range(kept):
        device = Pi(f"kept-{i}", "r2")
        record(str(url), [*device.info("canary"), *device.deploy(now_ms)], now_ms)
    for i in range(rolled_back):
        device = Pi(f"rolled-back-{i}")
        sent = device.rolled_back(2, "p99_ms is 9 ms, above its limit of 8 ms", now_ms)
        sent = [*device.info("canary"), *device.deploy(now_ms), *sent]
        record(str(url), sent, now_ms)


def test_a_release_is_halted_where_too_many_devices_rolled_it_back(
    project: SigningKey, edgert: Edgert, tmp_path: Path
) -> None:
    store = tmp_path / "fleet.db"
    assert edgert("publish", "digits-2.edgert", "--channel", "canary")[0] == 0
    stored(store, kept=3, rolled_back=1)
    code, answer = edgert("channel", "show", "canary", "--fleet", "--store", store)
    (release,) = answer["releases"]
    assert (code, release["kept"], release["rolled_back"], release["halted"]) == (0, 3, 1, False)
    assert release["failed"] == [
        {"device": "plant-a/rolled-back-0", "reason": "p99_ms is 9 ms, above its limit of 8 ms"}
    ]
    code, answer = edgert("channel", "watch", "canary", "--max-failures", "50%", "--store", store)
    assert (code, answer["halted"]) == (0, [])
    assert "3 kept, 1 rolled back" in edgert.stderr
    assert edgert("publish", "digits-2.edgert", "--channel", "canary", "--site", "plant-z")[0] == 0  # a second entry
    code, answer = edgert("channel", "watch", "canary", "--max-failures", "10%", "--store", store)
    assert (code, answer["halted"]) == (9, ["digits"])
    assert "halted release 2 of digits" in edgert.stderr
    assert entries(edgert("channel", "show", "canary")[1]) == [(2, 1.0, True), (2, 1.0, True)]


def test_a_release_that_no_device_has_started_is_not_a_success(
    project: SigningKey, edgert: Edgert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "fleet.db"
    assert edgert("publish", "digits-2.edgert", "--channel", "canary")[0] == 0
    record(str(store), Pi("other").info("stable"), time.time_ns() // 1_000_000)
    watch = ("channel", "watch", "canary", "--store", store)
    code, answer = edgert(*watch, "digit")
    assert (code, answer["error"]["message"]) == (4, "channel canary has no model 'digit'; known models: digits")

    def one_starts(seconds: float, stopped: Callable[[], bool]) -> bool:
        stored(store, kept=1, rolled_back=0)
        return False

    monkeypatch.setattr(channel_watch, "_pause", one_starts)
    code, answer = edgert(*watch)
    assert (code, answer["releases"][0]["kept"]) == (0, 1)
    assert "no device yet" in edgert.stderr
    assert edgert("channel", "remove", "canary", "digits")[0] == 0
    code, answer = edgert(*watch)
    assert (code, "channel canary has no models: publish" in answer["error"]["message"]) == (4, True)


AT_TLS = ("--registry", "oci://localhost:1/models")  # the command reads no CA file without TLS


def test_the_progress_of_a_release_is_shown_in_words(
    project: SigningKey, edgert: Edgert, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert edgert("publish", "digits-2.edgert", "--channel", "canary")[0] == 0
    stored(tmp_path / "fleet.db", kept=1, rolled_back=2)
    assert main(["channel", "show", "canary", "--fleet", "--store", str(tmp_path / "fleet.db")]) == 0
    out = capfd.readouterr().out
    assert "ROLLED BACK" in out
    assert "2 devices [digits r2]: p99_ms is 9 ms" in out


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("publish", "digits-1.edgert", "--registry", "https://example.org/models"), 4, "give oci://HOST/REPOSITORY"),
        (("publish", "digits-1.edgert", "--channel", "Bad Name"), 2, "not a name of a channel"),
        (("publish", "digits-1.edgert", "--channel", "stable", "--limit", "speed=1"), 4, "unknown limit"),
        (("publish", "missing.edgert"), 4, "there is no bundle"),
        (("channel", "show", "nothing"), 6, "has no channel nothing: check both names"),
        (("channel", "halt", "nothing"), 6, "has no channel nothing: check both names"),
        (("promote", "digits", "--from", "nothing", "--to", "stable"), 6, "has no channel nothing: check both names"),
        (("channel", "show", "stable", *AT_TLS), 6, "connection refused"),
        (("channel", "show", "stable", *AT_TLS, "--registry-ca", "missing.pem"), 4, "cannot read the certificates"),
        (("channel", "show", "stable", "--registry-login", "missing.json"), 4, "cannot read the login file"),
    ],
)
def test_an_impossible_change_of_a_channel_is_an_error(
    project: SigningKey, edgert: Edgert, words: tuple[str, ...], code: int, text: str
) -> None:
    found, answer = edgert(*words)
    assert (found, text in answer["error"]["message"]) == (code, True), answer


def test_each_hint_is_retained_and_differs_from_the_last(inventory: Inventory, edgert: Edgert, tmp_path: Path) -> None:
    with Broker.in_folder(tmp_path / "broker") as broker:
        hints = []
        for _ in range(2):
            code, answer = edgert("channel", "hint", "stable", "--broker", broker.settings.address)
            assert (code, answer["channel"]) == (0, "stable")
            hints.append(retained(broker, hint_topic("stable")))
    assert len(set(hints)) == 2


def retained(broker: Broker, topic: str) -> bytes:
    """Return the retained message of a topic."""
    seen: list[bytes] = []
    connection = Connection(broker.settings, on_message=lambda topic, payload, retained: seen.append(payload))
    connection.open()
    connection.subscribe((topic,), 1)

    def arrived() -> bool:
        connection.pump(0.05)
        return bool(seen)

    wait_until(arrived, "the broker retains the hint")
    connection.close()
    return seen[0]


def test_without_a_registry_the_message_names_the_key_of_the_project(
    project: SigningKey, edgert: Edgert, tmp_path: Path
) -> None:
    (tmp_path / "edgert.toml").write_text("")
    code, answer = edgert("channel", "show", "stable")
    assert code == 4
    assert "[registry]" in answer["error"]["message"]


def test_a_login_in_the_project_is_refused(project: SigningKey, edgert: Edgert, tmp_path: Path) -> None:
    (tmp_path / "login.json").write_text("{}")
    (tmp_path / "edgert.toml").write_text('[registry]\nlogin = "login.json"\n')
    code, answer = edgert("channel", "show", "stable")
    assert code == 4
    assert "a team commits" in answer["error"]["message"]


def test_a_channel_is_shown_in_words(
    project: SigningKey, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["publish", "digits-1.edgert", "--channel", "stable", "--share", "25%", "--tag", "line=3"]) == 0
    out, err = capfd.readouterr()
    assert "digits-1 in oci://" in out
    assert "for 25% of tag line=3" in out
    assert "sending to oci://" in err
    assert main(["channel", "show", "stable"]) == 0
    table = capfd.readouterr().out
    assert "25% of tag line=3" in table
    assert "open" in table
    assert "expired" not in table
    monkeypatch.setattr(
        "edgert_deploy.cli.shared.channel_options.time.time", lambda: time.time_ns() / 1e9 + 31 * 86_400
    )
    assert main(["channel", "show", "stable"]) == 0
    assert "(expired: edgert channel renew stable)" in capfd.readouterr().out
