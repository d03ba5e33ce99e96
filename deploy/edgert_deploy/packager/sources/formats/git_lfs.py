"""Recognizes files that can be neither a model nor samples: pointers of Git LFS, pipes and devices."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from edgert.toml_file import pipe_problem

BEGINNING = b"version https://git-lfs.github.com/spec/"


def pointer_problem(path: Path) -> str:
    """Return a message if `path` is a Git LFS pointer, a pipe or a device; otherwise an empty text."""
    if problem := pipe_problem(path):  # opening a pipe would block, and a device may be endless
        return problem
    with suppress(OSError), path.open("rb") as file:
        if file.read(len(BEGINNING)) == BEGINNING:
            return f"{path} is a Git LFS pointer, not the file itself: run git lfs pull in its folder"
    return ""
