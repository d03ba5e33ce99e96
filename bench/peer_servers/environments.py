"""An environment of its own for each peer, made when it is first needed and kept."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import onnxruntime

# What the peer's own documentation has one install; ONNX Runtime is ours to the version.
REQUIREMENTS = {
    "fastapi": ("fastapi", "uvicorn[standard]"),
    "litserve": ("litserve",),
    "mlserver": ("mlserver",),
}
INSTALL_S_MAX = 900.0


def default_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "edgert-bench"


def environment(folder: Path, name: str) -> Path:
    """The Python of the environment `name` below `folder`. Raises OSError where it cannot be made, saying why."""
    place = folder / f"{name}-python{sys.version_info[0]}.{sys.version_info[1]}"
    python, stamp = place / "bin/python", place / "installed"
    wanted = [f"onnxruntime=={onnxruntime.__version__}", "numpy", *REQUIREMENTS[name]]
    if stamp.exists() and stamp.read_text() == "\n".join(wanted):
        return python
    print(f"installing {name} into {place}", file=sys.stderr)
    _run([sys.executable, "-m", "venv", "--clear", str(place)])
    _run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted])
    stamp.write_text("\n".join(wanted))
    return python


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S_MAX)
    except subprocess.TimeoutExpired as error:
        raise OSError(f"not done within {INSTALL_S_MAX:.0f} s") from error
    if done.returncode:
        raise OSError("; ".join(done.stderr.strip().splitlines()[-2:]))
