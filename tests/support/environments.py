"""Further Python environments: with all packages of this environment, or only with edgert's requirements."""

from __future__ import annotations

import sys
import venv
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement

from edgert.toml_file import read_toml
from tests.support.paths import ROOT


def environment_beside(folder: Path) -> str:
    """Make an environment that has the packages of this one, except edgert; return its interpreter."""
    paths = [path for path in sys.path if path.endswith("site-packages")]
    return _made(folder, paths)


def environment_with(folder: Path, extra: str = "") -> str:
    """Make an environment with the packages of `pip install edgert[EXTRA]` and this edgert; return its Python."""
    packages = folder / "packages"
    packages.mkdir(parents=True)
    for name in _required(extra):
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


def requirements(extra: str = "") -> list[Requirement]:
    """Return the requirements of this source tree, or of its `extra`. An installed edgert may be older."""
    project = read_toml(ROOT / "pyproject.toml")["project"]
    lines = project["optional-dependencies"][extra] if extra else project["dependencies"]
    return [Requirement(line) for line in lines]


def _required(extra: str) -> set[str]:
    """Return the distributions that edgert needs with `extra`."""
    found: set[str] = set()
    todo = [*requirements(), *(requirements(extra) if extra else ())]
    while todo:
        requirement = todo.pop()
        if requirement.name in found or (requirement.marker is not None and not _holds(requirement, {""})):
            continue
        found.add(requirement.name)
        further = map(Requirement, distribution(requirement.name).requires or ())
        todo += [each for each in further if _holds(each, {"", *requirement.extras})]
    return found


def _holds(requirement: Requirement, extras: set[str]) -> bool:
    return requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in extras)
