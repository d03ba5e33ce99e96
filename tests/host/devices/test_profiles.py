"""Every shipped profile follows the schema. The error of a wrong profile says what is wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.paths import ROOT

pytest.importorskip("onnx")

from edgert.errors import ConfigInvalid
from edgert_deploy.bootstrap.wheelhouse import WheelTarget
from edgert_deploy.devices.profiles import list_profiles, load_profile, own_profiles
from edgert_deploy.packager.builders import BUILDERS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SHIPPED = ROOT / "devices"
NAMES = sorted(path.stem for path in SHIPPED.glob("*.toml"))
GOOD = """
name = "box"
description = "A box"
machines = ["x86_64"]
engines = ["openvino", "onnxruntime"]
precision = "int8"
python = "3.10"
glibc = "2.31"
memory_mb = 512
socket = "/run/edgert/edgert.sock"
"""


@pytest.mark.parametrize("name", NAMES)
def test_every_shipped_profile_is_valid_and_has_an_engine_with_a_builder(name: str) -> None:
    profile = load_profile(name, SHIPPED)
    assert profile.name == name
    assert profile.engines[0] in BUILDERS


# Adding a profile: its file, and a line here with the environments that its wheels are installed into.
# name -> (machine, lowest Python, highest Python)
REVIEWED = {
    "generic-arm64": ("aarch64", "3.10", "3.13"),
    "generic-x86-64": ("x86_64", "3.10", "3.13"),
    "intel-n100": ("x86_64", "3.10", "3.13"),
    "intel-nuc": ("x86_64", "3.10", "3.13"),
    "jetson-orin-nano": ("aarch64", "3.10", "3.10"),
    "jetson-orin-nano-jetpack-7": ("aarch64", "3.12", "3.12"),
    "raspberry-pi-3": ("armv7l", "3.10", "3.11"),
    "raspberry-pi-4": ("aarch64", "3.10", "3.13"),
    "raspberry-pi-5": ("aarch64", "3.10", "3.13"),
    "this-machine": ("x86_64", "3.10", "3.13"),
}


@pytest.mark.parametrize("name", NAMES)
def test_edgert_has_wheels_for_every_engine_of_a_profile(name: str) -> None:
    """The requirements of each extra are checked for the lowest and the highest Python, with their markers."""
    profile = load_profile(name, SHIPPED)
    machine, lowest, highest = REVIEWED[name]
    assert machine in (profile.machines or (machine,))
    assert (profile.python, profile.python_max or "3.13") == (lowest, highest)
    extras = tomllib.loads((SHIPPED.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for engine in profile.engines:
        for python in (lowest, highest):
            there = WheelTarget(python, machine, profile.glibc).environment()
            needs = [Requirement(line) for line in extras[engine]]
            assert any(need.marker is None or need.marker.evaluate(there) for need in needs), (engine, python)


def test_the_shipped_profiles_are_the_reviewed_profiles_in_the_order_of_names() -> None:
    assert sorted(REVIEWED) == NAMES
    assert [profile.name for profile in list_profiles(SHIPPED)] == NAMES


def test_shipped_profiles_are_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_profile("intel-nuc").engines[0] == "openvino"


def test_a_profile_of_the_user_precedes_a_shipped_profile_and_others_are_still_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "intel-nuc.toml").write_text(GOOD.replace('"box"', '"intel-nuc"'))
    assert load_profile("intel-nuc").description == "A box"
    assert load_profile("raspberry-pi-4").engines[0] == "tflite"


def test_the_list_has_the_profiles_of_the_user_and_the_shipped_profiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "box.toml").write_text(GOOD)
    (tmp_path / "profiles" / "intel-nuc.toml").write_text(GOOD.replace('"box"', '"intel-nuc"'))
    listed = list_profiles()
    assert [profile.name for profile in listed] == sorted(["box", *NAMES])
    assert {profile.name for profile in listed if profile.description == "A box"} == {"box", "intel-nuc"}
    assert own_profiles() == {"box", "intel-nuc"}


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('name = "box"', 'name = "other"', "must be 'box', the file's name"),
        ('name = "box"', "", "lacks 'name'"),
        ("memory_mb", "memory", "unknown key 'memory'"),
        ("512", '"512"', "memory_mb is '512', not of type int"),
        ("512", "true", "memory_mb is True, not of type int"),
        ("512", "0", "1 or more"),
        ('["openvino", "onnxruntime"]', '["openvino", "caffe"]', "must be one or more of"),
        ('["openvino", "onnxruntime"]', "[]", "must be one or more of"),
        ('["openvino", "onnxruntime"]', '"openvino"', "engines is 'openvino', not a list"),
        ('["x86_64"]', '["x86-64!"]', "uname -m"),
        ('"int8"', '"int4"', "precision"),
        ('"3.10"', '"3"', "python"),
        ("memory_mb", 'python_max = "x"\nmemory_mb', "python_max"),
        ('edgert.sock"', "edgert.sock\"\n[match]\ncolour = ['red']", "unknown key 'colour'; known: model, cpu, l4t"),
        ('edgert.sock"', "edgert.sock\"\n[match]\nmodel = 'NUC'", "match.model is 'NUC', not a list"),
        ('edgert.sock"', "edgert.sock\"\n[match]\nl4t = ['JetPack']", "major versions"),
        ("/run", "run", "absolute path"),
        ("/run", "/" + "r" * 200, "107 bytes"),
        ('"A box"', "A box", "not TOML"),
    ],
)
def test_a_wrong_profile_is_refused_with_the_reason(old: str, new: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "box.toml").write_text(GOOD.replace(old, new))
    with pytest.raises(ConfigInvalid, match=says):
        load_profile("box", tmp_path)


@pytest.mark.parametrize("name", ["../box", "/etc/passwd", "Box", "", "a" * 80])
def test_a_name_with_the_form_of_a_path_is_refused(name: str) -> None:
    with pytest.raises(ConfigInvalid, match="not a profile name"):
        load_profile(name)


def test_the_error_about_an_unknown_name_lists_the_known_names_and_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match=r"known: .*raspberry-pi-4"):
        load_profile("toaster")
    with pytest.raises(ConfigInvalid, match="not a folder"):
        load_profile("intel-nuc", tmp_path / "missing")


def test_bytes_that_are_not_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "box.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigInvalid, match="not UTF-8 text"):
        load_profile("box", tmp_path)
