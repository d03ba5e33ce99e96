"""A machine gets the profile that fits, and the probe works on any machine."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from edgert import machine
from edgert.errors import ConfigInvalid, DeviceError
from edgert_deploy.devices.facts import _PROBE, MachineFacts, local_facts, misfits, pick_profile, probe
from edgert_deploy.devices.inventory import Device
from edgert_deploy.devices.profiles import list_profiles, load_profile
from edgert_deploy.devices.transports import Transport, open_transport
from tests.support.machines import PI_4
from tests.support.paths import ROOT

PROFILES = list_profiles(ROOT / "devices")
NUC = replace(PI_4, machine="x86_64", memory_mb=15000, model="NUC11PAHi5", cpu="11th Gen Intel(R) Core(TM) i5-1135G7")
ORIN = replace(PI_4, model="NVIDIA Jetson Orin Nano Developer Kit", memory_mb=7600, python="3.10", glibc="2.35")
ORIN_7 = replace(ORIN, python="3.12", glibc="2.39")


@pytest.mark.parametrize(
    ("facts", "profile"),
    [
        (PI_4, "raspberry-pi-4"),
        (replace(PI_4, model="Raspberry Pi 5 Model B Rev 1.4"), "raspberry-pi-5"),
        (replace(PI_4, model="Raspberry Pi 400 Rev 1.0"), "raspberry-pi-4"),
        (replace(PI_4, model="Raspberry Pi Compute Module 5 Rev 1.0"), "raspberry-pi-5"),
        (replace(ORIN, l4t="36.4.3"), "jetson-orin-nano"),
        (replace(ORIN_7, l4t="39.2.0", model=f"{ORIN.model} Super"), "jetson-orin-nano-jetpack-7"),
        # If the system does not state its L4T version, the version of Python identifies it.
        (ORIN, "jetson-orin-nano"),
        (ORIN_7, "jetson-orin-nano-jetpack-7"),
        (replace(PI_4, model="Raspberry Pi 3 Model B Plus Rev 1.3", machine="armv7l", memory_mb=900), "raspberry-pi-3"),
        (replace(PI_4, model="Some Board"), "generic-arm64"),
        (NUC, "intel-nuc"),
        (replace(NUC, model="MINI S12 Pro", cpu="Intel(R) N100"), "intel-n100"),
        (replace(NUC, model="NUC 13 Rugged", cpu="Intel(R) Processor N97"), "intel-n100"),
        (replace(NUC, model="OptiPlex 7060"), "generic-x86-64"),
    ],
)
def test_a_machine_gets_the_profile_of_its_kind_or_else_the_generic_profile(facts: MachineFacts, profile: str) -> None:
    assert pick_profile(PROFILES, facts, local=False).name == profile


def test_a_local_device_gets_the_profile_this_machine() -> None:
    assert pick_profile(PROFILES, NUC, local=True).name == "this-machine"


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (replace(PI_4, machine="riscv64"), "is for aarch64"),
        (replace(PI_4, python="", python_path=""), r"MB of memory\. Install a Python from 3\.10"),
        (replace(PI_4, python="", python_path="", machine="riscv64"), "is for aarch64, needs Python 3.10"),
        (
            replace(PI_4, glibc="2.31"),
            "memory: generic-arm64 needs glibc 2.34",
        ),  # the message omits the reasons of profiles for other processors
        (replace(PI_4, glibc="", distribution="Alpine Linux"), r"\(Alpine Linux\) has no glibc .* such as Debian"),
        (replace(PI_4, glibc="", python="", python_path=""), "Install a Python"),
        (replace(PI_4, memory_mb=400), "MB of memory"),
        (replace(ORIN_7, l4t="38.4.0", machine="armv7l"), "is for L4T 39"),
        (replace(PI_4, machine="armv7l", python="3.13"), "needs Python 3.11 or lower"),
    ],
)
def test_if_no_profile_fits_the_error_gives_the_reason(facts: MachineFacts, words: str) -> None:
    with pytest.raises(ConfigInvalid, match=words):
        pick_profile(PROFILES, facts, local=False)


def test_a_local_device_runs_in_this_python_whatever_python_is_on_the_path() -> None:
    found = local_facts(replace(NUC, python="3.8", python_path="/usr/bin/python3", python_lacks="_ctypes"))
    assert (found.python, found.python_path, found.python_lacks) == (
        ".".join(platform.python_version_tuple()[:2]),
        sys.executable,
        "",
    )


def test_if_several_profiles_fit_the_error_names_them() -> None:
    without_generic = [p for p in PROFILES if not p.name.startswith("generic-")]
    with pytest.raises(ConfigInvalid, match=r"raspberry-pi-4.*--profile"):
        pick_profile(without_generic, replace(PI_4, model="Some Board", memory_mb=9000), local=False)


def test_an_own_profile_that_matches_as_well_as_a_shipped_one_counts() -> None:
    shipped = load_profile("raspberry-pi-4", ROOT / "devices")
    own = replace(shipped, name="my-pi-4")
    assert pick_profile([own, *PROFILES], PI_4, local=False, own={"my-pi-4"}) is own
    with pytest.raises(ConfigInvalid, match=r"memory: my-pi-4, raspberry-pi-4\. Choose"):  # not the generic profile
        pick_profile([own, *PROFILES], PI_4, local=False)


def test_a_profile_of_two_gigabytes_fits_a_board_with_slightly_less_memory() -> None:
    two = load_profile("raspberry-pi-4", ROOT / "devices")
    assert misfits(two, replace(PI_4, memory_mb=1845)) == {}


def test_the_default_folders_depend_on_the_user() -> None:
    assert PI_4.default_state == "/home/pi/.local/state/edgert"
    assert replace(PI_4, uid=0, home="").default_home == "/opt/edgert"
    for folder in ("default_state", "default_home"):
        with pytest.raises(DeviceError, match=r"\$HOME is '' .*--home and --state"):
            getattr(replace(PI_4, home=""), folder)


def test_the_facts_of_this_machine_can_be_read(tmp_path: Path) -> None:
    transport = open_transport(Device("here", "local", str(tmp_path), "this-machine", str(tmp_path)))
    facts = probe(transport, "here")
    assert facts.machine == platform.machine()
    assert Path(facts.python_path).exists()
    assert facts.glibc.startswith("2.")
    assert facts.memory_mb > 100
    assert facts.home.startswith("/")
    assert facts.disk_free_mb > 100
    assert facts.cpus == os.cpu_count()
    assert facts.vnni == ("vnni" in Path("/proc/cpuinfo").read_text())
    assert facts.distribution
    own = probe(transport, "here", sys.executable)
    assert set(own.engines) >= {"onnxruntime", "openvino"}, "what edgert's own environment has"


def on_path(folder: Path, lacks: str = "-", **pythons: str) -> str:
    """Return a PATH with the probe's tools and with Pythons of these versions. The Python "" does not start."""
    folder.mkdir()
    for name in ("sh", "uname", "id", "getconf", "cut", "awk", "tr", "cat", "df", "sed", "env", "nproc"):
        (folder / name).symlink_to(str(shutil.which(name)))
    for name, says in pythons.items():
        program = folder / name.replace("_", ".")
        program.write_text(f"#!/bin/sh\necho python={says} 64 {lacks}\n" if says else "#!/none\n")
        program.chmod(0o755)
    return str(folder)


