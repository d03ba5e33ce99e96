"""ONNX Runtime artifacts: Q/DQ in U8S8 (unsigned activations) for x86, in S8S8 (signed) for ARM.

The INT8 instructions of x86 multiply unsigned by signed numbers: on x86, U8S8 was 3.2 times as fast as FP32, and S8S8
was 1.4 times as fast. The INT8 instructions of ARM multiply signed by signed numbers. A model that is already quantized
does not change. FP16 halves the file; processors without FP16 arithmetic compute such a model in FP32.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edgert.errors import BuildFailed
from edgert_deploy.devices.profiles import DeviceProfile
from edgert_deploy.packager.builders import Artifact, Builder, BuildSpec, artifact_of, keeps_quantization, qdq
from edgert_deploy.packager.builders.artifact_layers import ArtifactLayer
from edgert_deploy.packager.builders.onnx_layers import onnx_layers
from edgert_deploy.packager.processes.sandbox import Progress
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.onnx_graph.nodes import tensors
from edgert_deploy.packager.sources.onnx_graph.rewrites.single_precision import has_double
from edgert_deploy.packager.sources.source_model import SourceModel, float_proto

ARM_MACHINES = frozenset({"aarch64", "arm64", "armv6l", "armv7l", "armv8l"})


class ONNXRuntimeBuilder(Builder):
    engine = "onnxruntime"
    judged_by = "onnxruntime"
    libraries = qdq.LIBRARIES
    all_recipes = (*qdq.RECIPES, qdq.DYNAMIC_RANGE)
    accepts_any_onnx = True
    accepts_dynamic_ranges = True
    ways = (
        (1, {}),
        (0, {}),
        (1, {"graph_optimization_level": "ORT_ENABLE_BASIC"}),
        (1, {"graph_optimization_level": "ORT_DISABLE_ALL"}),  # Q/DQ is not fused, so the layers compute in float
    )

    def build(
        self, spec: BuildSpec, source: SourceModel, calibration: CalibrationSet, out_dir: Path, progress: Progress
    ) -> Artifact:
        if keeps_quantization(spec, source):
            progress("onnxruntime: keeping the model's own quantization")
            proto = source.proto
        elif spec.precision == "int8":
            recipe = qdq.recipe_variant(self.recipe(source, spec.profile), spec.recipe)
            progress(f"onnxruntime: quantizing ({recipe.activations} activations)")
            proto = qdq.quantize(source, calibration, recipe, spec.float_layers)
        else:
            proto = float_proto(source)
            if spec.precision == "fp16" and has_double(proto) and not _has_single(proto):
                raise BuildFailed(
                    "the model computes in FP64, which cannot be converted to FP16: build it with --precision fp32"
                )
            proto = qdq.to_fp16(proto, source) if spec.precision == "fp16" else proto
        qdq.write_proto(proto, out_dir / "model.onnx")
        return artifact_of(self, spec, source, out_dir / "model.onnx", qdq.tool_versions())

    def recipe(self, source: SourceModel, profile: DeviceProfile) -> qdq.Recipe:
        ops = qdq.HEAVY_OPS if qdq.is_transformer(source.proto) else None
        if _is_for_arm(profile):
            return qdq.Recipe("int8", ops, {"ActivationSymmetric": True, "WeightSymmetric": True})
        return qdq.Recipe("uint8", ops)

    def recipes(self, source: SourceModel, profile: DeviceProfile) -> tuple[str, ...]:
        first = (qdq.DYNAMIC_RANGE,) if qdq.is_transformer(source.proto) else ()
        return (*first, *qdq.recipes(source.proto))

    def variant(self, spec: BuildSpec) -> str:
        return "-arm" if spec.precision == "int8" and _is_for_arm(spec.profile) else ""

    def layers(self, path: Path) -> Iterator[ArtifactLayer]:
        return onnx_layers(path, needs_quantized_result=True)


def _has_single(proto: Any) -> bool:
    """Whether a model has weights in FP32."""
    return any(tensor.data_type == tensor.FLOAT for tensor in tensors(proto))


def _is_for_arm(profile: DeviceProfile) -> bool:
    """Whether all processors of the profile are ARM. A profile for any processor counts as x86."""
    return bool(profile.machines) and set(profile.machines) <= ARM_MACHINES
