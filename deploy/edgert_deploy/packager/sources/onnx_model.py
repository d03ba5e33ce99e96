"""ONNX models: reads a file, checks it, translates it for all runtimes, and runs it once.

`examine` runs in a child process (probe.py): protobuf, ONNX's checker and ONNX Runtime are native code. A file that
crashes them or exhausts the machine must not end the command.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from edgert.bundle.buckets import Buckets
from edgert.engines.onnxruntime import sdk
from edgert.errors import SourceInvalid
from edgert.printable import counted
from edgert.tensors import TensorSpec
from edgert.typed_json import from_json, to_json
from edgert_deploy.packager.processes.sandbox import Answer, Progress
from edgert_deploy.packager.sources.batch_check import check_samples_are_independent
from edgert_deploy.packager.sources.formats.external_data import embed, files_of
from edgert_deploy.packager.sources.onnx_graph.axes import (
    add_batches,
    drop_unread_inputs,
    drop_weight_inputs,
    fix_batch,
    fixed_batches,
    move_input_batches,
    move_output_batches,
    set_lengths,
)
from edgert_deploy.packager.sources.onnx_graph.branches import (
    drop_empty_outputs,
    flatten_conditions,
    inline_known_branches,
)
from edgert_deploy.packager.sources.onnx_graph.bucket_axis import WantedBuckets, cut_outputs, find_axis, probed_lengths
from edgert_deploy.packager.sources.onnx_graph.classical import is_classical, unwrap_maps
from edgert_deploy.packager.sources.onnx_graph.nodes import (
    attribute_of,
    copy_of,
    drop_repeated_names,
    nodes_of,
    tensors,
)
from edgert_deploy.packager.sources.onnx_graph.opsets import (
    IR_MAX,
    OPSET_MAX,
    OPSET_MIN,
    at_opset,
    rewrite_misread_dfts,
    wanted_opsets,
)
from edgert_deploy.packager.sources.onnx_graph.quantization.dynamic_quantization import is_dynamic
from edgert_deploy.packager.sources.onnx_graph.rewrites.erfc import replace_erfc
from edgert_deploy.packager.sources.onnx_graph.rewrites.functions import inline_functions
from edgert_deploy.packager.sources.onnx_graph.rewrites.infinite_bounds import drop_infinite_bounds
from edgert_deploy.packager.sources.onnx_graph.rewrites.negative_pads import state_output_padding
from edgert_deploy.packager.sources.onnx_graph.rewrites.resize_matrices import multiply_resizes
from edgert_deploy.packager.sources.onnx_graph.rewrites.resize_scales import round_scales_up
from edgert_deploy.packager.sources.onnx_graph.rewrites.single_precision import has_double, narrow_double, widen_half
from edgert_deploy.packager.sources.onnx_graph.rewrites.sparse_weights import make_dense
from edgert_deploy.packager.sources.onnx_graph.rewrites.spectrograms import convolve_spectrograms, state_one_sided
from edgert_deploy.packager.sources.onnx_graph.rewrites.standardized_weights import standardize_weights
from edgert_deploy.packager.sources.onnx_graph.rewrites.whole_lookups import reshape_whole_lookups
from edgert_deploy.packager.sources.onnx_graph.rewrites.zero_pads import keep_zero_pads
from edgert_deploy.packager.sources.onnx_graph.structure import forget_inner_shapes, opset_of, sort_nodes, structure_of
from edgert_deploy.packager.sources.random_check import check_answers_repeat
from edgert_deploy.packager.sources.tensor_specs import OneSampleOnly, check_run_size, input_specs, output_spec

NODES_MAX = 200_000
_OPSET_TOO_NEW = re.compile(r"Opset (\d+) is under development.* is till opset (\d+)", re.DOTALL)
_SHAPES_DIFFER = "Inferred shape and existing shape differ"
# The checker's complaints about newer operators and about outputs without a shape. They do not count if ONNX Runtime
# accepts the model.
_LEFT_TO_THE_RUNTIME = ("No Op registered", "opset", "Field 'shape' of 'type' is required")


def examine(request: dict[str, Any], data: bytes, progress: Progress) -> Answer:
    """Return the model's contract, and the translated model (empty if unchanged). Raises SourceInvalid."""
    replaced: list[str] = []
    try:
        try:
            return _examined(request, data, replaced, progress)
        except OneSampleOnly as error:
            replaced.clear()
            return _examined(request, data, replaced, progress, error.message.partition(";")[0])
    except SourceInvalid as error:
        if not replaced:
            raise
        raise SourceInvalid(
            f"{error.message}. Perhaps a layer does not accept the lengths that --input gave: {'; '.join(replaced)}"
        ) from error


