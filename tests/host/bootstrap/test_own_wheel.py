"""edgert's own wheel has the code that this host runs.

The id of a runtime depends on the content of this wheel, not on the tool that built the wheel.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import edgert
from edgert.environment import ID_LENGTH
from edgert.errors import ConfigInvalid
from edgert_deploy.bootstrap.own_wheel import content_digest, installed_distribution, own_wheel, source_tree
from edgert_deploy.bootstrap.wheelhouse import WheelTarget, prepare
from tests.support.environments import environment_beside
from tests.support.paths import ROOT
from tests.support.trees import another_tree

TARGET = WheelTarget("3.11", "aarch64", "2.36")


def test_the_temporary_folder_of_a_killed_build_of_the_wheel_is_removed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    killed, running = (tmp_path / "edgert" / "own" / f".new-{name}" for name in ("killed", "running"))
    for folder in (killed, running):
        folder.mkdir(parents=True)
    os.utime(killed, (0, 0))
    wheel = own_wheel()
    assert {path.name for path in (tmp_path / "edgert" / "own").iterdir()} == {running.name, wheel.parent.name}


def test_the_wheel_of_edgert_contains_both_packages_and_the_profiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert source_tree() is not None
    wheel = own_wheel()
    assert tmp_path / "cache" in wheel.parents
    names = zipfile.ZipFile(wheel).namelist()
    assert wheel.name.startswith(f"edgert-{edgert.__version__}-py3-none-any")
    assert "edgert/versions/install.py" in names
    assert "edgert/py.typed" in names  # without this file, type checkers ignore the annotations
    assert "edgert_deploy/devices/systemd/edgertd.service" in names
    assert {"edgert_deploy/bootstrap/on_device/runtime.sh", "edgert_deploy/bootstrap/on_device/uninstall.sh"} <= set(
        names
    )
    assert "edgert_deploy/devices/shipped/raspberry-pi-4.toml" in names
    assert not [
        name
        for name in names
        if name.split("/")[0] not in ("edgert", "edgert_deploy", wheel.name.split("-py3")[0] + ".dist-info")
    ]
    assert own_wheel() == wheel  # the same source gives the same bytes


def test_a_changed_tree_gives_another_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = another_tree(tmp_path / "tree")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("edgert_deploy.bootstrap.own_wheel.source_tree", lambda: tree)
    first = own_wheel()
    first.write_bytes(b"damaged")
    assert own_wheel() == first
    assert zipfile.is_zipfile(first)
    file = tree / "devices/this-machine.toml"
    file.write_text(file.read_text().replace("memory_mb = 1024", "memory_mb = 1025"))
    assert own_wheel() != first


def test_an_installed_package_is_packed_again_without_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After `pip install .`, there is no source tree to build from, and there may be no network."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    built, site = own_wheel(), tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--target"]
    subprocess.run([*pip, str(site), str(built)], check=True)
    program = (
        "import edgert_deploy.bootstrap.own_wheel as w; assert w.source_tree() is None; w.run_pip = w.run_module = None\n"
        "first = w.own_wheel(); assert w.own_wheel() == first; print(first)"
    )
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    packed = Path(done.stdout.strip())
    assert packed.name == built.name
    with zipfile.ZipFile(built) as one, zipfile.ZipFile(packed) as other:
        assert set(one.namelist()) == set(other.namelist())
        for name in one.namelist():
            assert name.endswith("/RECORD") or one.read(name) == other.read(name), name
    subprocess.run([*pip, str(tmp_path / "again"), str(packed)], check=True)
    assert (tmp_path / "again" / "edgert_deploy" / "devices" / "shipped" / "raspberry-pi-4.toml").is_file()
    assert (tmp_path / "again" / "bin" / "edgertd").is_file()


def test_code_that_is_not_an_installed_package_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(edgert, "__file__", str(tmp_path / "edgert" / "__init__.py"))
    with pytest.raises(ConfigInvalid, match="not an installed package"):
        installed_distribution()


def test_a_checkout_and_an_installed_wheel_give_one_runtime_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise two colleagues with the same version would upgrade the same devices in turn."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    here = prepare(TARGET, ("null",)).digest[:ID_LENGTH]
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", str(tmp_path), str(ROOT)], check=True)
    (wheel,) = tmp_path.glob("edgert-*.whl")
    python = environment_beside(tmp_path / "venv")
    install = ["-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile", str(wheel)]
    subprocess.run([python, *install], check=True)
    program = (
        "from edgert_deploy.bootstrap.own_wheel import source_tree\n"
        "from edgert_deploy.bootstrap.wheelhouse import WheelTarget, prepare\n"
        "assert source_tree() is None\n"
        f"print(prepare({TARGET!r}, ('null',)).digest[:{ID_LENGTH}])"
    )
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == here


def test_only_the_content_identifies_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version of zlib compresses the same content to other bytes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    wheel, other = own_wheel(), tmp_path / "other.whl"
    with zipfile.ZipFile(wheel) as archive, zipfile.ZipFile(other, "w") as stored:
        for name in archive.namelist():
            stored.writestr(name, archive.read(name))
    assert other.read_bytes() != wheel.read_bytes()
    assert content_digest(other) == content_digest(wheel)
