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
EXPORT = "with model.export('folder'), which needs no code, and build that folder"
STEPS_MAX = 128  # recurrent layers with more steps stay a Loop: each step adds about a dozen nodes for each layer
REPLACED = ("Erfc",)  # operators that ONNX lacks, and that the build replaces
# Operators of TensorFlow that tf2onnx does not convert: the start of the name -> the cause with the next step.
UNSUPPORTED = {
    "StatefulPartitionedCall": "it is a function that XLA compiles, as Keras does for a Conv2D with groups: save the model "
    "with model.save('model.keras'), and build that file",
    "StatelessRandom": "it draws random numbers, as layers that augment images do in a SavedModel: save the model with "
    "model.save('model.keras'), and build that file, or remove these layers",
    "Random": "it draws random numbers: remove its layer",
    "LookupTable": "it belongs to an IntegerLookup or StringLookup layer: save the model without this layer, so that its "
    "input is the index that the layer answers",
    "RFFT": "compute the spectrum before the model (docs/signals.md), or use a STFTSpectrogram layer",
    "ScaleAndTranslate": "it resizes with antialias=True or with Lanczos: use bilinear interpolation without antialias",
    "ResizeArea": "tf2onnx would pick pixels instead of their mean: use bilinear interpolation, or AveragePooling2D",
}
NEXT_STEP = "remove its layer from the model and compute it before, or replace it by other layers"
TEXTS = (
    "takes text, which the engines of devices do not read. Save the model without its TextVectorization or "
    "StringLookup layer, so that its input is numbers; docs/text.md shows how a device makes tokens from text"
)


class Advised(Exception):
    """The model or the command must change. The text gives the next step."""


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
        # An input without axes has no length to give: --input gives its value to the build.
        shapes = {name: given.get(name, spec.shape) if spec.shape.rank != 0 else spec.shape for name, spec in inputs}
        signature = [tensorflow.TensorSpec(shapes[name], spec.dtype, name=name) for name, spec in inputs]
        proto = _converted(tensorflow, tf2onnx, function, signature)
        has_loop = any(node.op_type == "Loop" for node in proto.graph.node)
        if has_loop and load is _of_keras and _unroll(kept, signature):
            function, outputs = _function_of(tensorflow, kept)
            proto = _converted(tensorflow, tf2onnx, function, signature)
        _name_outputs(proto.graph, distinct(outputs))
    except Advised as error:
        print(error, file=sys.stderr)
        return 5
    except Exception as error:  # noqa: BLE001 - two frameworks raise any class
        known, lengths = known_reason(error), _lengths_advice(signature)
        print((known or short(error)) + lengths, file=sys.stderr)
        return 5 if known or lengths else 3
    del kept
    with open(request["out"], "wb") as file:
        file.write(proto.SerializeToString(deterministic=True))
    return 0


def _converted(tensorflow: Any, tf2onnx: Any, function: Any, signature: list[Any]) -> Any:
    """Return the ONNX model of `function`. Raises Advised, and any class of the frameworks."""
    # tf2onnx uses the same signature, so it converts this trace.
    graph = function.get_concrete_function(*signature).graph
    check_converted(_nodes_of_tensorflow(graph.as_graph_def()), ("ResizeArea",))
    proto, _ = tf2onnx.convert.from_function(function, input_signature=signature, opset=OPSET)
    check_converted(unknown_nodes(proto.graph))
    values = [(outer, inner) for outer, inner in graph.captures if outer.dtype != tensorflow.resource]
    keep_constants(proto.graph, {inner.name: outer for outer, inner in values})
    return proto


def _unroll(model: Any, signature: list[Any]) -> bool:
    """Set the recurrent layers of a Keras model to unroll their steps; return False if one is too long.

    tf2onnx makes a Loop of most recurrent layers, such as a GRU. TFLite has no Loop, and the layers in a Loop stay in
    float.
    """
    import keras

    layers = [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.RNN)]
    given = max((spec.shape[1] or 0 for spec in signature if len(spec.shape) > 1), default=0)
    steps = [(layer.get_build_config() or {}).get("input_shape", (None, None))[1] or given for layer in layers]
    if not all(0 < count <= STEPS_MAX for count in steps):
        return False
    for layer in layers:
        layer.unroll = True
    return bool(layers)


def known_reason(error: Exception) -> str:
    """Return the reason and the next step for an own class and for a file of Keras 2, else ""."""
    text = " ".join(str(error).split())
    if re.search(r"Could not locate class '.*Full object config: \{'module': '(?:tf_)?keras\.src\.engine\.", text):
        return f"Keras 2 wrote the file, and Keras 3 cannot load it. {LOAD_WITH_KERAS_2}"
    if own := re.search(r"Could not locate (?:class|function) '(?:[^'>]{1,80}>)?([^'>]{1,80})'", text):
        return f"{own[1]} is not a part of Keras, and its code is not in the file. Save the model {EXPORT}"
    if "is a Python lambda" in text:
        return (
            "the file holds Python code (a Lambda layer), which is not run. Load it in the program that made it, and save the "
            f"model {EXPORT}"
        )
    if "incompatible with expected resource" in text:
        return (
            "the model changes its variables when it runs, so an answer depends on earlier requests. Save it with the state "
            "as an input and an output (docs/streams.md)"
        )
    if old := re.search(r"Unrecognized keyword arguments passed to (\w{1,80}): (\{[^{}]{1,80}\})", text):
        return f"Keras 3 does not know {old[2]} of the layer {old[1]}, which Keras 2 wrote. {LOAD_WITH_KERAS_2}"
    return ""