def _examined(
    request: dict[str, Any], data: bytes, replaced: list[str], progress: Progress, no_batch: str = ""
) -> Answer:
    """Do the work of `examine`.

    Args:
        request: The fields of a ProbeRequest, as JSON.
        replaced: Gets a remark for each input whose fixed lengths --input replaces.
        no_batch: The reason to fix an open batch to 1, if the model answers only one sample at a time.

    Raises OneSampleOnly if the model answers only one sample at a time and `no_batch` is empty.
    """
    name, translation = str(request["name"]), b""
    proto = parse(name, data)
    is_reordered = sort_nodes(proto)
    changed, remarks, unread = _rewrite(proto, request, replaced, progress)
    changed |= is_reordered
    remarks += _fix_batch_where_needed(proto, no_batch)
    wanted = request.get("buckets")  # the open axis and its sizes; the outputs that have this axis follow below
    buckets = None if wanted is None else find_axis(proto, from_json(WantedBuckets, wanted))
    inputs = input_specs(proto, () if buckets is None else tuple((place.name, place.axis) for place in buckets.inputs))
    inputs, narrowed = _in_single_precision(proto, inputs, buckets)
    remarks += narrowed
    changed |= buckets is not None
    changed |= _strip_notes(proto)
    progress("onnx checked the model")
    structure, forgot = _checked(proto)
    changed |= forgot
    _check_modes(proto)
    check_weights(proto)
    progress("onnx converted the model to another opset, and onnxruntime compared the answers")
    translated = _translated(proto, _at_largest(inputs, buckets))
    latest = translated or proto
    changed |= keep_zero_pads(latest) | rewrite_misread_dfts(latest) | convolve_spectrograms(latest)
    changed |= multiply_resizes(latest)
    if changed or remarks or translated is not None:
        data = translation = latest.SerializeToString(deterministic=True)
    # The runtime needs memory for two copies of the weights, so only the serialized model stays in memory beside them.
    del proto, translated, latest
    progress(f"onnxruntime {sdk().__version__} loaded the model and ran it on one sample")
    session, runs = _run_once_and_twice(data, _at_largest(inputs, buckets))
    check_answers_repeat(structure, lambda: _run(session, _at_largest(inputs, buckets), 1, seed=1))
    shapes = [[_shape_of(value) for value in run] for run in (runs[0], runs[-1])]
    if moved := move_output_batches(structure, *shapes):
        remarks += moved
        proto = parse(name, data)
        move_output_batches(proto, *shapes)
        data = translation = proto.SerializeToString(deterministic=True)
        session, runs = _run_once_and_twice(data, _at_largest(inputs, buckets))
    outputs: Sequence[TensorSpec] = [
        output_spec(value.name, _datatype(runs[0][i]), [_shape_of(run[i]) for run in runs], inputs)
        for i, value in enumerate(session.get_outputs())
    ]
    if inputs[0].shape[0] == -1:
        check_samples_are_independent(lambda feed: list(session.run(None, feed)), _at_largest(inputs, buckets), outputs)
    if buckets is not None:
        outputs, cuts = cut_outputs(outputs, _shapes_by_length(session, inputs, buckets), buckets.axis)
        buckets = replace(buckets, outputs=cuts)
    answer = {"inputs": inputs, "outputs": outputs, "remarks": remarks, "buckets": buckets, "unread": unread}
    return to_json(answer), translation


