"""The wheelhouse: every wheel for a device's Python, processor and glibc, collected on the host.

A device needs no internet. It installs only from this folder, and only wheels with pinned hashes. The pins are in the
lock that ships with edgert (`locked_wheels`), so every host gives its devices the versions that the tests use. The
requirements are in edgert's own wheel. pip evaluates environment markers for its own interpreter, even if it downloads
for another machine. So this module evaluates the markers for the device, over the whole tree of requirements, and then
requests the missing packages by name.
"""

from __future__ import annotations

import email.message
import email.parser
import hashlib
import json
import shutil
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

import edgert
from edgert.durable import replacing, sha256_of
from edgert.engines import FOR_TESTS
from edgert.errors import ConfigInvalid, EngineMissing
from edgert_deploy.bootstrap import sbom
from edgert_deploy.bootstrap.locked_wheels import MACHINES, Lock
from edgert_deploy.bootstrap.own_wheel import content_digest, own_wheel
from edgert_deploy.bootstrap.pip import NoWheels, run_pip
from edgert_deploy.common.file_cache import remove_abandoned
from edgert_deploy.common.folders import cache_folder

ROUNDS_MAX = 6  # each round downloads the requirements of the wheels from the round before
KEY_FORMAT = "4"
PINS_NAME = "pins.txt"  # the file with the name of each wheel and its SHA-256 at the download
# These extras are always installed, because pip on the device cannot reach an index later.
DEFAULT_EXTRAS = ("http", "channels")
OPTIONAL_EXTRAS = ("text",)  # the extras that are installed only if a bootstrap names them
# Packages that are installed without their requirements: tokenizers requires huggingface-hub, which a device does not
# need.
NO_DEPS = ("tokenizers",)
# Extras without wheels for 32-bit ARM.
WITHOUT_EXTRAS = {"armv7l": ("http",), "armv6l": ("http",)}


@dataclass(frozen=True)
class WheelTarget:
    """The system that the wheels are for.

    Examples of the versions are Python `3.11` and glibc `2.36`. `machine` is from `uname -m`.
    """

    python: str
    machine: str
    glibc: str

    def platforms(self) -> tuple[str, ...]:
        """Return the platform tags of fitting wheels, newest first (PEP 600; old names: PEP 513, 571, 599)."""
        major, _, minor = self.glibc.partition(".")
        if major != "2" or not minor.isdigit():
            raise ConfigInvalid(f"there are no wheels for glibc {self.glibc!r}: EdgeRT needs glibc 2.28 or newer")
        newest_first = [f"manylinux_2_{n}_{self.machine}" for n in range(int(minor), 4, -1)]
        old_names = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
        old = [f"{name}_{self.machine}" for n, name in old_names.items() if n <= int(minor)]
        return (*newest_first, *old, f"linux_{self.machine}")

    def environment(self, extra: str = "") -> dict[str, str]:
        """Return the values of environment markers (PEP 508) that differ between device and host."""
        return {
            "implementation_version": f"{self.python}.0",
            "platform_machine": self.machine,
            "python_full_version": f"{self.python}.0",
            "python_version": self.python,
            "extra": extra,
        }


@dataclass(frozen=True)
class Wheelhouse:
    """Wheels for one kind of device.

    Attributes:
        pins: The SHA-256 of each file, by its name.
        version: The version of edgert.
        engines: The requested engines that have wheels.
        digest: A hash of the content of all wheels.
        lacking: The requested engines that have no wheels, each with the reason.
        sbom: The file with the bill of materials.
    """

    wheels: tuple[Path, ...]
    pins: Mapping[str, str]
    version: str
    engines: tuple[str, ...]
    digest: str
    lacking: Mapping[str, str] = field(default_factory=dict)
    sbom: Path | None = None
    extras: tuple[str, ...] = ()

    def size_bytes(self, names: Iterable[str]) -> int:
        """Return the total size of the named wheels."""
        chosen = set(names)
        return sum(wheel.stat().st_size for wheel in self.wheels if wheel.name in chosen)

    def installed_bytes(self, names: Iterable[str]) -> int:
        """Return the size of the unpacked files of the named wheels, without byte code."""
        chosen, total = set(names), 0
        for wheel in self.wheels:
            if wheel.name in chosen:
                with zipfile.ZipFile(wheel) as archive:
                    total += sum(entry.file_size for entry in archive.infolist())
        return total


