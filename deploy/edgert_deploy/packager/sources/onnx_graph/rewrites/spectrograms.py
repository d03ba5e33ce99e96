"""Replaces STFT (exported from torch.stft) by a convolution with the waves of a Fourier transform.

TFLite and TensorRT have no STFT, and OpenVINO refuses an STFT with an open batch. In a model, the window and the step
are constants. So each number of the result is a weighted sum over a frame, which a Conv can compute.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from edgert_deploy.packager.sources.onnx_graph.nodes import Array, Constants, attribute_of, nodes_of, refill
from edgert_deploy.packager.sources.onnx_graph.structure import structure_of

FRAME_LENGTH_MAX = 4096  # the size of the weights grows with the square of the frame's length: 67 MB at this limit


def state_one_sided(proto: Any) -> bool:
    """Set the attribute `onesided` to its default in each STFT that lacks it; return whether any did.

    The default is 1. But ONNX's shape inference treats a missing `onesided` as 0, and then reports that the next layer
    does not fit.
    """
    from onnx import helper

    stfts = (node for node in nodes_of(proto.graph) if node.op_type == "STFT")
    bare = [node for node in stfts if attribute_of(node, "onesided") is None]
    for node in bare:
        node.attribute.append(helper.make_attribute("onesided", 1))
    return bool(bare)


def convolve_spectrograms(proto: Any) -> bool:
    """Replace each STFT of a real FP32 signal if its window and step are constants; return if any changed."""
    if not any(node.op_type == "STFT" for node in proto.graph.node):
        return False
    constants, real = Constants(proto), _real_signals(proto)
    nodes: list[Any] = []
    for node in proto.graph.node:
        waves = _waves(node, constants) if node.op_type == "STFT" and node.input[0] in real else None
        nodes += [node] if waves is None else _convolved(proto.graph, node, waves, constants)
    found = len(nodes) > len(proto.graph.node)
    refill(proto.graph.node, nodes)
    return found


def _real_signals(proto: Any) -> set[str]:
    """Return the names of all FP32 values [batch, time, 1], or [batch, time], which ONNX Runtime accepts."""
    from onnx import TensorProto, shape_inference

    graph = shape_inference.infer_shapes(structure_of(proto)).graph
    types = {value.name: value.type.tensor_type for value in (*graph.input, *graph.value_info)}
    shapes = {name: each.shape.dim for name, each in types.items() if each.elem_type == TensorProto.FLOAT}
    return {name for name, dims in shapes.items() if len(dims) == 2 or (len(dims) == 3 and dims[2].dim_value == 1)}


def _waves(node: Any, constants: Constants) -> Array | None:
    """Return the weights [2 x bins, 1, frame], cosines before sines; None if they are not constants."""
    step, window, length = ([*node.input, "", ""])[1:4]
    if step not in constants or (window or length) == "" or any(x and x not in constants for x in (window, length)):
        return None
    shape = constants.get(window) if window else np.ones(int(_number(constants, length)))
    assert shape is not None
    n = len(shape)
    if n > FRAME_LENGTH_MAX or (length and _number(constants, length) != n):
        return None
    one_sided = attribute_of(node, "onesided", 1)
    turns = np.outer(np.arange(n // 2 + 1 if one_sided else n), np.arange(n)) % n * (2 * np.pi / n)
    waves: Array = np.concatenate([np.cos(turns), -np.sin(turns)]) * shape
    return waves[:, None].astype(np.float32)


def _convolved(graph: Any, node: Any, waves: Array, constants: Constants) -> list[Any]:
    """Return the nodes that replace `node`: [batch, time] or [batch, time, 1] -> [batch, frames, bins, 2]."""
    from onnx import helper, numpy_helper

    name = str(node.output[0])
    at = [f"{name}/edgert_{part}" for part in ("waves", "shape", "signal", "sums", "parts", "row")]
    shapes = {at[1]: [0, 2, len(waves) // 2, -1], at[5]: [0, 1, -1]}
    graph.initializer.append(numpy_helper.from_array(waves, at[0]))
    graph.initializer.extend(numpy_helper.from_array(np.array(each, np.int64), key) for key, each in shapes.items())
    step = _number(constants, node.input[1])
    return [
        helper.make_node("Reshape", [node.input[0], at[5]], [at[2]], at[2]),
        helper.make_node("Conv", [at[2], at[0]], [at[3]], at[3], strides=[step], kernel_shape=[waves.shape[2]]),
        helper.make_node("Reshape", [at[3], at[1]], [at[4]], at[4]),
        helper.make_node("Transpose", [at[4]], [name], name, perm=[0, 3, 2, 1]),
    ]


def _number(constants: Constants, name: str) -> int:
    value = constants.get(name)
    assert value is not None
    return int(value.item())
