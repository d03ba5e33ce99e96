"""The table of ONNX operators: name -> Op. Each module defines a family of operators."""

from __future__ import annotations

from importlib import import_module

from edgert_deploy.packager.tflite_lowering.op import Op

FAMILIES = (
    "activation arithmetic convolution einsum elementwise grid indexing matrix movement normalization ordering padding "
    "pooling recurrent reduction resize transposed"
)
OPS: dict[str, Op] = {
    name: op for family in FAMILIES.split() for name, op in import_module(f"{__name__}.{family}").OPS.items()
}
