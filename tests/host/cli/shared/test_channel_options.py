"""The options of a channel's commands, the text of a statement, and refused options."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgert.bundle.channel import Entry, Statement
from edgert.bundle.expiry import time_text
from edgert.bundle.signing import new_key, write_key_pair
from edgert.errors import ConfigInvalid
from edgert.names import RUNTIME
from edgert_deploy.cli.shared.channel_options import (
    OfferOptions,
    RegistryOptions,
    SigningOptions,
    channels_of,
    devices_text,
    statement_table,
)
from edgert_deploy.devices.inventory import Inventory
from tests.support.bundles import make_null_bundle
from tests.support.commands import Edgert, own_key

DIGEST = "1" * 64
ENTRY = Entry("digits", 7, DIGEST, DIGEST, DIGEST)
EVERY = OfferOptions(share=1.0, sites=(), profiles=(), tags=(), limits=(), watch_s=None)
NOWHERE = "oci+http://127.0.0.1:1/models"


def a_statement(*entries: Entry, ends_in_s: float = 3600.0, **more: Any) -> Statement:
    now_s = time.time()
    return Statement("stable", 5, time_text(now_s - 7200), time_text(now_s + ends_in_s), entries, **more)


@pytest.fixture
def project(inventory: Inventory, tmp_path: Path) -> Path:
    """A project with a key and an unreachable registry. Exit code 6 means an attempt to connect."""
    key = own_key(tmp_path)
    (tmp_path / "edgert.toml").write_text(f'[registry]\naddress = "{NOWHERE}"\n[trial]\nwatch = "10m"\ntemp_c = 80\n')
    make_null_bundle(tmp_path, key, "digits", 1)
    return tmp_path


# --- the devices of a release, and their trial


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        (ENTRY, "all"),
        (replace(ENTRY, share=0.05), "5%"),
        (replace(ENTRY, share=0.07), "7%"),
        (replace(ENTRY, share=0.000001), "0.0001%"),
        (replace(ENTRY, share=0.0), "0%"),
        (replace(ENTRY, sites=("plant-a",)), "all of site plant-a"),
        (replace(ENTRY, share=0.25, tags=("line=3", "rack")), "25% of tag line=3 or rack"),
        (replace(ENTRY, sites=("a", "b"), profiles=("pi",), tags=("x",)), "all of site a or b, profile pi, tag x"),
    ],
)
def test_the_devices_of_an_entry_are_reported_in_words(entry: Entry, text: str) -> None:
    assert devices_text(entry) == text


def test_the_limits_of_a_model_come_from_the_project_and_from_the_options(project: Path) -> None:
    assert EVERY.trial("digits") == {"limits": {"temp_c": 80.0}, "watch_s": 600.0}
    given = replace(EVERY, limits=("p99_ms=8", "temp_c=off"), watch_s=90.0)
    assert given.trial("digits") == {"limits": {"p99_ms": 8.0}, "watch_s": 90.0}
    (project / "edgert.toml").write_text("")
    assert EVERY.trial("digits") == {}
    assert replace(EVERY, watch_s=90.0).trial("digits") == {"limits": {}, "watch_s": 90.0}


@pytest.mark.parametrize("model", ["watch", "temp_c", "unattended"])
def test_a_model_may_have_the_name_of_a_key_of_the_project_limits(project: Path, model: str) -> None:
    assert EVERY.trial(model) == {"limits": {"temp_c": 80.0}, "watch_s": 600.0}


def test_a_runtime_has_a_time_to_serve_but_no_limits(project: Path) -> None:
    assert EVERY.trial(RUNTIME) == {}
    assert replace(EVERY, watch_s=90.0).trial(RUNTIME) == {"watch_s": 90.0}
    with pytest.raises(ConfigInvalid, match="give --watch, not --limit"):
        replace(EVERY, limits=("p99_ms=8",)).trial(RUNTIME)


@pytest.mark.parametrize(
    "limits", [("p99_ms",), ("speed=1",), ("p99_ms=-1",), ("p99_ms=nan",), ("",), ("error_share=101%",)]
)
def test_an_invalid_limit_is_refused(project: Path, limits: tuple[str, ...]) -> None:
    with pytest.raises(ConfigInvalid):
        replace(EVERY, limits=limits).trial("digits")


@pytest.mark.parametrize("watch_s", [0.0, 1e9])
def test_a_watch_outside_the_limits_is_refused(project: Path, watch_s: float) -> None:
    with pytest.raises(ConfigInvalid, match="a watch of"):
        replace(EVERY, watch_s=watch_s).trial("digits")


# --- a statement


def test_a_statement_is_shown_with_a_row_for_each_entry() -> None:
    limited = replace(
        ENTRY,
        release=8,
        share=0.05,
        sites=("plänt",),
        limits={"p99_ms": 8.0, "error_share": 0.001},
        watch_s=600,
        halted=True,
    )
    head, title, *rows = statement_table(a_statement(limited, ENTRY)).splitlines()
    assert head.startswith("channel stable, counter 5, signed ")
    assert "expired" not in head
    assert title.split() == ["MODEL", "RELEASE", "DEVICES", "LIMITS", "WATCH", "STATE"]
    assert [row.split() for row in rows] == [
        ["digits", "r8", "5%", "of", "site", "plänt", "p99_ms=8,", "error_share=0.001", "10m", "halted"],
        ["digits", "r7", "all", "-", "1m", "open"],
    ]


def test_the_output_names_an_expired_statement_and_revoked_keys_and_the_lack_of_models() -> None:
    shown = statement_table(a_statement(ends_in_s=-60, revoked=("0" * 16, "f" * 16)))
    assert "(expired: edgert channel renew stable)" in shown
    assert f"\nrevoked keys: {'0' * 16}, {'f' * 16}\nno models" in shown


def test_the_names_in_a_statement_are_shown_without_control_characters() -> None:
    shown = statement_table(a_statement(replace(ENTRY, sites=("a\x1b[2J\nb",), tags=("\u202ex",))))
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    assert len(shown.splitlines()) == 3


# --- the registry and the key


@pytest.mark.parametrize(
    ("registry", "reason"),
    [
        (RegistryOptions(None, None, None), "no registry is given"),
        (RegistryOptions("", None, None), "no registry is given"),
        (RegistryOptions("registry.example.org/models", None, None), "give oci://HOST/REPOSITORY"),
        (RegistryOptions("oci://user:pass@registry.example.org/models", None, None), "contains a login"),
        (RegistryOptions("oci://registry.example.org/models:latest", None, None), "without a tag"),
        (RegistryOptions("oci://registry.example.org/models", None, Path("none.json")), "none.json"),
    ],
)
def test_invalid_options_for_the_registry_are_refused_before_the_registry_is_asked(
    inventory: Inventory, registry: RegistryOptions, reason: str
) -> None:
    with pytest.raises(ConfigInvalid) as refused:
        registry.opened()
    assert reason in refused.value.message
    assert "pass@" not in refused.value.message


def test_a_statement_is_signed_with_the_key_of_that_name_or_file(project: Path) -> None:
    default, other = SigningOptions(None, 60.0).key(), new_key()
    write_key_pair(other, project / "conf" / "other.key.pem", project / "conf" / "other.pem")
    assert SigningOptions("default", 60.0).key().public.key_id == default.public.key_id
    assert SigningOptions("conf/other.key.pem", 60.0).key().public.key_id == other.public.key_id
    with pytest.raises(ConfigInvalid, match="no private key 'nobody'"):
        SigningOptions("nobody", 60.0).key()
    with RegistryOptions(NOWHERE, None, None).opened() as registry:
        assert channels_of(registry) is not None


# --- the commands


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--share", "5%"), "--share needs a channel"),
        (("--site", "plant-a"), "--site needs a channel"),
        (("--profile", "pi"), "--profile needs a channel"),
        (("--tag", "rack"), "--tag needs a channel"),
        (("--limit", "p99_ms=8"), "--limit needs a channel"),
        (("--watch", "10m"), "--watch needs a channel"),
        (("--expires", "30d"), "--expires needs a channel"),
        (("--channel", "stable", "--share", "0%"), "not a share"),
        (("--channel", "stable", "--share", "100.1%"), "not a share"),
        (("--channel", "stable", "--expires", "59s"), "give at least 1m and at most 3650d"),
        (("--channel", "stable", "--expires", "3651d"), "give at least 1m and at most 3650d"),
        (("--channel", ""), "not a name of a channel"),
        (("--channel", "stäble"), "not a name of a channel"),
    ],
)
def test_options_without_effect_are_a_usage_error(
    edgert: Edgert, project: Path, words: tuple[str, ...], reason: str
) -> None:
    code, answer = edgert("publish", "digits-1.edgert", *words)
    assert (code, reason in answer["error"]["message"]) == (2, True), answer


@pytest.mark.parametrize("option", ["--site", "--profile", "--tag"])
@pytest.mark.parametrize("name", ["", " "])
def test_an_empty_name_is_refused_before_the_registry_is_asked(
    edgert: Edgert, project: Path, option: str, name: str
) -> None:
    code, answer = edgert("publish", "digits-1.edgert", "--channel", "stable", option, name)
    assert (code, f"{option} is empty" in answer["error"]["message"]) == (4, True), answer


def test_a_bundle_may_be_published_without_being_offered(edgert: Edgert, project: Path) -> None:
    code, answer = edgert("publish", "digits-1.edgert", "--key", "default")
    assert (code, "connection refused" in answer["error"]["message"]) == (6, True), "the registry was asked"


def test_a_runtime_for_profiles_needs_no_channel_but_a_share_needs_one(edgert: Edgert, project: Path) -> None:
    code, answer = edgert("publish-runtime", 4, "--profile", "none-such", "--python", "3.11")
    assert (code, "none-such" in answer["error"]["message"]) == (4, True), answer
    code, answer = edgert("publish-runtime", 4, "--profile", "none-such", "--python", "3.11", "--share", "5%")
    assert (code, "--share needs a channel" in answer["error"]["message"]) == (2, True)
