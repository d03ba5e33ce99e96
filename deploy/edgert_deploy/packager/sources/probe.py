"""The source probe: an untrusted model, read, checked and run once in a process with bounded memory and time.

Nothing of the file is parsed in the command's own process before that one said what it holds.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgert.tensors import TensorSpec
from edgert_deploy.packager.sources.sandbox import Limits, ask

EXAMINERS = {
    "onnx": "edgert_deploy.packager.sources.onnx_model:examine",
    "tflite": "edgert_deploy.packager.sources.tflite_model:examine",
}


@dataclass(frozen=True)
class Probed:
    """The contract of a model. `data` is the model as it goes on: as given, or translated for the runtimes."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    data: bytes
    quantised: bool


def probe(kind: str, name: str, data: bytes, limits: Limits | None = None) -> Probed:
    """Examine the model `data` of `kind`, called `name`, in a child process. Raises SourceInvalid."""
    answer, translated = ask(EXAMINERS[kind], {"name": name}, data, limits or Limits.for_file(len(data)))
    inputs, outputs = (tuple(TensorSpec.from_json(spec) for spec in answer[key]) for key in ("inputs", "outputs"))
    return Probed(inputs, outputs, translated or data, bool(answer.get("quantised")))
