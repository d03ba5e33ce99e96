"""Environments of Python beside this one: with all of its packages, or with those alone that edgert requires."""

from __future__ import annotations

import sys
import venv
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement

from tests.support.paths import ROOT


def environment_beside(folder: Path) -> str:
    """Make an environment that finds this one's packages, but no edgert; return its interpreter."""
    paths = [path for path in sys.path if path.endswith("site-packages")]
    return _made(folder, paths)


def environment_without_extras(folder: Path) -> str:
    """Make an environment with this edgert and what `pip install edgert` alone brings; return its interpreter."""
    packages = folder / "packages"
    packages.mkdir(parents=True)
    for name in _required("edgert"):
        for top in {file.parts[0] for file in distribution(name).files or () if ".." not in file.parts}:
            source = Path(str(distribution(name).locate_file(top)))
            if source.exists() and not (packages / top).is_symlink():
                (packages / top).symlink_to(source)
    return _made(folder, [str(packages), str(ROOT), str(ROOT / "deploy")])


def _made(folder: Path, paths: list[str]) -> str:
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "found.pth").write_text("".join(f"{path}\n" for path in paths))
    return str(folder / "bin" / "python")


def _required(root: str) -> set[str]:
    """Return the distributions that `root` needs without any extra."""
    found: set[str] = set()
    todo = [root]
    while todo:
        for line in distribution(todo.pop()).requires or ():
            requirement = Requirement(line)
            holds = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if holds and requirement.name not in found:
                found.add(requirement.name)
                todo.append(requirement.name)
    return found
