"""Other versions of EdgeRT for upgrades: copies of this source tree with a change."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.support.paths import ROOT

COPIED = ("edgert", "deploy", "devices", "pyproject.toml", "README.md", "LICENSE")


def another_tree(tree: Path, file: str = "edgert/__init__.py", old: str = "", new: str = "") -> Path:
    """Copy the source tree to `tree`; replace `old` in `file`; write the tree's name to `edgert.WHICH`."""
    tree.mkdir()
    for each in COPIED:
        if (ROOT / each).is_dir():
            shutil.copytree(ROOT / each, tree / each)  # with the byte code, which holds for the same times of files
        else:
            shutil.copyfile(ROOT / each, tree / each)
    about = tree / "edgert/__init__.py"
    about.write_text(about.read_text() + f"\nWHICH = {tree.name!r}\n")
    text = (tree / file).read_text()
    assert old in text
    (tree / file).write_text(text.replace(old, new, 1))
    return tree
