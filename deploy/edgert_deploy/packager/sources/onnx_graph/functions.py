"""Replaces the calls of a model's own functions by the bodies of these functions.

OpenVINO reads no functions, and no builder reads the nodes inside functions.
"""

from __future__ import annotations

from typing import Any


def inline_functions(proto: Any) -> bool:
    """Inline the model's own functions. Return False if there are none, or if ONNX failed."""
    if not proto.functions:
        return False
    from onnx import inliner

    try:
        inlined = inliner.inline_local_functions(proto)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - native code raises any class; the checker then names the fault
        return False
    proto.CopyFrom(inlined)
    return True