def prepare(
    target: WheelTarget,
    engines: Sequence[str],
    progress: Callable[[str], None] = lambda _: None,
    *,
    shrink: bool = False,
    lock: Lock | None = None,
    extras: Sequence[str] = (),
) -> Wheelhouse:
    """Collect edgert's own wheel and the wheels of its requirements. Earlier downloads are used again.

    Args:
        shrink: Whether engines without wheels for the target are left out, as long as one engine remains.
        lock: The lock with the versions to download. Without a lock, and for a processor that is not in MACHINES, this
            function downloads the newest versions that fit.
        extras: Some of OPTIONAL_EXTRAS.

    Raises EngineMissing if an engine has no wheels, and ConfigInvalid if this host has no network or no pip, or if a
    wheel has changed.
    """
    spec = _DownloadSpec(target, lock if target.machine in MACHINES else None, progress, tuple(extras))
    with _COLLECTING:
        return _prepare(spec, engines, shrink)


@dataclass(frozen=True)
class _DownloadSpec:
    """The target, lock and extras of all downloads for one wheelhouse."""

    target: WheelTarget
    lock: Lock | None
    progress: Callable[[str], None]
    extras: tuple[str, ...]


_COLLECTING = threading.Lock()  # one thread collects at a time, so that devices of one kind share a download
_OWN: dict[Path, Path] = {}  # cache folder -> edgert's own wheel, made once per process


def _prepare(spec: _DownloadSpec, engines: Sequence[str], shrink: bool) -> Wheelhouse:
    if cache_folder() not in _OWN or not _OWN[cache_folder()].exists():
        _OWN[cache_folder()] = own_wheel(spec.progress)
    own = _OWN[cache_folder()]
    lacking: dict[str, str] = {}
    remaining = list(engines)
    for engine in engines if shrink else ():
        try:
            _direct_requirements(own, (engine,), spec)
        except EngineMissing as error:
            remaining.remove(engine)
            lacking[engine] = error.message
    if not remaining:
        raise EngineMissing("; ".join(lacking.values()))
    try:
        folder = _collected(own, remaining, spec)
    except NoWheels:
        if not shrink or len(engines) == 1:
            raise
        for engine in list(remaining):  # find the engines without wheels
            try:
                _collected(own, (engine,), spec)
            except NoWheels as error:
                remaining.remove(engine)
                lacking[engine] = error.message
        if not remaining:
            raise
        folder = _collected(own, remaining, spec)
    pins = {own.name: sha256_of(own), **_checked_pins(folder)}
    wheels = (own, *(folder / name for name in sorted(pins) if name != own.name))
    version = str(parse_wheel_filename(own.name)[1])
    digest = _digest({**pins, own.name: content_digest(own)})
    listed = _write_sbom(folder, wheels, pins, spec.target)
    return Wheelhouse(wheels, pins, version, tuple(remaining), digest, lacking, listed, spec.extras)


def _write_sbom(folder: Path, wheels: Sequence[Path], pins: Mapping[str, str], target: WheelTarget) -> Path:
    about = {"type": "application", "name": f"edgert for {folder.name}", "version": edgert.__version__}
    document = sbom.sbom(about, (_component(wheel, pins[wheel.name], target) for wheel in wheels))
    with replacing(folder / sbom.NAME, shared=True) as file:
        file.write(json.dumps(document, indent=1).encode() + b"\n")
    return folder / sbom.NAME


