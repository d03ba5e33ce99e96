"""The probe: a child process with bounded memory and time reads, checks and runs a model once.

The command's own process parses the file only after the probe has accepted it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

from edgert.bundle.buckets import Buckets
from edgert.errors import EdgeRTError, SourceInvalid
from edgert.tensors import TensorSpec
from edgert.typed_json import from_json, to_json
from edgert_deploy.packager.processes.sandbox import WAIT_TIMES, Answer, Child, ChildFailed, Limits
from edgert_deploy.packager.sources.onnx_graph.bucket_axis import WantedBuckets

EXAMINERS = {
    "onnx": "edgert_deploy.packager.sources.onnx_model:examine",
    "tflite": "edgert_deploy.packager.sources.tflite_model:examine",
}
GIB = 1024**3
MEMORY_BYTES_MIN = 4 * GIB  # the smallest limit on address space: the libraries alone map more than 1 GiB
MEMORY_PER_BYTE = 6  # added to the limit: the file, its parsed forms and the runtime's copies of the weights
TIME_S_MIN = 90
BYTES_PER_S = 10_000_000  # bytes of weights that the slowest known machine checks and runs in a second
# Each thread reserves address space, and one run needs no further threads.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(frozen=True)
class ProbeResult:
    """The contract of a model. `data` is the model for the build: as given, or translated."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    data: bytes = b""
    quantized: bool = False
    remarks: tuple[str, ...] = ()
    buckets: Buckets | None = None
    unread: tuple[str, ...] = ()
    scales: Mapping[str, tuple[float, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class ProbeRequest:
    """The request for a model: its file, the lengths of its inputs' axes, and buckets for one axis."""

    name: str
    folder: str
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    buckets: WantedBuckets | None = None


def probe(
    kind: str, request: ProbeRequest, data: bytes, external_bytes: int = 0, limits: Limits | None = None
) -> ProbeResult:
    """Examine a model in a child process.

    Args:
        kind: A key of EXAMINERS.
        external_bytes: The size of the weights in separate files.
        limits: The limits of the child process. By default, they depend on the sizes of `data` and of these files.

    Raises SourceInvalid.
    """
    limits = limits or limits_for(len(data) + 2 * external_bytes)
    answer, translated = run_in_child(EXAMINERS[kind], to_json(request), data, limits)
    return replace(from_json(ProbeResult, answer), data=translated or data)


def external_files(name: str, data: bytes) -> list[str]:
    """Return the files, relative to an ONNX model's folder, that hold its weights. Raises SourceInvalid."""
    if b"location" not in data:  # the key that every tensor with external data has
        return []
    answer, _ = run_in_child(
        "edgert_deploy.packager.sources.onnx_model:external_files", {"name": name}, data, limits_for(len(data))
    )
    return [str(file) for file in answer["files"]]


def limits_for(size_bytes: int) -> Limits:
    return Limits(MEMORY_BYTES_MIN + MEMORY_PER_BYTE * size_bytes, TIME_S_MIN + size_bytes // BYTES_PER_S)


def run_in_child(function: str, request: dict[str, Any], data: bytes, limits: Limits) -> Answer:
    """Run `function` ("module:name") in a child process. Raises SourceInvalid for any failure."""
    steps = ["onnx read the model"]
    with closing(Child(ENVIRONMENT)) as child:
        try:
            return child.call(function, request, data, limits, steps.append)
        except EdgeRTError as error:
            raise SourceInvalid(error.message) from error
        except ChildFailed as error:
            raise refusal(error, limits, steps[-1]) from error


def refusal(failed: ChildFailed, limits: Limits, step: str = "the tools read the model") -> SourceInvalid:
    """Return the error for a probe that failed in `step`, such as "onnx checked the model"."""
    task = "checking the model and running it once"
    return SourceInvalid(
        {
            "memory": f"{task} took more than {limits.memory_bytes / GIB:.1f} GiB of memory, the limit for a model of its size: "
            "look for an axis or a tensor that is far too large",
            "time": f"{task} took more than {limits.time_s} s of processor time, the limit for a model of its size: "
            "look for a loop that does not end, or an axis that is far too long",
            "wait": f"{task} did not end within {limits.time_s * WAIT_TIMES} s, because it mostly waited "
            "for a processor: this machine is overloaded, try again when it is less busy",
            "crash": f"there was a crash ({failed.detail}) while {step}. Either the file is damaged, or this version of "
            "the tool cannot handle a part of the file. Export the model again. If the crash remains, export the model in another way, or "
            "try another version of the tool",
            "error": f"the model could not be checked: {failed.detail}",
        }[failed.cause]
    )
