"""Replaces the calls of a model's own functions by the bodies of these functions.

OpenVINO does not support functions, and no builder reads the nodes inside functions. A function may have another opset
than the model. ONNX Runtime would compute such a function in the model's opset, which may give other answers, so ONNX
converts it.
"""

from __future__ import annotations

from typing import Any

from edgert.errors import SourceInvalid
from edgert_deploy.packager.sources.onnx_graph.structure import opset_of


def inline_functions(proto: Any) -> bool:
    """Inline the model's own functions. Return False if there are none, or if ONNX cannot inline them.

    Raises SourceInvalid if ONNX cannot convert a function of another opset to the opset of the model.
    """
    if not proto.functions:
        return False
    from onnx import inliner

    try:
        inlined = inliner.inline_local_functions(proto, convert_version=True)
    except MemoryError:
        raise
    except Exception as error:  # native code raises any class
        opset = opset_of(proto)
        if other := next((each for each in proto.functions if opset_of(each) not in (0, opset)), None):
            raise SourceInvalid(
                f"function {other.name[:80]!r} has opset {opset_of(other)}, and the model has opset {opset}; ONNX cannot "
                "convert the function: export the model and its functions with the same opset"
            ) from error
        return False  # the checker then names the fault
    proto.CopyFrom(inlined)
    return True
