"""The Python environment of a runtime: commands that create, test and try it beside the current one.

`edgert bootstrap` runs these commands on a device over its transport; the follower of a channel runs them on its own
device. The layout of HOME is described in edgert_deploy/bootstrap/runtime.py.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from edgert.engines import system_package
from edgert.errors import DeviceError, EngineMissing
from edgert.typed_json import from_json

RELEASE_NAME = "release"  # the file in an environment with the number of its release, if a channel installed it
VENV_S_MAX = 300.0
INSTALL_S_MAX = 1800.0
ENGINE_S_MAX = 180.0  # the first import of an engine on a slow card
SELF_TEST_S_MAX = 1800.0  # TensorRT may compile an engine for its new version
INSTALLED_FACTOR = 1.2  # for byte code and file system blocks in addition to the files; measured: 1.07
SPARE_BYTES = 32 * 1024**2  # the free space that must remain
ID_LENGTH = 16
CODE = Path(__file__).parent  # the folder of edgert's code
TAIL_CHARS = 800
_NOEXEC = "failed to map segment from shared object"  # a message of glibc
_PIP = ("--isolated", "--disable-pip-version-check", "--no-input")
_INSTALL = (
    "--no-index",
    "--no-deps",
    "--require-hashes",
    "--force-reinstall",
    "--no-cache-dir",
    "--no-compile",
    "--quiet",
)

# Compiles each module that a device may import, because the daemon writes no byte code. pip would compile far more:
# itself, the package of the host, the tests of NumPy. The worker imports PIL with the first image.
_COMPILE = """
import contextlib, gc, importlib, pkgutil
gc.disable()  # imports leave no garbage
import edgert
for name in (*(each.name for each in pkgutil.walk_packages(edgert.__path__, "edgert.")), "PIL.Image"):
    if not name.endswith("__main__"):
        with contextlib.suppress(Exception):  # the device lacks an extra
            importlib.import_module(name)