def short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[-300:]}"


def _lengths_advice(signature: list[Any]) -> str:
    """Return advice if an input leaves an axis other than the batch open; otherwise an empty text."""
    for spec in signature:
        axes = [] if spec.shape.rank is None else list(spec.shape)
        if None in axes[1:]:
            lengths = ",".join("1" if i == 0 else str(n or "LENGTH") for i, n in enumerate(axes))
            return f"; input {spec.name!r} leaves axes open: give the lengths of these axes with --input {spec.name}={lengths}"
    return ""


def _of_keras(tensorflow: Any, path: str) -> tuple[Any, Any, list[tuple[str, Any]], list[str]]:
    import keras

    try:
        model = keras.models.load_model(path, compile=False, safe_mode=True)
    except Exception as error:  # Keras raises any class
        advice = f"Load it as before, and save the model {EXPORT}"
        raise Advised(known_reason(error) or f"Keras cannot load the file ({short(error)}). {advice}") from error
    if names := [layer.name for layer in model._flatten_layers() if getattr(layer, "stateful", False)]:
        raise Advised(
            f"{', '.join(names)} keeps its state between calls (stateful=True), which ONNX cannot express. If each request "
            "is a whole sequence, build the model with stateful=False and the same weights; otherwise with the state as "
            "inputs and outputs (docs/streams.md)"
        )
    inputs = [(tensor.name, tensorflow.TensorSpec(tensor.shape, tensor.dtype)) for tensor in model.inputs]
    function, names = _function_of(tensorflow, model)
    return model, function, inputs, names


def _function_of(tensorflow: Any, model: Any) -> tuple[Any, list[str]]:
    """Return the function of a Keras model and its outputs' names, which are complete once it is traced."""
    names = list(getattr(model, "output_names", None) or [model.layers[-1].name])  # a Sequential lacks these names

    def call(*tensors: Any) -> Any:
        answers = model(list(tensors) if len(tensors) > 1 else tensors[0], training=False)
        if isinstance(answers, dict):  # nest.flatten sorts by the keys; output_names has another order
            names[:] = sorted(answers)
        return tensorflow.nest.flatten(answers)

    return _without_xla(tensorflow, call), names


def _without_xla(tensorflow: Any, call: Any) -> Any:
    """Return `call` as a function of TensorFlow, in which Keras compiles nothing with XLA."""
    function = tensorflow.function

    def plain(*args: Any, **options: Any) -> Any:
        return function(*args, **{**options, "jit_compile": None})

    tensorflow.function = plain
    return function(call)


def _of_saved_model(tensorflow: Any, path: str) -> tuple[Any, Any, list[tuple[str, Any]], list[str]]:
    loaded = tensorflow.saved_model.load(path)
    found = list(loaded.signatures)
    if SIGNATURE not in found and len(found) != 1:
        advice = (
            "Save it again with tensorflow.saved_model.save(module, 'folder', signatures=FUNCTION), where FUNCTION is a "
            "tensorflow.function with an input_signature"
        )
        if found:
            advice = (
                f"Load it with module = tensorflow.saved_model.load({path!r}), save one of them with tensorflow.saved_model."
                f"save(module, 'folder', signatures=module.signatures[{found[0]!r}]), and build that folder"
            )
        raise Advised(f"the SavedModel has no signature {SIGNATURE!r} (found: {', '.join(found) or 'none'}). {advice}")
    signature = loaded.signatures[SIGNATURE if SIGNATURE in found else found[0]]
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


def _nodes_of_tensorflow(definition: Any) -> list[tuple[str, str]]:
    """Return the operator and the name of each node in a graph of TensorFlow."""
    nodes = [*definition.node, *(node for function in definition.library.function for node in function.node_def)]
    return [(node.op, node.name) for node in nodes]


def unknown_nodes(graph: Any) -> list[tuple[str, str]]:
    """Return the operator and the name of each node that tf2onnx did not convert."""
    from onnx import defs

    found = []
    for node in graph.node:
        if not node.domain and not defs.has(node.op_type) and node.op_type not in REPLACED:
            found.append((node.op_type, node.name))
        found += [one for attribute in node.attribute if attribute.HasField("g") for one in unknown_nodes(attribute.g)]
    return found


def check_converted(nodes: list[tuple[str, str]], wanted: tuple[str, ...] = ()) -> None:
    """Raise Advised if there is a node, or a node with one of the `wanted` operators."""
    for operator, name in nodes:
        if not wanted or operator in wanted:
            advice = next((text for start, text in UNSUPPORTED.items() if operator.startswith(start)), NEXT_STEP)
            raise Advised(f"tf2onnx cannot convert the operator {operator} of TensorFlow ({name}): {advice}")


def distinct(names: list[str]) -> list[str]:
    """Return the names, with a number behind each name that occurs twice."""
    taken, found = set(names), list[str]()
    for name in names:
        own, number = name, 0
        while names.count(name) > 1 and own in taken:
            own, number = f"{name}_{number}", number + 1
        taken.add(own)
        found.append(own)
    return found


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
