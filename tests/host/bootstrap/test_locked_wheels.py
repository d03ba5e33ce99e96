"""The lock has one version of every package that a device may need, for every Python and machine."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from packaging.requirements import Requirement

from edgert.engines import ENGINES, FOR_TESTS
from edgert.errors import ConfigInvalid
from edgert_deploy.bootstrap.locked_wheels import MACHINES, read_lock, shipped_lock
from edgert_deploy.bootstrap.wheelhouse import DEFAULT_EXTRAS, OPTIONAL_EXTRAS, WheelTarget
from tests.support.paths import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LOCK = """\
numpy==2.2.6 ; python_full_version < '3.11' \\
    --hash=sha256:aa \\
    --hash=sha256:bb
    # via edgert (pyproject.toml)
Numpy==2.4.6 ; python_full_version >= '3.11' \\
    --hash=sha256:cc
"""


def environment(python: str, machine: str = "x86_64") -> dict[str, str]:
    return WheelTarget(python, machine, "2.36").environment()


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13"])
def test_the_lock_has_the_requirements_of_every_engine(python: str, machine: str) -> None:
    """The locked versions must fit pyproject.toml. If this test fails, run make lock."""
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    named = (*DEFAULT_EXTRAS, *OPTIONAL_EXTRAS, *(name for name in ENGINES if name not in FOR_TESTS))
    asked = [*project["dependencies"], "pip", *(each for name in named for each in extras[name])]
    there = environment(python, machine)
    wanted = [one for one in map(Requirement, asked) if one.marker is None or one.marker.evaluate(dict(there))]
    lines = shipped_lock().lines(wanted, there)
    assert len(lines) == len(wanted)
    assert all("--hash=sha256:" in line for line in lines)


def test_a_pin_is_chosen_by_its_marker() -> None:
    lock = read_lock(LOCK)
    wanted = [Requirement("NumPy>=2")]
    assert lock.lines(wanted, environment("3.10")) == ["numpy==2.2.6 --hash=sha256:aa --hash=sha256:bb"]
    assert lock.lines(wanted, environment("3.12")) == ["numpy==2.4.6 --hash=sha256:cc"]


@pytest.mark.parametrize(("asked", "found"), [("numpy<2", "2.4.6"), ("scipy", "nothing")])
def test_a_requirement_that_the_lock_lacks_is_refused(asked: str, found: str) -> None:
    with pytest.raises(ConfigInvalid, match=f"{found} where {asked} is needed"):
        read_lock(LOCK).lines([Requirement(asked)], environment("3.12"))