def _rewrite(
    proto: Any, request: dict[str, Any], replaced: list[str], progress: Progress
) -> tuple[bool, tuple[str, ...], list[str]]:
    """Rewrite `proto`, in place, for all runtimes.

    Returns whether there were changes that need no remark, the remarks on the other changes, and the names of the
    inputs that no operator reads.
    """
    changed = embed(Path(str(request.get("folder", "."))) / str(request["name"]), proto)
    changed |= (
        make_dense(proto)
        | drop_weight_inputs(proto)
        | inline_functions(proto)
        | drop_repeated_names(proto)
        | replace_erfc(proto)
        | state_output_padding(proto)
        | state_one_sided(proto)
        | standardize_weights(proto)
    )
    shapes = request.get("shapes") or {}
    added = add_batches(proto, shapes)
    resized, remarks = set_lengths(proto, shapes)
    changed |= resized
    replaced += remarks
    remarks += added + unwrap_maps(proto) + widen_half(proto) + move_input_batches(proto)
    progress(f"onnxruntime {sdk().__version__} computed the conditions of the model's If nodes")
    changed |= drop_infinite_bounds(proto) | inline_known_branches(proto) | flatten_conditions(proto)
    changed |= reshape_whole_lookups(proto)
    remarks += tuple(f"output {name!r} is always empty: it is removed" for name in drop_empty_outputs(proto))
    unread = drop_unread_inputs(proto)
    remarks += tuple(f"no operator reads input {name!r}: it is removed, and apps do not send it" for name in unread)
    return changed, remarks, unread


def _fix_batch_where_needed(proto: Any, no_batch: str) -> tuple[str, ...]:
    """Fix the batch to 1 if the model cannot answer several samples; return remarks with the reasons."""
    remarks: tuple[str, ...] = ()
    if is_dynamic(proto) and fix_batch(proto):
        remarks += (
            "the model quantizes activations as it runs, with a range that all items of a batch share: its batch is fixed "
            "to 1, so that no answer depends on another request",
        )
    if (ones := fixed_batches(proto)) and fix_batch(proto):
        remarks += (
            f"the batch of {', '.join(map(repr, ones))} is 1 in the model, so the batch of its other inputs is fixed to 1, too",
        )
    if no_batch and fix_batch(proto):
        remarks += (
            f"the model leaves its batch open but answers only one sample at a time, so its batch is fixed to 1: {no_batch}",
        )
    return remarks


def _in_single_precision(
    proto: Any, inputs: tuple[TensorSpec, ...], buckets: Buckets | None
) -> tuple[tuple[TensorSpec, ...], tuple[str, ...]]:
    """Convert an FP64 model to FP32 if its answers stay nearly the same; return its inputs and remarks.

    Classical models stay in FP64, because their thresholds and distances need this precision.
    """
    if is_classical(proto) or not has_double(proto):
        return inputs, ()
    single = copy_of(proto)
    remarks = narrow_double(single)
    specs = tuple(replace(spec, datatype="FP32") if spec.datatype == "FP64" else spec for spec in inputs)
    if not _answers_agree(proto, single, _at_largest(inputs, buckets), _at_largest(specs, buckets)):
        return inputs, ("the model stays in FP64, because its answers differ in FP32: only onnxruntime supports FP64",)
    proto.CopyFrom(single)
    return specs, remarks


def external_files(request: dict[str, Any], data: bytes, progress: Progress) -> Answer:
    """Return the separate files that hold weights of the model: {"files": [...]}. Raises SourceInvalid."""
    name = str(request["name"])
    return {"files": files_of(name, tensors(parse(name, data)))}, b""


def parse(name: str, data: bytes) -> Any:
    """Return the ModelProto in `data`. Raises SourceInvalid if `data` is not a model that can run."""
    from onnx import ModelProto

    proto = ModelProto()
    try:
        proto.ParseFromString(data)
    except Exception as error:  # protobuf raises DecodeError, from a module without types
        raise SourceInvalid(
            f"{name} is not an ONNX model: its bytes are not an ONNX protobuf. If it should be an ONNX model, copy or "
            "download it again; docs/models.md lists the other files that edgert can build"
        ) from error
    # Protobuf reads many other files as a message without known fields.
    if not proto.ir_version or not proto.HasField("graph") or not proto.opset_import:
        raise SourceInvalid(f"{name} is not an ONNX model: it has no IR version, opset or graph; give another file")
    if not proto.graph.output:
        raise SourceInvalid("the model has no output; export it with the tensors that you want as outputs")
    if both := {value.name for value in proto.graph.input} & {value.name for value in proto.graph.output}:
        raise SourceInvalid(
            f"{min(both)[:80]!r} is an input and also an output of the model; omit it from the outputs of the export"
        )
    if not proto.graph.node:
        raise SourceInvalid(f"{name} holds no operator; export the model with its weights and layers")
    if len(proto.graph.node) > NODES_MAX:
        raise SourceInvalid(f"{name} holds {len(proto.graph.node)} operators; a model has at most {NODES_MAX}")
    return proto


