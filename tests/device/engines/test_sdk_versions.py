"""The stored versions of engines are valid until the installed packages change."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from edgert.engines import ENGINES, sdk_versions
from edgert.engines.sdk_versions import engine_versions


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Return the engines whose SDK was asked for its version. Only `null` and `tflite` are installed."""
    names: list[str] = []

    def version(name: str) -> str | None:
        names.append(name)
        return {"null": "1", "tflite": "2.3"}.get(name)

    monkeypatch.setattr(sdk_versions, "_version", version)
    packages = tmp_path / "site-packages"
    packages.mkdir()
    monkeypatch.setattr(sys, "path", [str(packages), *sys.path])
    return names


def test_installed_engines_are_probed_once_and_missing_engines_every_time(asked: list[str], tmp_path: Path) -> None:
    versions_file = tmp_path / "learned" / "engines.json"  # no daemon has created the folder yet
    first = engine_versions(versions_file)
    assert (first["null"], first["tflite"], first["openvino"]) == ("1", "2.3", None)
    assert asked == list(ENGINES)
    asked.clear()
    assert engine_versions(versions_file) == first
    assert asked == [name for name in ENGINES if name not in ("null", "tflite")]


def test_a_change_of_the_packages_or_of_the_file_causes_a_new_probe_of_all_engines(
    asked: list[str], tmp_path: Path
) -> None:
    versions_file = tmp_path / "engines.json"
    engine_versions(versions_file)
    os.utime(tmp_path / "site-packages", ns=(1, 1))
    asked.clear()
    engine_versions(versions_file)
    assert asked == list(ENGINES)
    for damage in ("{", json.dumps({"python": None, "versions": {}}), "[" * 100_000):
        versions_file.write_text(damage)
        asked.clear()
        engine_versions(versions_file)
        assert asked == list(ENGINES)


def test_on_a_disk_that_refuses_the_file_the_engines_are_still_found(asked: list[str], tmp_path: Path) -> None:
    (tmp_path / "learned").touch()
    assert engine_versions(tmp_path / "learned" / "engines.json")["null"] == "1"


def test_a_missing_engine_is_not_imported(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from dataclasses import replace; from edgert.engines.sdk_versions import ENGINES, engine_versions\n"
        "del ENGINES['null'], ENGINES['fault']\n"
        "missing = {name: replace(kind, packages=('a_package_that_nobody_has',)) for name, kind in ENGINES.items()}\n"
        "ENGINES.update(missing)\n"
        f"from pathlib import Path; assert not any(engine_versions(Path({str(tmp_path)!r}) / 'e.json').values())\n"
        "assert 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
