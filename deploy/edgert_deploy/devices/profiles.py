"""Device profiles. Each is a TOML file with reviewed data about a kind of device, without code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from edgert.engines import ENGINES
from edgert.errors import ConfigInvalid
from edgert.state_dir import SOCKET_PATH_BYTES_MAX
from edgert.toml_file import from_table, read_toml
from edgert.typed_json import Closed

PROFILE_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
PRECISIONS = ("auto", "int8", "fp16", "fp32")
_HERE = Path(__file__).resolve().parent
# The last folder is the repository's: an editable install has no packaged profiles.
_SHIPPED = (_HERE / "shipped", _HERE.parents[2] / "devices")


@dataclass(frozen=True)
class Match(Closed):
    """The marks of this kind of device.

    `model` has words in the name of the board, `cpu` has words in the name of the processor, and `l4t` has major
    versions of a Jetson's system. A list matches if one of its entries matches. An empty list matches nothing.
    """

    model: tuple[str, ...] = ()
    cpu: tuple[str, ...] = ()
    l4t: tuple[str, ...] = ()


@dataclass(frozen=True)
class DeviceProfile(Closed):
    """One `devices/<name>.toml`.

    Attributes:
        machines: Values of `uname -m`; an empty tuple means any processor.
        engines: The engine preference, the best engine first.
        precision: A value of PRECISIONS.
        python, glibc: The lowest versions that the engines' wheels need.
        memory_mb: The smallest memory that the machine may have.
        python_max: The highest version of Python; "" for no limit.
        match: The marks by which `edgert device probe` recognizes the machine.
    """

    name: str
    description: str
    machines: tuple[str, ...]
    engines: tuple[str, ...]
    precision: str
    python: str
    glibc: str
    memory_mb: int
    socket: str
    python_max: str = ""
    match: Match = Match()


def load_profile(name: str, profiles_dir: Path | None = None) -> DeviceProfile:
    """Return the profile from `profiles_dir`, else ./profiles, else this package. Raises ConfigInvalid."""
    if not PROFILE_NAME.fullmatch(name):
        raise ConfigInvalid(f"{name[:80]!r} is not a profile name: use a-z, 0-9 and -, as in raspberry-pi-4")
    for folder in _folders(profiles_dir):
        if (folder / f"{name}.toml").is_file():
            return _checked(folder / f"{name}.toml")
    known = ", ".join(sorted({path.stem for folder in _folders(profiles_dir) for path in folder.glob("*.toml")}))
    raise ConfigInvalid(f"there is no device profile {name!r}; known: {known or 'none'}")


def list_profiles(profiles_dir: Path | None = None) -> list[DeviceProfile]:
    """Return all profiles by name, from `profiles_dir`, from ./profiles and from this package.

    If several folders have a profile of the same name, the profile of the first folder counts, as in `load_profile`.
    Raises ConfigInvalid.
    """
    paths: dict[str, Path] = {}
    for folder in _folders(profiles_dir):
        for path in folder.glob("*.toml"):
            paths.setdefault(path.stem, path)
    return [_checked(paths[name]) for name in sorted(paths)]


def own_profiles(profiles_dir: Path | None = None) -> frozenset[str]:
    """Return the names of the user's own profiles: those in `profiles_dir` and in ./profiles."""
    return frozenset(
        path.stem for folder in _folders(profiles_dir) if folder not in _SHIPPED for path in folder.glob("*.toml")
    )


def _folders(profiles_dir: Path | None) -> Iterator[Path]:
    if profiles_dir is not None and not profiles_dir.is_dir():
        raise ConfigInvalid(f"{profiles_dir} is not a folder: give the folder of your profiles")
    for folder in (profiles_dir, Path("profiles"), *_SHIPPED):
        if folder is not None and folder.is_dir():
            yield folder


def _checked(path: Path) -> DeviceProfile:
    """Return the profile in the file `path`. Raises ConfigInvalid for the first invalid value."""
    profile = from_table(DeviceProfile, read_toml(path), f"profile {path}")
    problem = next(_problems(path, profile), None)
    if problem is not None:
        raise ConfigInvalid(f"profile {path}: {problem}")
    return profile


def _problems(path: Path, profile: DeviceProfile) -> Iterator[str]:
    if profile.name != path.stem or not PROFILE_NAME.fullmatch(profile.name):
        yield f"its name {profile.name!r} must be {path.stem!r}, the file's name, and contain only a-z, 0-9 and -"
    unknown = [engine for engine in profile.engines if engine not in ENGINES]
    if unknown or not profile.engines or len(set(profile.engines)) != len(profile.engines):
        yield f"engines {list(profile.engines)} must be one or more of {', '.join(ENGINES)}, each once"
    if not all(re.fullmatch(r"[a-z0-9_]+", machine) for machine in profile.machines):
        yield f"machines {list(profile.machines)} must be values of `uname -m`, such as aarch64"
    if profile.precision not in PRECISIONS:
        yield f"precision {profile.precision!r} must be one of {', '.join(PRECISIONS)}"
    for key in ("python", "glibc", *(["python_max"] if profile.python_max else [])):
        if not re.fullmatch(r"\d+\.\d+", getattr(profile, key)):
            yield f"{key} {getattr(profile, key)!r} must be a version such as 3.11"
    if not all(version.isdigit() for version in profile.match.l4t):
        yield f"[match] l4t {list(profile.match.l4t)} must be major versions, such as 36"
    if profile.memory_mb < 1:
        yield f"memory_mb {profile.memory_mb} must be 1 or more"
    if not profile.socket.startswith("/") or len(profile.socket.encode()) > SOCKET_PATH_BYTES_MAX:
        yield f"socket {profile.socket!r} must be an absolute path of at most {SOCKET_PATH_BYTES_MAX} bytes"