def _component(wheel: Path, sha256: str, target: WheelTarget) -> sbom.Component:
    name, version, _, _ = parse_wheel_filename(wheel.name)
    needs = tuple(canonicalize_name(requirement.name) for requirement in _needs(wheel, "", target))
    return sbom.Component(name, str(version), sha256, _metadata(wheel).get("License-Expression") or "", needs)


def _collected(own: Path, engines: Sequence[str], spec: _DownloadSpec) -> Path:
    """Return the folder with the wheels of all requirements on the target; fill it if it is missing."""
    target, requirements = spec.target, _direct_requirements(own, engines, spec)
    folder = cache_folder() / "wheels" / _key(target, requirements, spec.lock.digest if spec.lock else "")
    if not folder.is_dir():
        named = f" with {', '.join(engines)}" if engines else ""
        spec.progress(f"collecting wheels{named} for Python {target.python} on {target.machine}, glibc {target.glibc}")
        with _beside(folder) as partial:
            _collect(partial, requirements, spec)
            lines = [f"{sha256_of(wheel)}  {wheel.name}\n" for wheel in sorted(partial.glob("*.whl"))]
            (partial / PINS_NAME).write_text("".join(lines))
    return folder


def _checked_pins(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each wheel in `folder`, by name. Raises ConfigInvalid if a wheel has changed."""
    advice = f"remove {folder}, which is a cache, then bootstrap again"
    try:
        lines = [line.split("  ", 1) for line in (folder / PINS_NAME).read_text().splitlines()]
        pins = {name: digest for digest, name in lines}
        changed = [name for name, digest in pins.items() if sha256_of(folder / name) != digest]
    except (OSError, ValueError) as error:
        raise ConfigInvalid(f"the wheels in {folder} cannot be read ({error}): {advice}") from error
    if changed:
        raise ConfigInvalid(f"{folder / changed[0]} has changed since its download: {advice}")
    return pins


def missing(roots: Iterable[Requirement], wheels: Sequence[Path], target: WheelTarget) -> list[Requirement]:
    """Return the requirements that no wheel in `wheels` meets.

    This function checks `roots`, and for each wheel that meets a requirement, the wheel's own requirements on `target`.
    """
    by_name = {str(parse_wheel_filename(path.name)[0]): path for path in wheels}
    todo, seen, absent = list(roots), set[tuple[str, str]](), []
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        for extra in ("", *sorted(requirement.extras)):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            if name in by_name:
                todo += _needs(by_name[name], extra, target)
            elif not extra:
                absent.append(requirement)
    return absent


def _collect(folder: Path, requirements: Sequence[Requirement], spec: _DownloadSpec) -> None:
    wanted = list(requirements)
    for _ in range(ROUNDS_MAX):
        if spec.lock:
            _download_locked(folder, wanted, spec.target, spec.lock)
        else:
            _download(folder, wanted, spec.target)
        more = missing(requirements, list(folder.glob("*.whl")), spec.target)
        if not more:
            return
        wanted = more if spec.lock else wanted + more
    raise ConfigInvalid(
        f"the wheels for {spec.target} still lack {wanted[-1]} after {ROUNDS_MAX} rounds of downloads: this is a fault of edgert, please report it"
    )


def _download_locked(folder: Path, wanted: Sequence[Requirement], target: WheelTarget, lock: Lock) -> None:
    """Download the locked versions of `wanted`. pip refuses a wheel whose hash is not in the lock."""
    lines = lock.lines(wanted, target.environment())
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(lines))
        file.flush()
        try:
            _download_words(folder, ["--no-deps", "--require-hashes", "--requirement", file.name], target)
        except NoWheels as error:
            raise NoWheels(
                f"{error.message}. This edgert pins the versions and the hashes of a device's wheels: "
                "if your index lacks one of these wheels, use --unlocked, which installs the newest versions that fit"
            ) from error


def _download(folder: Path, wanted: Sequence[Requirement], target: WheelTarget) -> None:
    # The requirements go to pip without markers: pip would evaluate the markers for this host, not for the device.
    alone = [str(_without_marker(requirement)) for requirement in wanted if requirement.name in NO_DEPS]
    if alone:
        _download_words(folder, ["--no-deps", *alone], target)
    rest = [str(_without_marker(requirement)) for requirement in wanted if requirement.name not in NO_DEPS]
    _download_words(folder, rest, target)


def _download_words(folder: Path, words: Sequence[str], target: WheelTarget) -> None:
    platforms = [word for tag in target.platforms() for word in ("--platform", tag)]
    run_pip(
        ["download", "--only-binary=:all:", "--dest", str(folder), "--implementation", "cp"]
        + ["--python-version", target.python, *platforms, *words],
        f"find wheels for Python {target.python} on {target.machine} with glibc {target.glibc}",
    )


def _direct_requirements(wheel: Path, engines: Sequence[str], spec: _DownloadSpec) -> list[Requirement]:
    """Return the requirements of edgert, of its extras and of `engines`. Raises EngineMissing."""
    target = spec.target
    # pip is included, because many systems ship Python without pip.
    requirements = [Requirement("pip"), *_needs(wheel, "", target)]
    for extra in (*DEFAULT_EXTRAS, *spec.extras):
        if extra in WITHOUT_EXTRAS.get(target.machine, ()):
            continue
        requirements += _needs(wheel, extra, target)
    extras = _metadata(wheel).get_all("Provides-Extra") or []
    for engine in engines:
        if engine in FOR_TESTS:
            continue
        if engine not in extras:
            raise EngineMissing(f"edgert has no wheels for engine {engine!r}: install it on the device by hand")
        more = _needs(wheel, engine, target)
        if not more:
            raise EngineMissing(
                f"engine {engine} has no wheels for Python {target.python} on {target.machine}: "
                "give the device another engine (--engines) or another Python"
            )
        requirements = requirements + more
    return sorted({str(requirement): requirement for requirement in requirements}.values(), key=str)


def _needs(wheel: Path, extra: str, target: WheelTarget) -> list[Requirement]:
    """Return the requirements of a wheel on `target`. With `extra`, return only what this extra adds."""
    requirements: list[Requirement] = []
    if parse_wheel_filename(wheel.name)[0] in NO_DEPS:
        return requirements
    for line in _metadata(wheel).get_all("Requires-Dist") or []:
        requirement = Requirement(line)
        holds = requirement.marker is None or requirement.marker.evaluate(target.environment(extra))
        always = requirement.marker is None or requirement.marker.evaluate(target.environment(""))
        if holds and (not extra or not always):
            requirements.append(requirement)
    return requirements


def _metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA") and n.count("/") == 1)
        return email.parser.BytesParser().parsebytes(archive.read(name), headersonly=True)


def _without_marker(requirement: Requirement) -> Requirement:
    plain = Requirement(str(requirement))
    plain.marker = None
    return plain


def _key(target: WheelTarget, requirements: Sequence[Requirement], lock: str) -> str:
    words = [KEY_FORMAT, target.python, target.machine, target.glibc, lock, *(str(r) for r in requirements)]
    digest = hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]
    return f"py{target.python}-{target.machine}-glibc{target.glibc}-{digest}"


def _digest(pins: Mapping[str, str]) -> str:
    return hashlib.sha256("".join(f"{pins[name]}  {name}\n" for name in sorted(pins)).encode()).hexdigest()


@contextmanager
def _beside(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder. Rename it to `folder` if the block succeeds; remove it if the block fails."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(folder.parent.glob(".*"))  # of a process that was killed, or ended by a second Ctrl-C
    partial = Path(tempfile.mkdtemp(prefix=".", dir=folder.parent))
    try:
        yield partial
        try:
            partial.rename(folder)
        except OSError:
            if not folder.is_dir():  # if the folder exists, another process made the same content first
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
