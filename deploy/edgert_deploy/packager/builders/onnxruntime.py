"""ONNX Runtime artifacts: U8S8 Q/DQ for x86, S8S8 for ARM.

x86's INT8 instructions multiply unsigned by signed: U8S8 ran 3.2x faster than FP32 there, S8S8 1.4x.
ARM's multiply signed by signed. A model that is quantised already stays as it is. FP16 halves the file; processors without FP16 arithmetic compute it in FP32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from edgert_deploy.devices.profiles import DeviceProfile
from edgert_deploy.packager.builders import Artifact, Precision
from edgert_deploy.packager.builders.layers import Layer
from edgert_deploy.packager.builders.qdq import Recipe, is_transformer, quantize, to_fp16, tool_versions, write_proto
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.source_model import SourceModel, float_proto

ARM_MACHINES = frozenset({"aarch64", "arm64", "armv6l", "armv7l", "armv8l"})


class ONNXRuntimeBuilder:
    engine = "onnxruntime"

    def build(
        self,
        source: SourceModel,
        calibration: CalibrationSet,
        profile: DeviceProfile,
        precision: Precision,
        out_dir: Path,
        progress: Callable[[str], None],
        float_layers: Sequence[Layer] = (),
    ) -> Artifact:
        path = out_dir / "model.onnx"
        keeps = source.quantised and precision == "int8"
        if keeps:
            progress("onnxruntime: keeping the model's own quantisation")
            write_proto(source.proto, path)
        elif precision == "fp32":
            write_proto(float_proto(source), path)
        elif precision == "fp16":
            write_proto(to_fp16(float_proto(source), source), path)
        else:
            recipe = recipe_for(source, profile)
            progress(f"onnxruntime: quantising ({recipe.activations} activations)")
            write_proto(quantize(source, calibration, recipe, float_layers), path)
        names = tuple(layer.name for layer in float_layers)
        return Artifact(self.engine, precision, path, (), self.engine, tool_versions(), names, keeps)


def recipe_for(source: SourceModel, profile: DeviceProfile) -> Recipe:
    ops = ("MatMul", "Gemm") if is_transformer(source.proto) else None
    if is_for_arm(profile):
        return Recipe("int8", ops, {"ActivationSymmetric": True, "WeightSymmetric": True})
    return Recipe("uint8", ops)


def is_for_arm(profile: DeviceProfile) -> bool:
    """Whether every processor of the profile is an ARM; a profile for any processor counts as x86."""
    return bool(profile.machines) and set(profile.machines) <= ARM_MACHINES
