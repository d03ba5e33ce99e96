"""The facts of a machine before anything is installed, and the profiles that fit it."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from edgert.engines import ENGINES
from edgert.errors import ConfigInvalid, DeviceError
from edgert_deploy.devices.profiles import DeviceProfile
from edgert_deploy.devices.transports import Transport

PROBE_S_MAX = 30.0
PYTHON_MIN = (3, 10)
PYTHON_MAX = (3, 13)
LOCAL_PROFILE = "this-machine"
NO_GLIBC = (
    "has no glibc (Alpine has musl), and the engines have no wheels for such a system. Use a system with glibc, such as "
    "Debian, or a Debian container"
)
MEMORY_SLACK = 0.85  # a "4 GB" board reports less memory, because firmware and GPU reserve a part

# `uname -m` describes the kernel. A 32-bit system may run on a 64-bit kernel, so Python reports its own word size.
_PYTHON_LINE = (
    "import sys, importlib.util as u; lacks = [n for n in ('_ctypes', '_sqlite3', '_ssl', 'zlib') if not u.find_spec(n)]; "
    "print('python=%d.%d %d %s' % (*sys.version_info[:2], 64 if sys.maxsize > 2**32 else 32, ','.join(lacks) or '-'))"
)
_GLIBC_LINE = "import os; print(os.confstr('CS_GNU_LIBC_VERSION').split()[1])"  # small systems have no getconf
_SDKS = tuple(package.replace("_", "-") for kind in ENGINES.values() for package in kind.packages)
_ENGINES_LINES = (
    "import importlib.metadata as m\n"
    f"for n in {_SDKS}:\n"
    "    try: print('engine=' + n, m.version(n))\n"
    "    except m.PackageNotFoundError: pass"
)
# A shell function that prints the free KiB at $1. The first column, the name of a file system, may contain spaces.
FREE_KB = r"""
free_kb() {
  df -Pk "$1" 2>/dev/null | awk 'NR == 2 {while (NF > 1 && $NF !~ /%$/) NF--; print $(NF - 1)}'
}
"""
# A Python may be missing on the login's PATH, and may have several names. $1 is the Python of EdgeRT's environment on
# the device, or "".
_PROBE = rf"""{FREE_KB}
echo machine=$(uname -m)
echo uid=$(id -u)
echo "home=$HOME"
glibc=$(getconf GNU_LIBC_VERSION 2>/dev/null | cut -d' ' -f2)
echo memory_kb=$(awk '/^MemTotal:/ {{print $2}}' /proc/meminfo)
echo "model=$(tr -d '\0' 2>/dev/null </proc/device-tree/model || cat /sys/class/dmi/id/product_name 2>/dev/null)"
echo "cpu=$(awk -F': *' '/^model name/ {{print $2; exit}}' /proc/cpuinfo)"
grep -q vnni /proc/cpuinfo && echo vnni=1
echo "cpus=$(getconf _NPROCESSORS_ONLN 2>/dev/null || nproc 2>/dev/null)"
(. /etc/os-release 2>/dev/null && echo "distribution=$PRETTY_NAME")
test $(id -u) = 0 && place=/ || place=$HOME
echo "disk_kb=$(free_kb "$place")"
test -d /run/systemd/system && echo systemd=1
echo "l4t=$(sed -n 's/^# R\([0-9]*\) (release), REVISION: \([0-9.]*\).*/\1.\2/p' /etc/nv_tegra_release 2>/dev/null)"
for file in /sys/class/drm/renderD*/device/vendor; do test -r $file && echo accelerator=gpu $(cat $file); done
for file in /sys/class/accel/accel*/device/vendor; do test -r $file && echo accelerator=npu $(cat $file); done
for file in /dev/nvhost-gpu /dev/nvidia0 /dev/apex_0 /dev/hailo0; do test -e $file && echo accelerator=$file; done
for file in /sys/bus/usb/devices/*/idVendor; do
  test -r $file && echo accelerator=usb $(cat $file):$(cat ${{file%idVendor}}idProduct)
done
for name in python3 python3.13 python3.12 python3.11 python3.10 /usr/bin/python3.1[0-9] /usr/local/bin/python3.1[0-9] python; do
  found=$(command -v $name) || continue
  real=$(readlink -f "$found" 2>/dev/null) || real=$found
  case "$asked" in *":$real:"*) continue ;; esac
  asked="$asked:$real:"
  line=$($name -IS -c "{_PYTHON_LINE}" 2>/dev/null) && echo "$line $found"
  test -n "$glibc" || glibc=$($name -IS -c "{_GLIBC_LINE}" 2>/dev/null)
done
echo "glibc=$glibc"
test -x "$1" && own=$1 || own=python3
"$own" -c "{_ENGINES_LINES}" 2>/dev/null
exit 0
"""
_ACCELERATORS = {
    "gpu 0x8086": "Intel GPU",
    "gpu 0x10de": "NVIDIA GPU",
    "gpu 0x1002": "AMD GPU",
    "npu 0x8086": "Intel NPU",
    "npu 0x1022": "AMD NPU",
    "/dev/nvhost-gpu": "NVIDIA GPU",
    "/dev/nvidia0": "NVIDIA GPU",
    "/dev/apex_0": "Coral Edge TPU",
    "/dev/hailo0": "Hailo",
    "usb 1a6e:089a": "Coral Edge TPU",  # before its firmware is loaded
    "usb 18d1:9302": "Coral Edge TPU",  # after its firmware is loaded
}
_32_BIT = {"aarch64": "armv7l", "x86_64": "i686"}


@dataclass(frozen=True)
class MachineFacts:
    """A machine before anything is installed.

    Attributes:
        machine: The processor, as `uname -m` prints it; on a 32-bit system, the processor for which Python was built.
        python: The version of `python_path`; "" if there is no Python of 3.10 or newer.
        glibc: The version of glibc; "" if there is none.
        uid, home: The number and the home folder of the user who logs in.
        model: The name of the board or the computer.
        cpu, cpus: The name of the processor, and the number of its cores.
        vnni: Whether an x86 processor has fast instructions for INT8.
        disk_free_mb: The free space where bootstrap installs; 0 means unknown.
        python_lacks: The modules of the standard library that EdgeRT needs and this Python lacks.
        l4t: The version of a Jetson's system, such as 36.4.3.
        engines: The versions of the engines' packages by name, in EdgeRT's own environment if there is one.
    """

    machine: str
    python: str
    python_path: str
    glibc: str
    memory_mb: int
    uid: int
    home: str
    model: str
    systemd: bool
    cpu: str = ""
    cpus: int = 0
    vnni: bool = False
    distribution: str = ""
    disk_free_mb: int = 0
    python_lacks: str = ""
    l4t: str = ""
    accelerators: tuple[str, ...] = ()
    engines: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def lacks_glibc(self) -> bool:
        """Whether the C library is not glibc. False without Python, because the library is then unknown."""
        return bool(self.python and not self.glibc)

    @property
    def default_state(self) -> str:
        """The state folder if the user names none. Raises DeviceError without a home folder."""
        return "/var/lib/edgert" if self.uid == 0 else f"{self._users_home()}/.local/state/edgert"

    @property
    def default_home(self) -> str:
        """The folder of the runtime if the user names none. Raises DeviceError without a home folder."""
        return "/opt/edgert" if self.uid == 0 else f"{self._users_home()}/.local/share/edgert"

    def _users_home(self) -> str:
        if not self.home.startswith("/"):
            raise DeviceError(
                f"$HOME is {self.home!r} in the login of user {self.uid} on the device, so there is no folder for EdgeRT: give "
                "folders that this user may write with --home and --state, or give the user a home folder"
            )
        return self.home


def local_facts(facts: MachineFacts) -> MachineFacts:
    """Return the facts of this machine as a device, whose Python is the present interpreter."""
    return replace(
        facts, python=f"{sys.version_info[0]}.{sys.version_info[1]}", python_path=sys.executable, python_lacks=""
    )


def probe(transport: Transport, name: str, own_python: str = "") -> MachineFacts:
    """Return the facts of a machine. Raises DeviceError if it is not a Linux machine with a shell.

    `own_python` is the Python of EdgeRT's environment on the machine, or "".
    """
    result = transport.run(["sh", "-c", _PROBE, "sh", own_python], PROBE_S_MAX)
    answers: dict[str, list[str]] = {}
    for key, _, value in (line.partition("=") for line in result.stdout.splitlines()):
        answers.setdefault(key, []).append(value.strip())

    def fact(key: str) -> str:
        return answers.get(key, [""])[0]

    if not result.ok or not fact("machine"):
        raise DeviceError(
            f"{name} does not look like a Linux machine with a shell: {result.failure_text()}. Check the address, and that the "
            "login gets a shell"
        )
    pythons = [value.split(" ", 3) for value in answers.get("python", [])]
    usable = [words for words in pythons if len(words) == 4 and version_numbers(words[0]) >= PYTHON_MIN]
    # Choose a Python above PYTHON_MAX only if there is no other Python.
    usable.sort(key=lambda words: (version_numbers(words[0]) > PYTHON_MAX, words[2] != "-"))
    python, bits, lacks, path = usable[0] if usable else ("", "64", "-", "")
    machine = fact("machine")
    engines = [words.partition(" ") for words in answers.get("engine", [])]
    return MachineFacts(
        machine=_32_BIT.get(machine, machine) if bits == "32" else machine,
        python=python,
        python_path=path,
        python_lacks="" if lacks == "-" else lacks.replace(",", ", "),
        glibc=fact("glibc"),
        memory_mb=_whole_number(fact("memory_kb")) // 1024,
        uid=_whole_number(fact("uid")),
        home=fact("home"),
        model=fact("model"),
        systemd="systemd" in answers,
        cpu=fact("cpu"),
        cpus=_whole_number(fact("cpus")),
        vnni="vnni" in answers,
        distribution=fact("distribution"),
        disk_free_mb=_whole_number(fact("disk_kb")) // 1024,
        l4t=fact("l4t"),
        accelerators=tuple(
            dict.fromkeys(_ACCELERATORS[raw] for raw in answers.get("accelerator", []) if raw in _ACCELERATORS)
        ),
        engines={engine: release for engine, _, release in engines},
    )


def misfits(profile: DeviceProfile, facts: MachineFacts) -> dict[str, str]:
    """Return why `profile` does not fit, by check: "processor", "python", "glibc" or "memory"."""
    reasons = {}
    l4t = facts.l4t.partition(".")[0]
    if profile.match.l4t and l4t and l4t not in profile.match.l4t:
        reasons["processor"] = f"is for L4T {', '.join(profile.match.l4t)}"
    elif profile.machines and facts.machine not in profile.machines:
        reasons["processor"] = f"is for {', '.join(profile.machines)}"
    if not facts.python or version_numbers(facts.python) < version_numbers(profile.python):
        reasons["python"] = f"needs Python {profile.python}"
    elif profile.python_max and version_numbers(facts.python) > version_numbers(profile.python_max):
        reasons["python"] = f"needs Python {profile.python_max} or lower"
    if version_numbers(facts.glibc) < version_numbers(profile.glibc):
        reasons["glibc"] = f"needs glibc {profile.glibc}"
    if facts.memory_mb < profile.memory_mb * MEMORY_SLACK:
        reasons["memory"] = f"needs {profile.memory_mb} MB of memory"
    return reasons


def pick_profile(
    profiles: Sequence[DeviceProfile], facts: MachineFacts, *, local: bool, own: Collection[str] = ()
) -> DeviceProfile:
    """Return the profile that names this machine, else the generic profile, else the only fitting profile.

    Of profiles that fit equally, those whose names are in `own` count. Raises ConfigInvalid with the reasons if none
    fits, and with the candidates if several fit.
    """
    if facts.lacks_glibc:
        raise ConfigInvalid(f"this machine ({facts.distribution or 'an unknown Linux'}) {NO_GLIBC}")
    fitting = [p for p in profiles if not misfits(p, facts) and (local or p.name != LOCAL_PROFILE)]
    if local and (mine := [p for p in fitting if p.name == LOCAL_PROFILE]):
        return mine[0]
    most = max((_match_score(p, facts) for p in fitting), default=0)
    named = [p for p in fitting if most and _match_score(p, facts) == most]
    generic = [p for p in fitting if p.name.startswith("generic-")]
    candidates = named or generic or fitting
    candidates = [p for p in candidates if p.name in own] or candidates
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        names = ", ".join(p.name for p in candidates)
        raise ConfigInvalid(f"several profiles fit {describe(facts)}: {names}. Choose one with --profile")
    why = {p.name: misfits(p, facts) for p in profiles if local or p.name != LOCAL_PROFILE}
    near = {p.name: why[p.name] for p in profiles if p.name in why and _is_for_processor(p, facts)}
    if near and not facts.python:
        raise ConfigInvalid(
            f"no profile fits {describe(facts)}. Install a Python from 3.10 to 3.13 there, with its venv module, and try "
            "again (Debian and Raspberry Pi OS have one from 12 on, Ubuntu from 22.04); or choose a profile with --profile"
        )
    lacks = "; ".join(f"{name} {', '.join(reasons.values())}" for name, reasons in (near or why).items())
    raise ConfigInvalid(
        f"no profile fits {describe(facts)}: {lacks or 'there are no profiles'}. "
        "Write one in ./profiles (docs/devices.md), or choose one with --profile"
    )


def _is_for_processor(profile: DeviceProfile, facts: MachineFacts) -> bool:
    """Return whether `profile` is for this processor.

    Also return True if the machine is a Jetson and the profile is for a Jetson, even with another system.
    """
    return not profile.machines or facts.machine in profile.machines or bool(facts.l4t and profile.match.l4t)


def describe(facts: MachineFacts) -> str:
    model = f"{facts.model}, " if facts.model else ""
    python = f"Python {facts.python}" if facts.python else "no Python from 3.10 up"
    return f"{model}{facts.machine}, {python}, glibc {facts.glibc or 'none'}, {facts.memory_mb} MB of memory"


def version_numbers(text: str) -> tuple[int, ...]:
    """Return `3.11.2` as (3, 11, 2). Return () for a text that is not a version."""
    return tuple(int(part) for part in text.split(".")) if re.fullmatch(r"\d+(\.\d+)*", text) else ()


def _match_score(profile: DeviceProfile, facts: MachineFacts) -> int:
    """Return how well `profile` names this machine; 0 means that it does not name this machine.

    The name of the processor has twice the weight of the name of the board.
    """
    match = profile.match
    if not (match.model or match.cpu):
        return int(_contains(facts.model, profile.name.replace("-", " ")))
    return int(any(_contains(facts.model, words) for words in match.model)) + 2 * any(
        _contains(facts.cpu, words) for words in match.cpu
    )


def _contains(text: str, words: str) -> bool:
    """Return whether `text` contains `words` in sequence. Numbers and words must match to their end.

    For example, `NUC` is in NUC11PAHi5, but `Raspberry Pi 4` is not in Raspberry Pi 400.
    """
    pattern = r"[^a-z0-9]+".join(map(re.escape, words.lower().split()))
    ends = "(?![0-9])" if pattern[-1:].isdigit() else "(?![a-z])"
    return re.search(rf"(?<![a-z0-9]){pattern}{ends}", text.lower()) is not None


def _whole_number(text: str) -> int:
    return int(text) if text.isdigit() else 0
