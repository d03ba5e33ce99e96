"""An environment for each peer, made at first use and kept."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import onnxruntime

# The packages of each peer's documentation, with our version of ONNX Runtime.
REQUIREMENTS = {
    "fastapi": ("fastapi", "uvicorn[standard]"),
    "litserve": ("litserve",),
    "mlserver": ("mlserver",),
    # Converters, for bench/build.py. Olive imports requests without declaring it.
    "onnx2tf": ("onnx2tf",),
    "olive": ("olive-ai", "onnxruntime", "requests"),
}
# These pin their own versions of ONNX Runtime and NumPy.
CONVERTERS = ("onnx2tf", "olive")
PYTHON_MIN = {"onnx2tf": (3, 12)}
INSTALL_S_MAX = 900.0


def default_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "edgert-bench"


def environment(folder: Path, name: str) -> Path:
    """Return the Python of the environment `name` below `folder`. Raises OSError with the reason."""
    maker, version = _python_for(name)
    place = folder / f"{name}-python{version[0]}.{version[1]}"
    python, stamp = place / "bin/python", place / "installed"
    ours = () if name in CONVERTERS else (f"onnxruntime=={onnxruntime.__version__}", "numpy")
    packages = [*ours, *REQUIREMENTS[name]]
    wanted = "\n".join([_build_of(maker), *packages])
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"installing {name} into {place}", file=sys.stderr)
    _run([maker, "-m", "venv", "--clear", str(place)])
    _run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages])
    stamp.write_text(wanted)
    return python


def _build_of(python: str) -> str:
    """Return which Python it is: a peer gets EdgeRT's, because its build counts for µs."""
    code = "import sys; print(sys.base_prefix, sys.version)"
    return " ".join(subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.split())


def _python_for(name: str) -> tuple[str, tuple[int, int]]:
    """Return a Python that `name` runs on, and its version: this one if possible."""
    least = PYTHON_MIN.get(name, (3, 0))
    if sys.version_info[:2] >= least:
        return sys.executable, (sys.version_info[0], sys.version_info[1])
    for minor in range(least[1], least[1] + 3):
        # A Python on the path may be a stub of a version manager.
        found = shutil.which(f"python3.{minor}")
        if found and subprocess.run([found, "-c", ""], capture_output=True).returncode == 0:
            return found, (3, minor)
    raise OSError(f"it needs Python {least[0]}.{least[1]}, and none is on the path")


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S_MAX)
    except subprocess.TimeoutExpired as error:
        raise OSError(f"not done within {INSTALL_S_MAX:.0f} s") from error
    if done.returncode:
        raise OSError("; ".join(done.stderr.strip().splitlines()[-2:]))
