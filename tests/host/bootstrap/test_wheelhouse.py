"""The wheels for a device depend on its Python, processor and glibc, not on this host."""

from __future__ import annotations

import json
import os
import re
import sys
import time
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import edgert
from edgert.errors import ConfigInvalid, EngineMissing
from edgert_deploy.bootstrap.locked_wheels import SHIPPED, read_lock, shipped_lock
from edgert_deploy.bootstrap.wheelhouse import WheelTarget, missing, prepare
from tests.support.servers.ports import free_port

PI = WheelTarget("3.11", "aarch64", "2.36")


def a_wheel(folder: Path, name: str, requires: list[str] = [], extras: list[str] = []) -> Path:  # noqa: B006
    path = folder / f"{name}-1.0-py3-none-any.whl"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1.0"]
    lines += [f"Requires-Dist: {line}" for line in requires] + [f"Provides-Extra: {extra}" for extra in extras]
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}-1.0.dist-info/METADATA", "\n".join(lines) + "\n")
        archive.writestr(
            f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{name}-1.0.dist-info/RECORD", "")
        archive.writestr(f"{name}.py", "")
    return path


def test_the_platforms_of_wheels_reach_from_the_glibc_of_the_device_down() -> None:
    tags = PI.platforms()
    assert tags[0] == "manylinux_2_36_aarch64"
    assert "manylinux2014_aarch64" in tags
    assert "manylinux_2_37_aarch64" not in tags
    assert WheelTarget("3.11", "aarch64", "2.17").platforms()[0] == "manylinux_2_17_aarch64"


@pytest.mark.parametrize("glibc", ["", "1.2.5", "2.x"])
def test_a_system_without_glibc_is_refused(glibc: str) -> None:
    with pytest.raises(ConfigInvalid, match="glibc"):
        WheelTarget("3.11", "aarch64", glibc).platforms()


def test_markers_are_evaluated_for_the_device(tmp_path: Path) -> None:
    other_python = "3.10" if sys.version_info[:2] != (3, 10) else "3.12"
    wheel = a_wheel(
        tmp_path,
        "top",
        [
            f"only-there; python_version == '{other_python}'",
            "only-arm; platform_machine == 'aarch64'",
            "never; sys_platform == 'win32'",
            "with-extra; extra == 'fast'",
        ],
        ["fast"],
    )
    target = WheelTarget(other_python, "aarch64", "2.36")
    names = {r.name for r in missing([Requirement("top")], [wheel], target)}
    assert names == {"only-there", "only-arm"}
    assert {r.name for r in missing([Requirement("top[fast]")], [wheel], target)} == names | {"with-extra"}


def test_requirements_are_searched_in_the_whole_tree(tmp_path: Path) -> None:
    wheels = [a_wheel(tmp_path, "top", ["mid>=1"]), a_wheel(tmp_path, "mid", ["leaf", "Top"])]
    assert [r.name for r in missing([Requirement("top")], wheels, PI)] == ["leaf"]
    wheels.append(a_wheel(tmp_path, "leaf"))
    assert missing([Requirement("top")], wheels, PI) == []


def test_tokenizers_is_installed_without_its_requirements(tmp_path: Path) -> None:
    wheels = [a_wheel(tmp_path, "top", ["tokenizers; extra == 'text'"], ["text"])]
    asked = [Requirement("top[text]")]
    assert [str(one) for one in missing(asked, wheels, PI)] == ['tokenizers; extra == "text"']
    wheels.append(a_wheel(tmp_path, "tokenizers", ["huggingface-hub"]))
    assert missing(asked, wheels, PI) == []


def test_a_wheelhouse_is_complete_and_is_made_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wheels come from the package index. They are for a processor and a Python that this host lacks."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    python = "3.10" if sys.version_info[:2] != (3, 10) else "3.11"
    target = WheelTarget(python, "aarch64", "2.36")
    said: list[str] = []
    house = prepare(target, ("null",), said.append, lock=shipped_lock())
    assert any("collecting" in line for line in said)
    assert house.version == edgert.__version__
    assert set(house.pins) == {wheel.name for wheel in house.wheels}
    assert missing([Requirement("edgert")], house.wheels, target) == []
    assert {"cffi", "pycparser"} <= {wheel.name.partition("-")[0] for wheel in house.wheels}
    assert any("tomli" in wheel.name for wheel in house.wheels) == (python == "3.10")
    assert any("httptools" in wheel.name for wheel in house.wheels)  # the user may enable HTTP on the device later
    assert not [wheel.name for wheel in house.wheels if "x86_64" in wheel.name]
    assert all(digest in SHIPPED.read_text() for name, digest in house.pins.items() if not name.startswith("edgert-"))
    assert house.sbom is not None
    listed = {part["name"]: part["hashes"][0]["content"] for part in json.loads(house.sbom.read_bytes())["components"]}
    assert sorted(listed.values()) == sorted(house.pins.values())
    again: list[str] = []
    assert prepare(target, ("null",), again.append, lock=shipped_lock()) == house
    assert not any("collecting" in line for line in again)
    (victim,) = (wheel for wheel in house.wheels if wheel.name.startswith("click"))
    victim.write_bytes(victim.read_bytes() + b"!")  # a wheel that was damaged on this host is not sent
    with pytest.raises(ConfigInvalid, match=r"click.* has changed .* remove "):
        prepare(target, ("null",), lock=shipped_lock())


def test_a_wheel_that_the_lock_lacks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before, click, after = SHIPPED.read_text().partition("\nclick==")
    forged = read_lock(before + click + re.sub(r"sha256:[0-9a-f]{64}", "sha256:" + "0" * 64, after, count=2))
    target = WheelTarget("3.12", "x86_64", "2.36")
    with pytest.raises(ConfigInvalid, match="DO NOT MATCH THE HASHES"):
        prepare(target, ("null",), lock=forged)
    with pytest.raises(ConfigInvalid, match="nothing where click"):
        prepare(target, ("null",), lock=read_lock(before + "\nother==" + after))


def test_the_error_names_an_engine_without_wheels_for_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(EngineMissing, match=r"Python 3\.13 on armv7l"):
        prepare(WheelTarget("3.13", "armv7l", "2.36"), ("tflite",))
    with pytest.raises(EngineMissing, match="warp-drive"):
        prepare(PI, ("warp-drive",))


def test_the_engines_are_reduced_to_those_with_wheels_for_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Markers exclude tflite for this Python, and the index has no onnxruntime for glibc 2.27."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    old = WheelTarget("3.13", "armv7l", "2.36")
    with pytest.raises(EngineMissing, match=r"tflite.*armv7l"):
        prepare(old, ("tflite",), shrink=True)
    said: list[str] = []
    house = prepare(WheelTarget("3.11", "x86_64", "2.26"), ("onnxruntime", "null"), said.append, shrink=True)
    assert house.engines == ("null",)
    assert "onnxruntime" in house.lacking["onnxruntime"]
    with pytest.raises(ConfigInvalid, match="onnxruntime"):
        prepare(WheelTarget("3.11", "x86_64", "2.26"), ("onnxruntime", "null"))


@pytest.mark.parametrize("index", ["http://127.0.0.1:{port}/simple", "https://index.invalid/simple"])
def test_an_engine_is_not_left_out_because_the_network_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: str
) -> None:
    """In older versions, the devices got a runtime without that engine, or the advice to use other versions."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    target, lock = WheelTarget("3.12", "x86_64", "2.36"), shipped_lock()
    assert prepare(target, ("null",), lock=lock).engines == ("null",)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    for name, value in (("CONFIG_FILE", "/dev/null"), ("INDEX_URL", index.format(port=free_port())), ("RETRIES", "1")):
        monkeypatch.setenv(f"PIP_{name}", value)
    with pytest.raises(ConfigInvalid, match=r"the package index cannot be reached: .*https_proxy") as caught:
        prepare(target, ("onnxruntime", "null"), shrink=True, lock=lock)
    assert "--unlocked" not in caught.value.message
    assert "object at" not in caught.value.message


def test_folders_that_a_killed_bootstrap_left_are_removed_after_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    wheels = tmp_path / "edgert" / "wheels"
    for name, age_s in ((".old", 2 * 86_400), (".new", 60)):
        (wheels / name).mkdir(parents=True)
        os.utime(wheels / name, (time.time() - age_s,) * 2)
    prepare(WheelTarget("3.12", "x86_64", "2.36"), ("null",), lock=shipped_lock())
    assert [path.name for path in wheels.glob(".*")] == [".new"]


def test_a_wheelhouse_that_pip_cannot_complete_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ConfigInvalid, match="machine-of-nobody"):
        prepare(WheelTarget("3.11", "machine-of-nobody", "2.36"), ("null",))
    assert list((tmp_path / "edgert" / "wheels").iterdir()) == []
