"""The cache of sent files stays within its limit."""

from __future__ import annotations

import os
from pathlib import Path

from edgert_deploy.rollout.object_cache import ObjectCache


def test_the_cache_stays_within_its_limit_and_drops_the_objects_that_were_used_least_recently(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path / "objects", bytes_max=250)
    for number, name in enumerate("abc"):
        with cache.temporary_folder() as folder:
            (Path(folder) / "x").write_bytes(bytes(100))
            os.utime(cache.keep(name, Path(folder) / "x"), (number, number))
        cache.find("a")
    assert [cache.find(name) is not None for name in "abc"] == [True, False, True]
    assert cache.read("a") is None, "an object whose hash is not its name is none"
