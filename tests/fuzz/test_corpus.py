"""Run every reader on its seeds and on the corpus, so that no mended finding returns.

`make fuzz` searches for new findings.
"""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from tests.fuzz.targets import TARGETS

CORPUS = Path(__file__).with_name("corpus")
KEPT = sorted(path for path in CORPUS.rglob("*") if path.is_file())
MEMORY_BYTES_MAX = 64 * 1024**2  # for one input of a few KB
CORPUS_BYTES_MAX = 512 * 1024


@pytest.mark.parametrize("name", TARGETS)
def test_a_reader_accepts_or_refuses_its_seeds(name: str) -> None:
    for seed in TARGETS[name].seeds():
        TARGETS[name].run(seed)


@pytest.mark.parametrize("path", KEPT, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_a_reader_accepts_or_refuses_each_input_of_the_corpus_in_little_memory(path: Path) -> None:
    target = TARGETS[path.parent.name]
    target.run(target.seeds()[0])  # excludes imports and objects that are created once
    data = path.read_bytes()
    tracemalloc.start()
    try:
        target.run(data)
        assert tracemalloc.get_traced_memory()[1] < MEMORY_BYTES_MAX
    finally:
        tracemalloc.stop()


def test_the_corpus_is_small() -> None:
    assert sum(path.stat().st_size for path in KEPT) < CORPUS_BYTES_MAX
