"""Converts models of other frameworks to ONNX. A child process runs the converter.

The converter is the framework's own exporter. The child process is a Python that has the framework: this Python
(with the extra `keras` or `torch`), or another Python that the user names. A framework's loader may run code from the
file. So a hostile file of a framework can harm this host, but a hostile ONNX file cannot.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgert.errors import ConfigInvalid, SourceInvalid
from edgert_deploy.common.file_cache import FileCache
from edgert_deploy.packager.processes.sandbox import Progress
from edgert_deploy.packager.sources.onnx_graph.bucket_axis import WantedBuckets

CONVERT_TIMEOUT_S = 1800
VERSIONS_TIMEOUT_S = 60
VERSIONS = (
    "import importlib.metadata as m, sys; print(sys.version, sorted((d.name, d.version) for d in m.distributions()))"
)
SCRIPTS = Path(__file__).parent / "converters"
EXIT_MISSING, EXIT_ADVISED = 4, 5
HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"
ZIP_MAGIC = b"PK\x03\x04"
COLOR = re.compile(r"\x1b\[[0-9;]*m")  # both frameworks color their errors
NAMES = {"keras": "Keras", "torch": "PyTorch"}
INPUT = re.compile(
    r"(?P<name>[^=]+)=(?:(?P<datatype>[a-z]+[0-9]*):)?(?P<shape>[0-9]+(?:,[0-9]+)*|-?[0-9]*\.?[0-9]+(?:e-?[0-9]+)?|true|false)"
)
INPUT_DATATYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")


@dataclass(frozen=True)
class Conversion:
    """The options of a conversion.

    Attributes:
        python: The Python that has the framework.
        inputs: The example inputs: name of the input -> `{"datatype", "shape"}`.
        buckets: The buckets for an axis that the ONNX model leaves open.
        cache: The cache with earlier conversions, because a framework takes seconds to start. With None, each build
            converts the model again.
        progress: Receives a line when a conversion starts, because it takes many seconds.
    """

    python: str = sys.executable
    inputs: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    buckets: WantedBuckets | None = None
    cache: FileCache | None = None
    progress: Progress = lambda _: None

    @property
    def shapes(self) -> dict[str, list[int]]:
        """The lengths of each input's axes."""
        return {name: list(spec["shape"]) for name, spec in self.inputs.items()}


def framework_of(path: Path) -> str | None:
    """Find a model's framework from its content: return "keras", "torch", or None for any other file."""
    if path.is_dir():
        return "keras" if (path / "saved_model.pb").is_file() else None
    if not path.is_file():
        return None
    try:
        with path.open("rb") as file:
            magic = file.read(8)
    except OSError:
        return None
    if magic == HDF5_MAGIC:
        return "keras"
    names = names_in_zip(path) if magic.startswith(ZIP_MAGIC) else None
    if names is None:
        return None
    if "model.weights.h5" in names and "config.json" in names:
        return "keras"
    is_torch = any(name.endswith(("/constants.pkl", "/archive_format", "/archive_version")) for name in names)
    return "torch" if is_torch or path.suffix == ".pt2" else None


def names_in_zip(path: Path) -> list[str] | None:
    """Return the names of the files in a ZIP archive; None if the archive cannot be read."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.namelist()
    except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError):
        return None


def converted(path: Path, framework: str, how: Conversion) -> bytes:
    """Return the model as ONNX, from `how.cache` if possible. Raises ConfigInvalid or SourceInvalid."""
    cache = how.cache
    with tempfile.TemporaryDirectory(prefix="edgert-convert-") as folder:
        out = Path(folder) / "model.onnx"
        if cache is None or (versions := _versions(how.python)) is None:
            _convert(path, framework, how, out)
            return out.read_bytes()
        script = (SCRIPTS / f"from_{framework}.py").read_text()
        made_of = [digest_and_size(path), path.name, framework, how.python, versions, dict(how.inputs), script]
        key = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()
        if not cache.get(key, out.parent):
            _convert(path, framework, how, out)
            cache.put(key, [out])
        return out.read_bytes()


def _versions(python: str) -> str | None:
    """Return the versions of `python` and of its packages as text; None if `python` fails."""
    command = [python, "-I", "-c", VERSIONS]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=VERSIONS_TIMEOUT_S, check=False)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _convert(path: Path, framework: str, how: Conversion, out: Path) -> None:
    """Write the model as ONNX to `out`."""
    request = json.dumps({"model": str(path.resolve()), "out": str(out), "inputs": dict(how.inputs)})
    command = [how.python, "-I", str(SCRIPTS / f"from_{framework}.py"), request]
    how.progress(f"{framework}: converting {path.name} to ONNX")
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=CONVERT_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise SourceInvalid(
            f"converting {path.name} to ONNX took more than {CONVERT_TIMEOUT_S} s; export the model as ONNX yourself"
        ) from error
    except OSError as error:
        raise ConfigInvalid(
            f"cannot run {how.python}: {error.strerror}. Give the path of a Python with --convert-with"
        ) from error
    if done.returncode != 0 or not out.is_file():
        raise _failure(path, framework, how, done)


def digest_and_size(path: Path) -> tuple[str, int]:
    """Return the SHA-256 and the size of a file or a folder. A folder's SHA-256 covers its files' names."""
    digest, size = hashlib.sha256(), 0
    for file in sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]:
        data = file.read_bytes()
        if path.is_dir():
            digest.update(f"{file.relative_to(path).as_posix()}\0{len(data)}\0".encode())
        digest.update(data)
        size += len(data)
    return digest.hexdigest(), size


def read_inputs(texts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Parse example inputs, such as `NAME=1,3,224,224` or `NAME=int64:1,128`.

    `NAME=0.5` gives the value of an input without axes, and `NAME=true` gives the value of a BOOL. Raises
    ConfigInvalid.
    """
    inputs = {}
    for text in texts:
        match = INPUT.fullmatch(text)
        datatype = (match["datatype"] or "float32") if match else ""
        if match is None or datatype not in INPUT_DATATYPES:
            raise ConfigInvalid(
                f"--input {text!r}: give NAME=1,3,224,224 or NAME=int64:1,128, or NAME=0.5 or NAME=true for a constant. "
                f"The types are {', '.join(INPUT_DATATYPES)}"
            )
        inputs[match["name"]] = {"datatype": datatype, "shape": [_number(n) for n in match["shape"].split(",")]}
    return inputs


def _number(text: str) -> int | float | bool:
    if text in ("true", "false"):
        return text == "true"
    return int(text) if text.removeprefix("-").isdecimal() else float(text)


def _failure(
    path: Path, framework: str, how: Conversion, done: subprocess.CompletedProcess[str]
) -> ConfigInvalid | SourceInvalid:
    reason = (COLOR.sub("", done.stderr).strip().splitlines() or ["no message"])[-1][:500].rstrip(".")
    if done.returncode == EXIT_MISSING:
        return ConfigInvalid(
            f"{path.name} is a {NAMES[framework]} model, and {how.python} has no {reason.removeprefix('missing: ')}: "
            f"pip install 'edgert[{framework}]', or use --convert-with to name a Python that has it"
        )
    died = f"; signal {-done.returncode} ended it" if done.returncode < 0 else ""
    advice = "" if done.returncode == EXIT_ADVISED else ". Export the model as ONNX yourself, and give the ONNX file"
    return SourceInvalid(f"{NAMES[framework]} could not convert {path.name} to ONNX: {reason}{died}{advice}")
