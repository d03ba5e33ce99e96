"""The locks have all requirements of pyproject.toml. If this test fails, run make lock."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from packaging.requirements import Requirement

from edgert.engines import ENGINES, FOR_TESTS
from edgert_deploy.bootstrap.locked_wheels import MACHINES, read_lock
from edgert_deploy.bootstrap.wheelhouse import WheelTarget
from tests.support.paths import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


# Each file, and the extras that it has the requirements of.
LOCKS = {
    "requirements/dev.txt": ("dev",),
    "requirements/demo.txt": ("host", "demo"),
    "deploy/edgert_deploy/bootstrap/locked_wheels.txt": (
        *(name for name in ENGINES if name not in FOR_TESTS),
        "http",
        "channels",
        "text",
    ),
}


def asked(*extras: str) -> Iterator[Requirement]:
    """Yield the requirements of edgert with `extras`; an extra may name others."""
    for line in [
        *PROJECT["dependencies"],
        *(line for name in extras for line in PROJECT["optional-dependencies"][name]),
    ]:
        requirement = Requirement(line)
        if requirement.name == "edgert":
            yield from asked(*requirement.extras)
        else:
            yield requirement


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13"])
@pytest.mark.parametrize(("file", "extras"), LOCKS.items())
def test_a_lock_has_one_version_of_each_requirement(
    file: str, extras: tuple[str, ...], python: str, machine: str
) -> None:
    there = WheelTarget(python, machine, "2.36").environment()
    wanted = [one for one in asked(*extras) if one.marker is None or one.marker.evaluate(dict(there))]
    lock = read_lock((ROOT / file).read_text())
    assert len(lock.lines(wanted, there)) == len(wanted) > 10


def test_setup_distinguishes_a_python_that_does_not_run_from_a_python_without_venv() -> None:
    made = subprocess.run(
        ["make", "setup", "PYTHON=false", "VENV=build/none"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert made.returncode == 2
    assert "error: false does not run; name one that does by its path: make PYTHON=" in made.stderr
    assert "cannot make virtual environments" not in made.stderr
