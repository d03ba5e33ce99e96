"""The error for a missing package has the command that installs the package."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from importlib.metadata import distribution, distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from edgert.errors import ConfigInvalid
from edgert.extras import EXTRAS, missing_package
from edgert_deploy.cli import COMMANDS
from edgert_deploy.cli.bundle import COMMANDS as BUNDLE_COMMANDS
from edgert_deploy.cli.channel import COMMANDS as CHANNEL_COMMANDS
from edgert_deploy.cli.device import COMMANDS as DEVICE_COMMANDS
from edgert_deploy.cli.fleet import COMMANDS as FLEET_COMMANDS
from tests.support.environments import environment_with, requirements
from tests.support.paths import ROOT

# The packages that `pip install edgert` alone installs.
BASE = {"click", "cryptography", "numpy", "paho", "PIL", "tomli", "xxhash", "zstandard"}
# The modules that import these packages have error messages of their own.
OWN_MESSAGES = {"cuda", "keras", "pycuda", "tensorrt", "tensorrt_rtx_bindings"}

GROUPS = {"bundle": BUNDLE_COMMANDS, "channel": CHANNEL_COMMANDS, "device": DEVICE_COMMANDS}
HOST_COMMANDS = [[name] for name in COMMANDS] + [[group, name] for group, names in GROUPS.items() for name in names]


def test_every_import_of_an_optional_package_is_known() -> None:
    found = {module for path in sources() for module in imported(path)}
    ours = {"edgert", "edgert_deploy", "tomllib", *sys.stdlib_module_names}  # Python 3.10 has no tomllib
    assert found - ours - BASE - OWN_MESSAGES - set(EXTRAS) == set()


@pytest.mark.parametrize("module", EXTRAS)
def test_the_listed_extras_install_the_package(module: str) -> None:
    names = distributions_by_module().get(module, {module})
    for extra in EXTRAS[module]:
        assert names & brought_by(extra), f"edgert[{extra}] does not bring {module}"


def test_without_extras_every_command_works_or_names_the_command_that_installs_its_packages(tmp_path: Path) -> None:
    commands = HOST_COMMANDS + [["fleet", name] for name in FLEET_COMMANDS]
    answers = helped(environment_with(tmp_path / "base"), commands)
    assert [answer for answer in answers if answer[1] not in (0, 4)] == []
    for words, code, said in answers:
        extra = "fleet" if words[0] == "fleet" else "host"
        assert code == 0 or f"pip install 'edgert[{extra}]'" in said, (words, said)
    assert {code for _, code, _ in answers} == {0, 4}


def test_an_extra_installs_all_packages_that_its_commands_need(tmp_path: Path) -> None:
    fleet = [["fleet", name] for name in FLEET_COMMANDS]
    answers = helped(environment_with(tmp_path / "fleet", "fleet"), fleet)
    answers += helped(environment_with(tmp_path / "host", "host"), HOST_COMMANDS)
    assert [answer for answer in answers if answer[1] != 0] == []


def test_a_missing_module_that_no_extra_installs_is_not_reported_as_a_missing_extra() -> None:
    assert missing_package(ModuleNotFoundError("No module named 'nothing'", name="nothing")) is None
    assert missing_package(ValueError("onnx")) is None
    error = missing_package(ModuleNotFoundError("No module named 'rich.table'", name="rich.table"), "fleet")
    assert isinstance(error, ConfigInvalid)
    assert "edgert[fleet]" in error.message


def helped(python: str, commands: list[list[str]]) -> list[tuple[list[str], int, str]]:
    """Run --help of each command with an interpreter; return words, exit code and stderr."""
    program = (
        "import contextlib, io, json, sys\n"
        "from edgert_deploy.cli import main\n"
        "answers = []\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:\n"
        "        code = main([*words, '--help'])\n"
        "    answers.append((words, code, said.getvalue()))\n"
        "print(json.dumps(answers))\n"
    )
    words = [python, "-c", program, json.dumps(commands)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=Path(python).parent, check=False)
    assert done.returncode == 0, done.stderr
    return [(words, code, said) for words, code, said in json.loads(done.stdout)]


def sources() -> list[Path]:
    return [path for folder in ("edgert", "deploy/edgert_deploy") for path in (ROOT / folder).rglob("*.py")]


def imported(path: Path) -> Iterator[str]:
    """Yield the top-level modules that a file imports at run time."""
    todo: list[ast.AST] = [ast.parse(path.read_text())]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield (node.module or "").partition(".")[0]
        todo += ast.iter_child_nodes(node)


@cache
def distributions_by_module() -> dict[str, set[str]]:
    """Return each top-level module's distributions, including namespace packages (not in Python 3.10)."""
    found = defaultdict(set)
    for each in distributions():
        name = str(canonicalize_name(each.name))  # each use of it parses the metadata
        for file in each.files or ():
            found[file.parts[0].partition(".")[0]].add(name)
    return dict(found)


def brought_by(extra: str) -> set[str]:
    """Return the distributions of an extra, and their own requirements."""
    direct = {canonicalize_name(requirement.name) for requirement in requirements(extra)}
    further = set()
    for name in direct:
        try:
            further |= {canonicalize_name(Requirement(line).name) for line in distribution(name).requires or ()}
        except ModuleNotFoundError:  # not installed here, such as TensorFlow
            continue
    return direct | further
