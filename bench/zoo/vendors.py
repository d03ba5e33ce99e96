"""The vendors' own recipes with their defaults: NNCF, ONNX Runtime's quantizers, AI Edge Quantizer.

A recipe takes a float model and calibration samples, and writes a quantized file. Its exceptions are refusals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.zoo.runners import Sample
from edgert_deploy.packager.processes.vendor_output import working_in

Recipe = Callable[[Path, Sequence[Sample], Path], Path]


def nncf_default(model: Path, samples: Sequence[Sample], folder: Path) -> Path:
    return _nncf(model, samples, folder / "nncf.xml")


def nncf_transformer(model: Path, samples: Sequence[Sample], folder: Path) -> Path:
    import nncf

    return _nncf(model, samples, folder / "nncf-transformer.xml", model_type=nncf.ModelType.TRANSFORMER)


def _nncf(model: Path, samples: Sequence[Sample], out: Path, **options: Any) -> Path:
    import nncf
    import openvino

    quantized = nncf.quantize(openvino.convert_model(model), nncf.Dataset(list(samples)), subset_size=300, **options)
    openvino.save_model(quantized, out)
    return out


def onnxruntime_static(model: Path, samples: Sequence[Sample], folder: Path) -> Path:
    from onnxruntime.quantization import quantize_static

    out = folder / "static.onnx"
    quantize_static(_prepared(model, folder), out, _Reader(samples))
    return out


def onnxruntime_static_per_channel(model: Path, samples: Sequence[Sample], folder: Path) -> Path:
    from onnxruntime.quantization import QuantType, quantize_static

    out = folder / "static-per-channel.onnx"
    quantize_static(_prepared(model, folder), out, _Reader(samples), per_channel=True, activation_type=QuantType.QUInt8)
    return out


def onnxruntime_dynamic(model: Path, samples: Sequence[Sample], folder: Path) -> Path:
    from onnxruntime.quantization import quantize_dynamic

    out = folder / "dynamic.onnx"
    quantize_dynamic(_prepared(model, folder), out)
    return out


def _prepared(model: Path, folder: Path) -> Path:
    from onnxruntime.quantization.shape_inference import quant_pre_process

    out = folder / "prepared.onnx"
    if not out.exists():
        try:
            with working_in(folder):  # if it fails, it writes the model to the working folder
                quant_pre_process(model.absolute(), out.absolute())
        except Exception:  # symbolic shape inference fails on many trained models; users then switch it off
            quant_pre_process(model, out, skip_symbolic_shape=True)
    return out


class _Reader:
    """onnxruntime.quantization's CalibrationDataReader, by its protocol."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._samples = samples
        self.rewind()

    def get_next(self) -> Sample | None:
        return next(self._left, None)

    def rewind(self) -> None:
        self._left = iter(self._samples)


def ai_edge_static(model: Path, samples: Sequence[Sample], folder: Path) -> Path:
    from ai_edge_quantizer import quantizer, recipe

    one = quantizer.Quantizer(str(_current(model, folder)), recipe.static_wi8_ai8())
    calibration = {
        "serving_default": [dict(zip(_arguments(model), sample.values(), strict=True)) for sample in samples]
    }
    return exported(one.quantize(one.calibrate(calibration)), folder / "ai-edge-static.tflite")


def ai_edge_dynamic(model: Path, samples: Sequence[Sample], folder: Path) -> Path:
    from ai_edge_quantizer import quantizer, recipe

    one = quantizer.Quantizer(str(_current(model, folder)), recipe.dynamic_wi8_afp32())
    return exported(one.quantize(), folder / "ai-edge-dynamic.tflite")


def _current(model: Path, folder: Path) -> Path:
    """Copy the model with each operator's code in the current field: the quantizer ignores that of older converters."""
    from edgert_deploy.packager.tflite_lowering.tables import packed, unpacked

    content = unpacked(model.read_bytes())
    for code in content.operatorCodes:
        code.builtinCode = max(code.builtinCode, code.deprecatedBuiltinCode)
    out = folder / "current.tflite"
    out.write_bytes(packed(content))
    return out


def _arguments(model: Path) -> list[str]:
    from ai_edge_litert.interpreter import Interpreter

    signatures = Interpreter(str(model)).get_signature_list()
    return next(iter(signatures.values()))["inputs"] if signatures else []


def exported(result: Any, out: Path) -> Path:
    """Write the result of AI Edge Quantizer to `out`. Raises ValueError if it has no INT8 tensor.

    The quantizer leaves a file with FP16 weights in float without a word.
    """
    from ai_edge_litert.interpreter import Interpreter

    result.export_model(str(out), overwrite=True)
    if not any(tensor["dtype"] is np.int8 for tensor in Interpreter(str(out)).get_tensor_details()):
        raise ValueError("the quantizer left the whole model in float")
    return out


RECIPES: dict[str, dict[str, Recipe]] = {
    "openvino": {"NNCF default": nncf_default, "NNCF transformer": nncf_transformer},
    "onnxruntime": {
        "quantize_static": onnxruntime_static,
        "quantize_static per channel": onnxruntime_static_per_channel,
        "quantize_dynamic": onnxruntime_dynamic,
    },
    "tflite": {"AI Edge static": ai_edge_static, "AI Edge dynamic": ai_edge_dynamic},
    "tensorrt": {},
}
