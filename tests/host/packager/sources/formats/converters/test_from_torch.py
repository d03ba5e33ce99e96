"""The parts of the PyTorch converter that work without PyTorch: refusals and texts of errors.

test_convert.py runs the whole converter if PyTorch is installed.
"""

from __future__ import annotations

import json
import re
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edgert_deploy.packager.sources.formats.converters import from_torch

IMAGE = {"image": {"datatype": "float32", "shape": [1, 24, 24, 3]}}


class Module:
    """A stand-in for a TorchScript module, with the parts that the converter reads before it exports."""

    def __init__(self, forward: Callable[..., Any], **types: str) -> None:
        arguments = [SimpleNamespace(name=name, type=text) for name, text in {"self": "Net", **types}.items()]
        self.forward = SimpleNamespace(schema=SimpleNamespace(arguments=arguments))
        self.run = forward

    def eval(self) -> Module:
        return self

    def __call__(self, *inputs: Any) -> Any:
        return self.run(*inputs)


def fails(_: Any) -> Any:
    raise RuntimeError(
        "Traceback of TorchScript:\n  File forward <--- HERE\nRuntimeError: but got 24 channels instead\n"
    )


def refuses(*_: Any, **options: Any) -> None:
    """Stand in for an export of a module that PyTorch has quantized."""
    raise ValueError("Exporting the operator 'quantized::linear_dynamic' is not supported.")


@pytest.mark.parametrize(
    ("module", "inputs", "says"),
    [
        (Module(lambda x: x, image="Tensor"), IMAGE, r"quantized::linear_dynamic.* save the module in float"),
        (Module(fails, image="Tensor"), {}, r"its inputs: image; given: none"),
        (Module(fails, image="Tensor"), IMAGE, r"image=float32:1,24,24,3: RuntimeError: but got 24 .* with --input$"),
        (Module(fails, image="Tensor", scale="float"), IMAGE, r"inputs than tensors \(scale: float\)\. Wrap it"),
        (Module(lambda x: {"scores": x}, image="Tensor"), IMAGE, r"answers than tensors \(dict\)\. Wrap it"),
        (Module(lambda x: (x, [x]), image="Tensor"), IMAGE, r"answers than tensors \(list\)\. Wrap it"),
        (Module(fails, x="Tensor"), {"x": {"datatype": "float32", "shape": [0.5]}}, r"--input x=1,3,224,224"),
    ],
)
def test_a_module_of_torchscript_that_cannot_be_exported_gets_the_next_step(
    module: Module,
    inputs: dict[str, Any],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    torch = SimpleNamespace(
        jit=SimpleNamespace(load=lambda *_, **__: module),
        float32=SimpleNamespace(is_floating_point=True),
        onnx=SimpleNamespace(export=refuses),
        Tensor=np.ndarray,
        randn=lambda shape: SimpleNamespace(to=lambda _: np.zeros(shape, np.float32)),
    )
    path = tmp_path / "net.pt"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("net/constants.pkl", "net/code/net.py"):
            archive.writestr(name, b"")
    request = json.dumps({"model": str(path), "out": "", "inputs": inputs})
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(sys, "argv", ["from_torch.py", request])
    assert from_torch.main() == 5
    (text,) = capsys.readouterr().err.splitlines()  # the build reports the last line
    assert re.search(says, text), text


def test_the_reason_of_a_failed_export_is_the_first_cause() -> None:
    """The exporters wrap this cause in errors with general advice."""
    error = RuntimeError("This is step 3/3. Create an error report")
    error.__cause__ = LookupError("No ONNX function\nfound for aten._linalg_eigh")
    assert from_torch.short(error) == "LookupError: No ONNX function found for aten._linalg_eigh"
