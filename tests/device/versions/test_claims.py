"""Claims separate deployments of one model, and no claim blocks a device for ever."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from edgert.errors import DeployUnderWay
from edgert.state_dir import StateDir
from edgert.versions.boot_clock import BootClock
from edgert.versions.claims import Claims


class Clock(BootClock):
    def __init__(self) -> None:
        self.boot_id, self.time_s = "boot", 100.0

    def now_s(self) -> float:
        return self.time_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def claims(tmp_path: Path, clock: Clock) -> Claims:
    return Claims(StateDir(tmp_path), "board", clock)


def test_the_refusal_of_a_second_claim_names_the_holder_and_the_time(claims: Claims) -> None:
    claims.acquire("mlp", "ann@desk", 60)
    with pytest.raises(
        DeployUnderWay, match=r"another deployment of mlp is in progress on board \(since 2.*, by ann@desk\)"
    ):
        claims.acquire("mlp", "bob@desk", 60)
    claims.acquire("other", "bob@desk", 60)


def test_a_claim_is_released_by_its_own_token_only(claims: Claims) -> None:
    first = claims.acquire("mlp", "ann@desk", 60)
    claims.release("mlp.0123")
    with pytest.raises(DeployUnderWay):
        claims.acquire("mlp", "bob@desk", 60)
    claims.release(first.token)
    claims.release(first.token)
    claims.acquire("mlp", "bob@desk", 60)


def test_a_renewed_claim_lasts_and_another_claim_expires(claims: Claims, clock: Clock) -> None:
    first = claims.acquire("mlp", "ann@desk", 60)
    clock.time_s += 50
    claims.renew(first.token)
    clock.time_s += 50
    with pytest.raises(DeployUnderWay, match="expires in 10 s"):
        claims.acquire("mlp", "bob@desk", 60)
    clock.time_s += 10
    second = claims.acquire("mlp", "bob@desk", 60)
    with pytest.raises(DeployUnderWay, match="expired; another deploy"):
        claims.renew(first.token)
    claims.renew(second.token)


def test_an_expired_claim_that_nobody_replaced_can_be_renewed(claims: Claims, clock: Clock) -> None:
    first = claims.acquire("mlp", "ann@desk", 60)
    clock.time_s += 500
    claims.renew(first.token)
    with pytest.raises(DeployUnderWay):
        claims.acquire("mlp", "bob@desk", 60)


def test_a_claim_without_a_valid_time_does_not_block_others(claims: Claims) -> None:
    claims.acquire("mlp", "ann@desk", math.nan)
    claims.acquire("mlp", "bob@desk", 60)


def test_a_reboot_ends_a_claim(claims: Claims, clock: Clock) -> None:
    claims.acquire("mlp", "ann@desk", 60)
    clock.boot_id = "next"
    claims.acquire("mlp", "bob@desk", 60)


def test_a_new_claim_of_a_host_replaces_its_dead_claim(claims: Claims) -> None:
    dead = claims.acquire("mlp", "ann@desk", 60)
    claims.acquire("mlp", "ann@desk", 60, instead_of=dead.token)
    with pytest.raises(DeployUnderWay):
        claims.renew(dead.token)


def test_a_torn_file_of_a_claim_does_not_block_others(claims: Claims, tmp_path: Path) -> None:
    claims.acquire("mlp", "ann@desk", 60)
    (tmp_path / "claims" / "mlp.json").write_text("{")
    claims.acquire("mlp", "bob@desk", 60)
