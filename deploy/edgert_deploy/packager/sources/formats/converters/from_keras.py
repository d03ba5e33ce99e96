"""Convert a Keras model (.keras, .h5) or a SavedModel folder to ONNX with tf2onnx (see __init__).

Keras 3 loads models in safe mode: it refuses a file that contains Python code (a Lambda layer).
"""

from __future__ import annotations

import json
import os
import re
import sys
from typing import Any

OPSET = 17
SIGNATURE = "serving_default"
LOAD_WITH_KERAS_2 = (
    "Load the file with Keras 2 (pip install tf_keras, in a separate environment), save it with model.export('folder'), "
    "and build that folder"
)
TEXTS = (
    "takes text, which the engines of devices do not read. Save the model without its TextVectorization or "
    "StringLookup layer, so that its input is numbers; docs/text.md shows how a device makes tokens from text"
)


def main() -> int:
    request = json.loads(sys.argv[1])
    # tf2onnx needs TensorFlow, whichever backend trained the model.
    os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="-1", KERAS_BACKEND="tensorflow")
    try:
        import tensorflow
        import tf2onnx
    except ImportError as error:
        print(f"missing: {error.name or error}", file=sys.stderr)
        return 4
    signature: list[Any] = []
    try:
        load = _of_saved_model if os.path.isdir(request["model"]) else _of_keras
        # `kept` holds the variables, because a TensorFlow function does not hold them.
        kept, function, inputs, outputs = load(tensorflow, request["model"])
        if texts := [name for name, spec in inputs if spec.dtype == tensorflow.string]:
            print(f"{', '.join(texts)} {TEXTS}", file=sys.stderr)
            return 5
        given = {name: [None, *one["shape"][1:]] for name, one in request["inputs"].items()}
        signature = [tensorflow.TensorSpec(given.get(name, spec.shape), spec.dtype, name=name) for name, spec in inputs]
        proto, _ = tf2onnx.convert.from_function(function, input_signature=signature, opset=OPSET)
        # tf2onnx used the same signature, so this call returns the function that tf2onnx traced.
        captures = function.get_concrete_function(*signature).graph.captures
        values = [(outer, inner) for outer, inner in captures if outer.dtype != tensorflow.resource]
        keep_constants(proto.graph, {inner.name: outer for outer, inner in values})
        _name_outputs(proto.graph, outputs)
    except Exception as error:  # noqa: BLE001 - two frameworks raise any class
        known, lengths = known_reason(error), _lengths_advice(signature)
        print((known or short(error)) + lengths, file=sys.stderr)
        return 5 if known or lengths else 3
    del kept
    with open(request["out"], "wb") as file:
        file.write(proto.SerializeToString(deterministic=True))
    return 0


def known_reason(error: Exception) -> str:
    """Return the reason and the next step for an own class and for a file of Keras 2, else ""."""
    text = " ".join(str(error).split())
    if re.search(r"Could not locate class '.*Full object config: \{'module': '(?:tf_)?keras\.src\.engine\.", text):
        return f"Keras 2 wrote the file, and Keras 3 cannot load it. {LOAD_WITH_KERAS_2}"
    if own := re.search(r"Could not locate (?:class|function) '(?:[^'>]{1,80}>)?([^'>]{1,80})'", text):
        return (
            f"{own[1]} is not a part of Keras, and its code is not in the file. Save the model with model.export('folder'), "
            "which needs no code, and build that folder"
        )
    if old := re.search(r"Unrecognized keyword arguments passed to (\w{1,80}): (\{[^{}]{1,80}\})", text):
        return f"Keras 3 does not know {old[2]} of the layer {old[1]}, which Keras 2 wrote. {LOAD_WITH_KERAS_2}"
    return ""


def short(error: Exception) -> str:
    """Return the error on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[-300:]}"


def _lengths_advice(signature: list[Any]) -> str:
    """Return advice if an input leaves an axis other than the batch open; otherwise an empty text."""
    for spec in signature:
        axes = list(spec.shape)
        if None in axes[1:]:
            lengths = ",".join("1" if i == 0 else str(n or "LENGTH") for i, n in enumerate(axes))
            return f"; input {spec.name!r} leaves axes open: give the lengths of these axes with --input {spec.name}={lengths}"
    return ""


def _of_keras(tensorflow: Any, path: str) -> tuple[Any, Any, list[tuple[str, Any]], list[str]]:
    import keras

    model = keras.models.load_model(path, compile=False, safe_mode=True)
    inputs = [(tensor.name, tensorflow.TensorSpec(tensor.shape, tensor.dtype)) for tensor in model.inputs]

    def call(*tensors: Any) -> Any:
        return tensorflow.nest.flatten(model(list(tensors) if len(tensors) > 1 else tensors[0], training=False))

    names = getattr(model, "output_names", None) or [model.layers[-1].name]  # a Sequential lacks these names
    return model, tensorflow.function(call), inputs, list(names)


def _of_saved_model(tensorflow: Any, path: str) -> tuple[Any, Any, list[tuple[str, Any]], list[str]]:
    loaded = tensorflow.saved_model.load(path)
    if SIGNATURE not in loaded.signatures:
        raise ValueError(
            f"the SavedModel has no signature {SIGNATURE!r} (found: {', '.join(loaded.signatures) or 'none'})"
        )
    signature = loaded.signatures[SIGNATURE]
    inputs = sorted(signature.structured_input_signature[1].items())
    outputs = sorted(signature.structured_outputs)

    def call(*tensors: Any) -> Any:
        answers = signature(**{name: tensor for (name, _), tensor in zip(inputs, tensors, strict=True)})
        return [answers[name] for name in outputs]

    return loaded, tensorflow.function(call), inputs, outputs


def keep_constants(graph: Any, captured: dict[str, Any]) -> None:
    """Make constants of the inputs that TensorFlow `captured`, such as the mean of a Normalization layer."""
    from onnx import numpy_helper

    for value in list(graph.input):
        if value.name in captured:
            graph.initializer.append(numpy_helper.from_array(captured[value.name].numpy(), value.name))
            graph.input.remove(value)


def _name_outputs(graph: Any, names: list[str]) -> None:
    """Give the graph's outputs the model's `names`, because tf2onnx names them Identity:0 and so on."""
    taken = {name for node in graph.node for name in (*node.input, *node.output)} | {
        value.name for value in graph.input
    }
    for value, name in zip(graph.output, names, strict=True):
        if name in taken:
            continue
        for node in graph.node:
            for names_of_node in (node.input, node.output):
                for i, other in enumerate(names_of_node):
                    if other == value.name:
                        names_of_node[i] = name
        value.name = name


if __name__ == "__main__":
    sys.exit(main())
