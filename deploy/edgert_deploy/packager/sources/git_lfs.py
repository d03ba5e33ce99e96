"""Git LFS pointers: what a clone without Git LFS holds in place of a model or of samples."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

BEGINNING = b"version https://git-lfs.github.com/spec/"


def pointer_problem(path: Path) -> str:
    """Return what to tell the user about `path` if it is a pointer of Git LFS, else an empty text."""
    if not path.is_file():  # opening a pipe would wait
        return ""
    with suppress(OSError), path.open("rb") as file:
        if file.read(len(BEGINNING)) == BEGINNING:
            return f"{path} is a Git LFS pointer, not the file itself: run git lfs pull in its folder"
    return ""
