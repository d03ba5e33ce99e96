"""The memory of workers: what is measured and remembered, and which models are unloaded."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest

from edgert.config import parse_config
from edgert.daemon.memory import (
    IDLE_S_MIN,
    WORKER_BASE_MB,
    Claim,
    LearnedSizes,
    Room,
    estimated_mb,
    make_room,
    process_mb,
)
from edgert.errors import ConfigInvalid

NOW = 1000.0


def claim(model: str, mb: float, idle_s: float = 100.0, **kinds: bool) -> Claim:
    return Claim(model, mb, NOW - idle_s, **kinds)


@pytest.mark.parametrize(
    ("need", "claims", "room"),
    [
        (50, [], Room(True)),
        (50, [claim("a", 50)], Room(True)),
        (50, [claim("a", 60)], Room(False, ("a",))),
        (50, [claim("new", 40, 5), claim("old", 40, 9)], Room(False, ("old",))),
        (90, [claim("new", 40, 5), claim("old", 40, 9)], Room(False, ("old", "new"))),
        (50, [claim("a", 60, fixed=True)], Room(False)),
        (50, [claim("a", 60, idle_s=IDLE_S_MIN / 2)], Room(False)),
        (50, [claim("a", 60, leaving=True)], Room(False)),
        (50, [claim("pinned", 30, fixed=True), claim("a", 40)], Room(False, ("a",))),
        (80, [claim("pinned", 30, fixed=True), claim("a", 40)], Room(False)),
    ],
    ids=["empty", "fits", "one-goes", "oldest-goes", "two-go", "fixed", "in-use", "on-its-way", "beside", "in-vain"],
)
def test_the_least_recently_used_go_and_only_as_many_as_must(need: float, claims: list[Claim], room: Room) -> None:
    assert make_room(need, 100, claims, NOW) == room


def test_sizes_are_remembered_by_the_next_process(tmp_path: Path) -> None:
    LearnedSizes(tmp_path / "learned").learn("d" * 64, 55.5)
    again = LearnedSizes(tmp_path / "learned")
    assert again.of("d" * 64) == 55.5
    assert again.of("e" * 64) is None
    again.learn("d" * 64, 56.0)
    assert again.of("d" * 64) == 55.5  # not worth a write
    next((tmp_path / "learned").iterdir()).write_text("{")
    assert LearnedSizes(tmp_path / "learned").of("d" * 64) is None


def test_a_size_is_estimated_while_an_install_comes_and_goes(tmp_path: Path) -> None:
    stop, stage = threading.Event(), tmp_path / "stage"

    def come_and_go() -> None:
        while not stop.is_set():
            (stage / "engine").mkdir(parents=True)
            for number in range(50):
                (stage / "engine" / str(number)).touch()
            shutil.rmtree(stage)

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        assert {estimated_mb(tmp_path) for _ in range(500)} == {WORKER_BASE_MB}
    finally:
        stop.set()
        thread.join()


def test_a_process_has_a_size_and_one_that_is_gone_has_none() -> None:
    size = process_mb(os.getpid())
    assert size is not None
    assert 5 < size < 5000
    assert process_mb(2**22 + 1) is None


def test_pinned_models_stand_in_the_configuration() -> None:
    head = 'device = "d-1"\nprofile = "p"\n'
    config = parse_config(f"{head}[models.digits]\npinned = true\n", "here")
    assert (config.model("digits").pinned, config.model("other").pinned) == (True, False)
    for wrong in ("[models.digits]\npined = true\n", "[models]\ndigits = 1\n", "models = 1\n"):
        with pytest.raises(ConfigInvalid):
            parse_config(head + wrong, "here")
