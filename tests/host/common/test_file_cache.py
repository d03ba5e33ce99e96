"""The cache of files: files are made once, and a damaged entry is never used."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgert.errors import ConfigInvalid
from edgert_deploy.common.file_cache import FileCache, default_cache

KEYS = [letter * 64 for letter in "abc"]


class Maker:
    """Makes two files of 100 bytes through a cache; `count` is the number of times that it made them."""

    def __init__(self, folder: Path) -> None:
        self.cache = FileCache(folder / "cache")
        self.count = self.calls = 0
        self._folder = folder

    def __call__(self, key: str) -> bytes:
        self.calls += 1
        out = self._folder / f"out-{self.calls}"
        out.mkdir()
        paths = [out / "model.onnx", out / "model.bin"]
        if not self.cache.get(key, out):
            assert list(out.iterdir()) == []
            self.count += 1
            for path in paths:
                path.write_bytes(key[:1].encode() * 100)
            self.cache.put(key, paths)
        assert {path.name for path in out.iterdir()} == {"model.onnx", "model.bin"}
        return paths[0].read_bytes() + paths[1].read_bytes()


@pytest.fixture
def maker(tmp_path: Path) -> Maker:
    return Maker(tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-1] + b"?"),
        lambda path: path.unlink(),
        lambda path: path.with_name("entry.json").write_text("{"),
        lambda path: path.with_name("entry.json").write_text('{"../x": "0"}'),
        lambda path: path.with_name("entry.json").write_text("[]"),
    ],
)
def test_files_are_made_once_and_a_damaged_entry_is_made_again(maker: Maker, damage: Callable[[Path], Any]) -> None:
    first = maker(KEYS[0])
    assert maker(KEYS[0]) == first
    assert maker.count == 1
    damage(maker.cache.folder / KEYS[0] / "model.onnx")
    assert maker(KEYS[0]) == first
    assert maker.count == 2
    assert maker(KEYS[0]) == first
    assert maker.count == 2


def test_the_least_recently_used_entry_is_evicted_first(maker: Maker, tmp_path: Path) -> None:
    for age, key in enumerate(KEYS[:2]):
        maker(key)
        os.utime(maker.cache.folder / key / "entry.json", (1000 + age, 1000 + age))
    maker(KEYS[0])  # used: now the second is the oldest
    size = sum(path.stat().st_size for path in (maker.cache.folder / KEYS[0]).iterdir())
    maker.cache = FileCache(maker.cache.folder, int(size * 2.5))
    maker(KEYS[2])
    assert {path.name for path in maker.cache.folder.iterdir()} == {KEYS[0], KEYS[2]}
    assert not maker.cache.find(KEYS[1])
    assert {path.name for path in maker.cache.find(KEYS[2])} == {"model.onnx", "model.bin"}


def test_files_are_made_although_the_cache_cannot_be_written(maker: Maker, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    maker.cache = FileCache(tmp_path / "file" / "cache")
    assert maker(KEYS[0]) == maker(KEYS[0])
    assert maker.count == 2


def test_the_environment_sets_the_folder_and_the_limit_of_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("EDGERT_CACHE", "3MB")
    assert default_cache() == FileCache(tmp_path / "edgert" / "build", 3_000_000)
    monkeypatch.setenv("EDGERT_CACHE", "4096")
    with pytest.raises(ConfigInvalid, match="EDGERT_CACHE: '4096' is not a size"):
        default_cache()