"""

# Writes all files of an environment to the disk before it marks the environment complete.
FINISH = """
sync && printf %s "$2" >"$1/.complete.new" && sync && mv "$1/.complete.new" "$1/.complete" && rm -rf "$3" && sync
"""

_COPY = """
rm -rf "$2" "$2.new"
cp -al "$1" "$2.new" 2>/dev/null || { rm -rf "$2.new"; cp -a "$1" "$2.new"; }
rm -f "$2.new/.complete" "$2.new/release" && mv "$2.new" "$2" || exit 1
for file in "$2"/bin/*; do
  test -L "$file" || ! grep -qI . "$file" || { sed "s|$1|$2|g" "$file" >"$file.new" && chmod 755 "$file.new" && mv -f "$file.new" "$file"; }
done
"""


@dataclass(frozen=True)
class Result:
    """The end of a command and its output."""

    argv: tuple[str, ...]
    exit_code: int
    stdout: str
    stderr: str

    @property
    def ok(self) -> bool:
        return self.exit_code == 0

    def failure_text(self) -> str:
        """Return a line without a full stop: the command, its exit code, the end of its output."""
        output = (self.stderr.strip() or self.stdout.strip())[-TAIL_CHARS:]
        words = shlex.join(word for word in self.argv if "\n" not in word)  # omit scripts, which tell a user nothing
        end = f"exited with {self.exit_code}" if self.exit_code >= 0 else "was killed"
        if self.exit_code < -1:  # over SSH, the signal is unknown
            end += f" by signal {-self.exit_code}"
        return f"`{words[:200]}` {end}: {output.removesuffix('.') or 'no output'}"


Run = Callable[[Sequence[str], float], Result]  # a command and its time limit in seconds


@dataclass(frozen=True)
class Installed:
    """A complete environment, as its own files describe it. `id` is "" if there is no environment.

    `lacking` maps each missing engine to the reason. `wheels` has the SHA-256 by file name.
    """

    id: str = ""
    python: str = ""
    system_site: bool = False
    engines: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()
    lacking: Mapping[str, str] = field(default_factory=dict)
    wheels: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, runtime: str, complete: str, pyvenv: Mapping[str, str]) -> Installed:
        """Return the environment `runtime`, from `.complete` and the keys of `pyvenv.cfg`."""
        venv = {
            "id": runtime,
            "python": ".".join(pyvenv.get("version", "").split(".")[:2]),
            "system_site": pyvenv.get("include-system-site-packages") == "true",
        }
        try:
            return from_json(cls, {**json.loads(complete), **venv})
        except (ValueError, TypeError, RecursionError):  # damaged, or of an old version
            return from_json(cls, venv)

    def base_for(self, python: str, engines: Iterable[str]) -> Installed:
        """Return this environment if it can be the base for `python` and `engines`, else an empty `Installed`."""
        alike = (self.python, self.system_site) == (python, needs_system_site(engines))
        return self if self.id and self.wheels and alike else Installed()


@dataclass(frozen=True)
class Environment:
    """The environment to create.

    Attributes:
        device: The device's name in messages.
        python: The interpreter for an environment without a base.
        pins: The SHA-256 of each wheel by file name. The changed wheels are in HOME/wheels.
        base: The environment to copy; an empty `Installed` for a new environment.
        exactly: Whether every engine must load; otherwise one engine is enough.
        about: Further keys for the file `.complete`.
    """

    device: str
    home: str
    id: str
    python: str
    engines: tuple[str, ...]
    pins: Mapping[str, str]
    base: Installed = Installed()
    exactly: bool = False
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> str:
        return f"{self.home}/venvs/{self.id}"


def home_of(prefix: Path) -> Path | None:
    """Return the folder of runtimes that `prefix` is in; None if bootstrap created no such folder."""
    home = prefix.resolve().parent.parent
    return home if prefix.resolve().parent.name == "venvs" and (home / "runtime.sh").is_file() else None


def trial_of(home: Path) -> str:
    """Return the runtime that is on trial in HOME; "" if no runtime is on trial."""
    try:
        lines = (home / "trial").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition("=")[2] for line in lines if line.startswith("new=")), "")


class RuntimeResult(Enum):
    """The progress or the result of the last trial of a runtime."""

    RUNNING = "running"
    KEPT = "kept"
    ROLLED_BACK = "rolled-back"


@dataclass(frozen=True)
class RuntimeOutcome:
    """The notes of `runtime.sh` about the last trial in HOME; `result` is None before the first trial."""

    result: RuntimeResult | None = None
    runtime: str = ""
    reason: str = ""

    @classmethod
    def read(cls, text: str) -> RuntimeOutcome:
        """Read the content of HOME/outcome."""
        lines = text.splitlines()
        if len(lines) < 3 or lines[0] not in {result.value for result in RuntimeResult}:
            return cls()
        return cls(RuntimeResult(lines[0]), lines[1], lines[2])


def release_in_use(prefix: Path | None = None) -> int | None:
    """Return the release of this process's runtime, or of `prefix`; None if no channel installed it."""
    try:
        return int((prefix or Path(sys.prefix)).joinpath(RELEASE_NAME).read_text())
    except (OSError, ValueError):
        return None


def code_digest(folder: Path) -> str:
    """Return the SHA-256 of the Python files in `folder`.

    The digest identifies the code, because the version number changes less often than the code. A checkout and an
    installed wheel of the same code give the same digest.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        data = path.read_bytes()
        digest.update(json.dumps([str(path.relative_to(folder)), len(data)]).encode() + data)
    return digest.hexdigest()


def changed_wheels(pins: Mapping[str, str], base_wheels: Mapping[str, str]) -> tuple[str, ...]:
    """Return the wheels to install into a copy of an environment that has `base_wheels` ({}: no copy)."""
    # Edgert's own wheel is always installed again, because its commands contain the path of their environment.
    return tuple(name for name in pins if base_wheels.get(name) != pins[name] or package_of(name) == "edgert")


def package_of(wheel: str) -> str:
    """Return the package in the name of a wheel, in pip's spelling."""
    return wheel.partition("-")[0].lower().replace("_", "-")


def needs_system_site(engines: Iterable[str]) -> bool:
    """Return whether the environment needs the system's packages, such as the TensorRT of JetPack."""
    return any(map(system_package, engines))


def install_hint(engine: str) -> str:
    """Return the end of a message: how to install an SDK that pip does not bring; "" for other SDKs."""
    package = system_package(engine)
    return f"; its SDK comes with the system: apt-get install {package}" if package else ""


def make_environment(run: Run, new: Environment) -> dict[str, str]:
    """Create the environment, which is not in use yet; return the reasons of engines that do not load.

    Raises DeviceError; also EngineMissing if no engine loads. With `exactly`, every engine must load.
    """
    if new.base.id:
        # The copy has hard links, because pip replaces files and never changes them.
        _must(run, new, ["sh", "-c", _COPY, "sh", f"{new.home}/venvs/{new.base.id}", new.folder], VENV_S_MAX)
        _remove_packages(run, new)
    else:
        _make_venv(run, new)
    _pip_install(run, new)
    loading, lacking = _try_engines(run, new)
    wheels = f"{new.home}/wheels"
    if lacking and (new.exactly or not loading):
        run(["rm", "-rf", new.folder, wheels], VENV_S_MAX)
        raise EngineMissing(f"{new.device}: {'; '.join(lacking.values())}")
    about = {
        **new.about,
        "engines": list(loading),
        "lacking": {**new.about.get("lacking", {}), **lacking},
        "wheels": dict(new.pins),
    }
    _must(run, new, ["sh", "-c", FINISH, "sh", new.folder, json.dumps(about), wheels], VENV_S_MAX)
    return lacking


def self_test(run: Run, folder: str, state: str, models: Sequence[str]) -> str:
    """Load each model in an environment and check its golden answers; return the failure, or ""."""
    result = run([f"{folder}/bin/edgertd", "--state", state, "self-test", *models, "--json"], SELF_TEST_S_MAX)
    if result.ok:
        return ""
    try:
        return str(json.loads(result.stdout)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return result.failure_text()


def trial_command(
    home: str, state: str, runtime: str, models: Sequence[str], manager: str, trial_s: float
) -> list[str]:
    """Return the command that starts the trial of a runtime. The trial continues after its caller ends.

    Args:
        manager: system, user or monitor. If the trial's script is killed, the manager starts the script again.
    """
    script = 'rm -f "$1/outcome"; shift; '
    if manager == "monitor":
        # This has the same effect as Restart=on-abnormal below: a restarted script rolls the runtime back.
        script += """set -- sh -c 'while "$@"; test $? -gt 128; do sleep 1; done' sh "$@"; """
        script += '{ command -v setsid >/dev/null && set -- setsid "$@"; (trap "" HUP; exec "$@") </dev/null >/dev/null 2>&1 & }'
    else:
        user = "--user" if manager == "user" else ""
        script += (
            "export XDG_RUNTIME_DIR=${XDG_RUNTIME_DIR:-/run/user/$(id -u)}; "
            f"systemd-run {user} --quiet --collect --unit=edgertd-trial -p Restart=on-abnormal -p RestartSec=1 "
            '--description="EdgeRT tries a new runtime" -- "$@"'
        )
    words = ["sh", f"{home}/runtime.sh", "trial", manager, state, f"{trial_s:.0f}", runtime, *models]
    return ["sh", "-c", script, "sh", home, *words]


def _remove_packages(run: Run, new: Environment) -> None:
    keep = set(map(package_of, new.pins))
    removed = sorted(set(map(package_of, new.base.wheels)) - keep)
    if removed:
        words = [f"{new.folder}/bin/python", "-m", "pip", *_PIP, "uninstall", "--yes", "--quiet", *removed]
        _must(run, new, words, INSTALL_S_MAX)


def _make_venv(run: Run, new: Environment) -> None:
    """Create an environment without pip. Debian's Python cannot install pip there, so a wheel brings it."""
    options = ["--system-site-packages"] if needs_system_site(new.engines) else []
    result = run([new.python, "-m", "venv", "--clear", "--without-pip", *options, new.folder], VENV_S_MAX)
    if result.ok:
        return
    if "No module named venv" in result.stdout + result.stderr:
        version = new.about.get("python", "3")
        raise DeviceError(
            f"{new.python} on {new.device} cannot make virtual environments. Run there, as root: "
            f"apt-get install python{version}-venv. Then repeat this command"
        )
    raise DeviceError(f"{new.device}: {result.failure_text()}")


def _pip_install(run: Run, new: Environment) -> None:
    """Install exactly these wheels: pip resolves no dependencies, and refuses other hashes."""
    wheels, changed = f"{new.home}/wheels", changed_wheels(new.pins, new.base.wheels)
    itself = next((name for name in changed if package_of(name) == "pip"), "")
    pip = [f"{wheels}/{itself}/pip"] if itself else ["-m", "pip"]
    command = shlex.join([f"{new.folder}/bin/python", *pip, *_PIP, "install", *_INSTALL])
    script = f'mkdir -p "$2" && printf %s "$1" >"$2/requirements.txt" && {command} --find-links "$2" -r "$2/requirements.txt"'
    pinned = [f"{package_of(name)}=={name.split('-')[1]} --hash=sha256:{new.pins[name]}\n" for name in sorted(changed)]
    _must(run, new, ["sh", "-c", script, "sh", "".join(pinned), wheels], INSTALL_S_MAX)
    # A follower inherits the setting "write no byte code" from the daemon; -I ignores it. If this command fails, the
    # environment works, but starts slowly.
    run([f"{new.folder}/bin/python", "-I", "-c", _COMPILE], INSTALL_S_MAX)


def _try_engines(run: Run, new: Environment) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the engines that load, and why others do not. Test each engine in its own process."""
    # This also writes the byte code of the engine's SDK. It uses no -I, because the SDK may be in this user's packages.
    program = (
        "import sys; sys.dont_write_bytecode = False; "
        "from edgert.engines import engine_by_name; engine_by_name(sys.argv[1]).version()"
    )
    loading, lacking = [], {}
    for engine in new.engines:
        result = run([f"{new.folder}/bin/python", "-c", program, engine], ENGINE_S_MAX)
        if result.ok:
            loading.append(engine)
            continue
        reason = (result.stderr.strip().splitlines() or [result.failure_text()])[-1]
        hint = install_hint(engine)
        if _NOEXEC in reason:
            hint = f"; {new.home} is mounted noexec: remount it, or add the device again with --home on another file system"
        lacking[engine] = f"engine {engine} does not load: {reason[-300:]}{hint}"
    return tuple(loading), lacking


def _must(run: Run, new: Environment, argv: Sequence[str], timeout_s: float) -> None:
    result = run(argv, timeout_s)
    if not result.ok:
        raise DeviceError(f"{new.device}: {result.failure_text()}")
