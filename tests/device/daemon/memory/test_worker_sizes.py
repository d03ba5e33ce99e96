"""The sizes of workers: measured and stored sizes, and estimates before the first measurement."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

from edgert.daemon.memory.worker_sizes import FORK_MB, LearnedSizes, estimated_mb


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
        assert {estimated_mb(tmp_path, forked=True) for _ in range(500)} == {FORK_MB}
    finally:
        stop.set()
        thread.join()