def check_weights(proto: Any) -> None:
    """Raise SourceInvalid if a weight is NaN or infinite: the training diverged or the file is damaged."""
    from onnx import numpy_helper

    for tensor in proto.graph.initializer:
        if tensor.data_type in (tensor.FLOAT, tensor.FLOAT16, tensor.DOUBLE):
            try:
                array = numpy_helper.to_array(tensor)
            except ValueError as error:
                raise SourceInvalid(
                    f"weight {tensor.name[:80]!r} has shape {list(tensor.dims)}, but not as many values as this shape: "
                    "the file is damaged, export it again"
                ) from error
            # Minus infinity is an intentional mask, and so is a single number, as JAX writes it for ids out of range.
            bad = 0 if array.size == 1 else np.isnan(array).sum() + np.isposinf(array).sum()
            if bad:
                raise SourceInvalid(
                    f"weight {tensor.name[:80]!r} is NaN or infinite in {bad} of {counted(array.size, 'value')}: "
                    "the training diverged or the file is damaged; export an earlier checkpoint"
                )


def _run_once_and_twice(model: bytes, inputs: tuple[TensorSpec, ...]) -> tuple[Any, list[list[Any]]]:
    """Return a session, and its answers to one sample and (if the batch is open) to two samples."""
    session = _load(model)
    counts = (1, 2) if inputs[0].shape[0] == -1 else (1,)
    return session, [_run(session, inputs, count) for count in counts]


def _at_largest(inputs: tuple[TensorSpec, ...], buckets: Buckets | None) -> tuple[TensorSpec, ...]:
    return inputs if buckets is None else tuple(buckets.spec_at(spec, buckets.largest) for spec in inputs)


def _shapes_by_length(
    session: Any, inputs: tuple[TensorSpec, ...], buckets: Buckets
) -> dict[int, list[tuple[int, ...]]]:
    shapes = {}
    for length in probed_lengths(buckets):
        at = tuple(buckets.spec_at(spec, length) for spec in inputs)
        shapes[length] = [_shape_of(value) for value in _run(session, at, 1)]
    return shapes


def _checked(proto: Any) -> tuple[Any, bool]:
    """Return the structure of a valid model, and whether scales were corrected or inner shapes removed.

    Raises SourceInvalid.
    """
    structure, forgot = structure_of(proto), False
    problem = _problem(structure)
    if _SHAPES_DIFFER in problem and round_scales_up(proto):
        structure, forgot = structure_of(proto), True
        problem = _problem(structure)
    if _SHAPES_DIFFER in problem:
        forget_inner_shapes(proto)
        structure, forgot = structure_of(proto), True
        problem = _problem(structure)
    if problem and not any(words in problem for words in _LEFT_TO_THE_RUNTIME):
        raise SourceInvalid(f"the model is not valid ONNX: {_first_line(problem)}; export it again")
    return structure, forgot


def _problem(structure: Any) -> str:
    """Return the complaint of ONNX's checker about the model; an empty text for a valid model."""
    import onnx

    try:
        # The checker reports cycles, duplicate names and contradictory shapes more clearly than the runtime.
        onnx.checker.check_model(structure, full_check=True)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - the checker raises errors of three modules
        return str(error) or type(error).__name__
    return ""


def _check_modes(proto: Any) -> None:
    """Raise SourceInvalid for an operator in a mode that the device cannot use.

    ONNX Runtime cannot run an RNN, GRU or LSTM with the batch first. A BatchNormalization in training mode ignores what
    the training found.
    """
    for node in nodes_of(proto.graph):
        named = f"{node.op_type} {(node.name or node.output[0])[:80]!r}"
        if node.op_type in ("GRU", "LSTM", "RNN") and attribute_of(node, "layout"):
            raise SourceInvalid(
                f"{named} takes [batch, steps, inputs] (layout 1), and ONNX Runtime supports "
                "only layout 0: export the model with layout 0, and a Transpose before and after the operator"
            )
        if node.op_type == "BatchNormalization" and attribute_of(node, "training_mode"):
            raise SourceInvalid(
                f"{named} is in training mode, so it uses the mean of each request, "
                "not the mean of the training data: put the model into inference mode (in PyTorch: model.eval()), and export it again"
            )


