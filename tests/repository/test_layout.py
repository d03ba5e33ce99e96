"""The tests mirror the packages, each module with logic has its test, and the root has no other files."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PACKAGES = {"device": ROOT / "edgert", "host": ROOT / "deploy" / "edgert_deploy"}
# Each test file that is named after no module, with the reason.
NAMED_AFTER_NO_MODULE = {
    "tests/device/cli/test_help.py": "the help of every command",
    "tests/host/cli/test_commands.py": "the help and the exit codes of every command",
    "tests/device/client/test_c_client.py": "the C client is edgert/include/edgert.h",
    "tests/device/protocol/test_protocol_vectors.py": "docs/protocol-vectors.json",
    "tests/device/versions/test_crash_points.py": "every crash point of install, slots and claims: hil/crash_points.py",
    "tests/host/fleet/store/test_backup.py": "copies by the tools of SQLite and PostgreSQL",
    "tests/host/fleet/test_hostile.py": "hostile devices against every subscriber",
    "tests/host/fleet/test_sessions.py": "recorder and exporter with a session at a real broker",
    "tests/host/packager/sources/test_source_model_fuzz.py": "hostile models against every reader",
    "tests/host/packager/test_zoo.py": "trained models of bench/zoo, through every engine",
    "tests/host/packager/tflite_lowering/test_architectures.py": "whole networks through the lowering",
    "tests/host/packager/tflite_lowering/test_node_tests.py": "bench/node_tests.py: the ONNX project's tests",
}

# Below this number of branches, a module needs no test of its name.
BRANCHES = 8
BRANCH_NODES = (
    ast.If, ast.For, ast.AsyncFor, ast.While, ast.Try, ast.comprehension, ast.IfExp, ast.BoolOp,
)  # fmt: skip
# A module that a test of another name proves better, and that test.
PROVEN_ELSEWHERE: dict[str, str] = {
    "deploy/edgert_deploy/devices/bench.py": "tests/host/cli/test_bench.py",
    "deploy/edgert_deploy/fleet/reports.py": "tests/host/fleet/test_hostile.py",
    "deploy/edgert_deploy/packager/accuracy/fp32_agreement.py": "tests/host/packager/accuracy/test_decisions.py",
    "deploy/edgert_deploy/packager/report/__init__.py": "tests/host/packager/report/test_page.py",
    "deploy/edgert_deploy/packager/report/sections.py": "tests/host/packager/report/test_page.py",
    "deploy/edgert_deploy/packager/tflite_lowering/__init__.py": "tests/host/packager/tflite_lowering/test_lowering.py",
    "edgert/follow/fetch.py": "tests/device/follow/test_follower.py",
}

AT_THE_ROOT = {
    "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md", "mkdocs.yml", "pyproject.toml",
}  # fmt: skip


def all_test_files() -> list[Path]:
    return sorted(path for folder in ("tests", "hil") for path in (ROOT / folder).rglob("test_*.py"))


def mirrors(path: Path) -> bool:
    """Return whether the test bears the name of its package, or of a module or a package below."""
    side, *names = path.relative_to(ROOT / "tests").parent.parts
    package, name = PACKAGES[side].joinpath(*names), path.stem.removeprefix("test_")
    return name == package.name or any(
        found.suffix == ".py" or found.is_dir() for found in [*package.rglob(f"{name}.py"), *package.rglob(name)]
    )


def branches(path: Path) -> int:
    return sum(isinstance(node, BRANCH_NODES) for node in ast.walk(ast.parse(path.read_text())))


def has_its_test(side: str, path: Path) -> bool:
    """Return whether a test bears the name of the module, or of its folder: then it tests all modules there."""
    folder = ROOT / "tests" / side / path.parent.relative_to(PACKAGES[side])
    name = f"test_{path.parent.name}.py"
    return any(test.is_file() for test in (folder / f"test_{path.stem}.py", folder / name, folder.parent / name))


@pytest.mark.parametrize("side", PACKAGES)
def test_every_test_file_has_the_name_of_a_module(side: str) -> None:
    strangers = {
        str(path.relative_to(ROOT)) for path in (ROOT / "tests" / side).rglob("test_*.py") if not mirrors(path)
    }
    assert strangers == {name for name in NAMED_AFTER_NO_MODULE if name.startswith(f"tests/{side}/")}


@pytest.mark.parametrize("side", PACKAGES)
def test_every_module_with_logic_has_a_test_of_its_name(side: str) -> None:
    without = {
        str(path.relative_to(ROOT))
        for path in PACKAGES[side].rglob("*.py")
        if branches(path) >= BRANCHES and not has_its_test(side, path)
    }
    package = str(PACKAGES[side].relative_to(ROOT))
    assert without == {name for name in PROVEN_ELSEWHERE if name.startswith(f"{package}/")}


def test_each_value_of_PROVEN_ELSEWHERE_is_a_test_file() -> None:
    assert [name for name in PROVEN_ELSEWHERE.values() if ROOT / name not in all_test_files()] == []


@pytest.mark.parametrize("side", PACKAGES)
def test_every_folder_of_tests_has_a_package_of_the_same_name(side: str) -> None:
    folders = {path.parent.relative_to(ROOT / "tests" / side) for path in (ROOT / "tests" / side).rglob("test_*.py")}
    assert [str(folder) for folder in folders if not (PACKAGES[side] / folder).is_dir()] == []


def test_no_test_file_imports_another() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {module}"
        for path in all_test_files()
        for module in imported(path)
        if module.rpartition(".")[2].startswith("test_") or module.endswith("conftest")
    ]
    assert found == [], "move what both need to tests/support/"


def test_the_root_contains_only_the_listed_files() -> None:
    files = {path.name for path in ROOT.iterdir() if path.is_file() and not path.name.startswith(".")}
    assert files - AT_THE_ROOT == set(), "a scratch file belongs below /tmp; a new file of the project, into this list"


def imported(path: Path) -> list[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    plain = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    named = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return [
        *plain,
        *(str(node.module) for node in named),
        *(
            f"{node.module}.{alias.name}"
            for node in named
            for alias in node.names
            if (node.module or "").split(".")[0] in ("tests", "hil")
        ),
    ]
