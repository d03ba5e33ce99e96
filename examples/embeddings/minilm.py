"""Write all-MiniLM-L6-v2 as ONNX from its weights: six layers of BERT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

HIDDEN, HEADS, LAYERS = 384, 12, 6
HEAD = HIDDEN // HEADS


def write_minilm(weights: Path, path: Path, tokens: int | None = None) -> None:
    """Write the model for `input_ids` and `attention_mask`, both int64 `[N, tokens]`.

    Its output is `last_hidden_state` `[N, tokens, 384]`. With a fixed number of `tokens` it is the mean of these
    vectors over the mask, `embedding` `[N, 384]`.
    """
    from safetensors.numpy import load_file

    graph = _Graph(load_file(weights))
    x = graph.embeddings()
    bias = graph.mask_bias()
    for layer in range(LAYERS):
        x = graph.layer(f"encoder.layer.{layer}", x, bias)
    length, shape, name = tokens or "tokens", ["batch", "tokens", HIDDEN], "last_hidden_state"
    if tokens:
        x, shape, name = graph.pooled(x), ["batch", HIDDEN], "embedding"
    graph.nodes.append(helper.make_node("Identity", [x], [name]))
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", length])
        for name in ("input_ids", "attention_mask")
    ]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)]
    proto = helper.make_graph(graph.nodes, "minilm", inputs, outputs, graph.constants)
    onnx.save(helper.make_model(proto, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


class _Graph:
    def __init__(self, weights: dict[str, NDArray[Any]]) -> None:
        self.weights, self.nodes, self.constants, self._count = weights, list[Any](), list[Any](), 0

    def embeddings(self) -> str:
        words = self.node("Gather", self.weight("embeddings.word_embeddings.weight"), "input_ids")
        kind = self.weights["embeddings.token_type_embeddings.weight"][0]
        all_places = self.constant((self.weights["embeddings.position_embeddings.weight"] + kind)[None])
        length = self.node("Shape", "input_ids", start=1, end=2)
        zero, axis = (self.constant(np.array([i], np.int64)) for i in (0, 1))
        places = self.node("Slice", all_places, zero, length, axis)
        return self.norm("embeddings.LayerNorm", self.node("Add", words, places))

    def mask_bias(self) -> str:
        """Return 0 where there is a token, and -10,000 where there is none: `[N, 1, 1, tokens]`."""
        mask = self.node(
            "Unsqueeze",
            self.node("Cast", "attention_mask", to=TensorProto.FLOAT),
            self.constant(np.array([1, 2], np.int64)),
        )
        return self.node("Mul", self.node("Sub", mask, self.constant(np.float32(1))), self.constant(np.float32(10_000)))

    def layer(self, name: str, x: str, bias: str) -> str:
        query, key, value = (
            self._heads(f"{name}.attention.self.{part}", x, part) for part in ("query", "key", "value")
        )
        scores = self.node("Mul", self.node("MatMul", query, key), self.constant(np.float32(HEAD**-0.5)))
        weights = self.node("Softmax", self.node("Add", scores, bias), axis=-1)
        context = self.node("Transpose", self.node("MatMul", weights, value), perm=[0, 2, 1, 3])
        context = self.node("Reshape", context, self.constant(np.array([0, 0, HIDDEN], np.int64)))
        output = f"{name}.attention.output"
        x = self.norm(f"{output}.LayerNorm", self.node("Add", self.dense(f"{output}.dense", context), x))
        wide = self.dense(f"{name}.intermediate.dense", x)
        half = self.node("Erf", self.node("Mul", wide, self.constant(np.float32(2**-0.5))))
        gelu = self.node(
            "Mul",
            self.node("Mul", wide, self.node("Add", half, self.constant(np.float32(1)))),
            self.constant(np.float32(0.5)),
        )
        return self.norm(f"{name}.output.LayerNorm", self.node("Add", self.dense(f"{name}.output.dense", gelu), x))

    def pooled(self, x: str) -> str:
        mask = self.node(
            "Unsqueeze",
            self.node("Cast", "attention_mask", to=TensorProto.FLOAT),
            self.constant(np.array([2], np.int64)),
        )
        total = self.node("ReduceSum", self.node("Mul", x, mask), self.constant(np.array([1], np.int64)), keepdims=0)
        count = self.node("ReduceSum", mask, self.constant(np.array([1], np.int64)), keepdims=0)
        return self.node("Div", total, count)

    def _heads(self, name: str, x: str, part: str) -> str:
        split = self.node("Reshape", self.dense(name, x), self.constant(np.array([0, 0, HEADS, HEAD], np.int64)))
        return self.node("Transpose", split, perm=[0, 2, 3, 1] if part == "key" else [0, 2, 1, 3])

    def dense(self, name: str, x: str) -> str:
        product = self.node("MatMul", x, self.constant(np.ascontiguousarray(self.weights[f"{name}.weight"].T)))
        return self.node("Add", product, self.weight(f"{name}.bias"))

    def norm(self, name: str, x: str) -> str:
        return self.node(
            "LayerNormalization", x, self.weight(f"{name}.weight"), self.weight(f"{name}.bias"), epsilon=1e-12
        )

    def weight(self, name: str) -> str:
        return self.constant(self.weights[name])

    def constant(self, array: Any) -> str:
        self._count += 1
        name = f"c{self._count}"
        self.constants.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def node(self, op: str, *inputs: str, **attributes: Any) -> str:
        self._count += 1
        name = f"v{self._count}"
        self.nodes.append(helper.make_node(op, list(inputs), [name], name=f"{op}_{self._count}", **attributes))
        return name