def test_the_free_space_is_found_whatever_the_names_of_disk_and_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name of a network share may contain spaces, and so may the name of a folder."""
    programs = Path(on_path(tmp_path / "bin"))
    shown = "Filesystem 1024-blocks Used Available Capacity Mounted on\\n//nas/Our Models 9999 1 2048000 71% /mnt/Our Models"
    (programs / "df").unlink()
    (programs / "df").write_text(f"#!/bin/sh\nprintf '{shown.replace('%', '%%')}\\n'\n")
    (programs / "df").chmod(0o755)
    monkeypatch.setenv("PATH", str(programs))
    assert probe(local(tmp_path), "here").disk_free_mb == 2000


def test_a_python_that_is_not_on_the_path_of_a_login_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = Path("/usr/bin/python3").resolve()
    monkeypatch.setenv("PATH", on_path(tmp_path / "bin", python3=""))
    assert probe(local(tmp_path), "here").python_path == str(there)


def test_a_python_that_is_too_new_is_used_only_if_it_is_the_only_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", on_path(tmp_path / "bin", python3="3.14", python3_12="3.12"))
    assert probe(local(tmp_path), "here").python == "3.12"


def test_a_python_with_several_names_is_probed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, asked = Path(on_path(tmp_path / "bin", python3_12="3.12")), tmp_path / "asked"
    (folder / "readlink").symlink_to(str(shutil.which("readlink")))
    with (folder / "python3.12").open("a") as program:
        program.write(f"echo >> {asked}\n")
    for name in ("python", "python3"):
        (folder / name).symlink_to("python3.12")
    monkeypatch.setenv("PATH", str(folder))
    facts = probe(local(tmp_path), "here")
    assert (facts.python, facts.python_path) == ("3.12", str(folder / "python3"))
    assert asked.read_text() == "\n\n", "once for its version, once for its engines"


def test_a_python_without_modules_that_edgert_needs_is_used_only_if_it_is_the_only_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", on_path(tmp_path / "bin", lacks="_ctypes,_sqlite3", python3="3.13"))
    there = probe(local(tmp_path), "here")
    assert (there.python_path, there.python_lacks) == (str(Path("/usr/bin/python3").resolve()), "")
    monkeypatch.setattr("edgert_deploy.devices.facts._PROBE", _PROBE.replace("/python3.1[0-9]", "/none"))
    there = probe(local(tmp_path), "here")
    assert (there.python, there.python_lacks) == ("3.13", "_ctypes, _sqlite3")


def test_a_small_system_without_getconf_has_its_glibc_and_its_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(on_path(tmp_path / "bin"))
    (folder / "getconf").unlink()
    (folder / "python3").symlink_to("/usr/bin/python3")
    monkeypatch.setenv("PATH", str(folder))
    there = probe(local(tmp_path), "here")
    assert there.glibc == os.confstr("CS_GNU_LIBC_VERSION").split()[1]  # type: ignore[union-attr]
    assert there.cpus > 0


def local(folder: Path) -> Transport:
    return open_transport(Device("here", "local", str(folder), "this-machine", str(folder)))


@pytest.mark.parametrize(
    "flags", ["", "avx2 fma", "avx512f avx512_vnni", "avx2 avx_vnni", "avx512f avx512_4vnniw", "avx_vnni_int8"]
)
def test_the_probe_and_the_device_find_vnni_by_the_same_rule(
    flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe runs before EdgeRT is installed, so it has its own line for the rule of `int8_saturates`."""
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor : 0\nmodel name : Intel(R) N100\nflags : fpu {flags}\n")
    (line,) = (line for line in _PROBE.splitlines() if "vnni" in line)
    printed = subprocess.run(["sh", "-c", line.replace("/proc/cpuinfo", str(cpuinfo))], capture_output=True, text=True)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert (printed.stdout == "vnni=1\n") is not machine.int8_saturates(cpuinfo)