def _strip_notes(proto: Any) -> bool:
    """Remove exporters' notes for debugging, which may contain paths; return whether there were any."""
    notes = [proto.graph, *proto.graph.node, *proto.graph.value_info, *proto.graph.input, *proto.graph.output]
    notes += [*proto.functions, *(node for function in proto.functions for node in function.node)]
    noted = [message for message in notes if message.doc_string or message.metadata_props]
    for message in noted:
        message.ClearField("doc_string")
        message.ClearField("metadata_props")
    return bool(noted)


def _translated(proto: Any, inputs: tuple[TensorSpec, ...]) -> Any:
    """Return the model in an opset and an IR that all runtimes read; None if the model stays as it is."""
    if not (opset := opset_of(proto)) or proto.functions:
        return None
    for wanted in wanted_opsets(proto):
        if opset == wanted and proto.ir_version <= IR_MAX:
            return None
        converted = at_opset(proto, wanted)
        if converted is not None and _answers_agree(proto, converted, inputs, inputs):
            return converted
    return None


def _answers_agree(
    proto: Any, converted: Any, inputs: tuple[TensorSpec, ...], converted_inputs: tuple[TensorSpec, ...]
) -> bool:
    """Whether `converted` runs and, if the runtime accepts `proto`, gives the same answers as `proto`."""
    try:
        got = _run(_load(converted.SerializeToString()), converted_inputs, 1, seed=1)
    except SourceInvalid:
        return False
    try:
        want = _run(_load(proto.SerializeToString()), inputs, 1, seed=1)
    except SourceInvalid:
        return True  # this runtime is too old for the original
    return len(want) == len(got) and all(
        getattr(a, "shape", None) == getattr(b, "shape", None)
        and np.allclose(a, b, rtol=1e-3, atol=1e-4, equal_nan=True)
        for a, b in zip(want, got, strict=True)
        if getattr(a, "dtype", np.dtype(object)).kind in "biuf"
    )


def _load(model: bytes) -> Any:
    onnxruntime = sdk()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    try:
        return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except MemoryError:
        raise
    except Exception as error:  # the runtime's exceptions share no base class
        _raise_if_out_of_memory(error)
        too_new = _OPSET_TOO_NEW.search(str(error))
        known = (
            "the model has opset {}, and the newest opset that this runtime knows is {}".format(*too_new.groups())
            if too_new
            else ""
        )
        raise SourceInvalid(
            f"onnxruntime {onnxruntime.__version__} does not accept the model: {known or _first_line(error)}; "
            f"export it with standard operators, opset {OPSET_MIN} to {OPSET_MAX}"
        ) from error


def _run(session: Any, inputs: tuple[TensorSpec, ...], count: int, seed: int = 0) -> list[Any]:
    """Return the answers to `count` samples of zeros; with a `seed`, float inputs are noise."""
    feed = {}
    for spec in inputs:
        shape = [count if n == -1 else n for n in spec.shape]
        check_run_size(spec, shape)
        if seed and spec.dtype.kind == "f":
            feed[spec.name] = np.random.default_rng(seed).standard_normal(shape, np.float32).astype(spec.dtype)
        else:
            feed[spec.name] = np.zeros(shape, spec.dtype)
    try:
        outputs: list[Any] = session.run(None, feed)
    except MemoryError:
        raise
    except Exception as error:  # the runtime's exceptions share no base class
        _raise_if_out_of_memory(error)
        kind = OneSampleOnly if count > 1 else SourceInvalid
        raise kind(f"the model does not run on a batch of {count}: {_first_line(error)}; export it again") from error
    return outputs


def _shape_of(value: Any) -> tuple[int, ...]:
    return tuple(getattr(value, "shape", ()))


def _datatype(value: Any) -> str:
    return str(value.dtype.name) if hasattr(value, "dtype") else type(value).__name__


def _raise_if_out_of_memory(error: Exception) -> None:
    if any(words in str(error) for words in ("bad_alloc", "BFCArena", "Failed to allocate memory")):
        raise MemoryError from error


def _first_line(error: Exception | str) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = re.sub(r"\[ONNXRuntimeError\] : \d+ : \w+ : ", "", lines[0]) if lines else type(error).__name__
    # ONNX Runtime prepends the position in its source: "/onnxruntime_src/...:46 void f(int) What was wrong".
    return re.sub(r"/onnxruntime_src\S+ .*?\) (?=\w)", "", text)[:400]
