"""Runs of an ONNX model in ONNX Runtime on zeros or noise, and the checks of the answers.

The model is refused if its answers depend on random numbers, as with a Dropout in training mode: the golden samples
would fail on devices. A model whose answer to a sample depends on the other samples of its batch must run with a batch
of 1: on a device, the other samples come from other clients. An example is a spectrogram that limits its values by the
loudest value of the whole batch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.engines.onnxruntime import sdk
from edgert.errors import SourceInvalid
from edgert.tensors import TensorSpec
from edgert_deploy.packager.sources.onnx_graph.nodes import nodes_of
from edgert_deploy.packager.sources.onnx_graph.opsets import OPSET_MAX, OPSET_MIN
from edgert_deploy.packager.sources.tensor_specs import OneSampleOnly, check_run_size

LOUDER = 1e5  # the factor of the noise that replaces the second sample: 100 dB, because spectrograms often keep 80 dB
TOLERANCE = 1e-4  # as a share of the largest value; the two runs have the same shapes, so they differ less
RANDOM_OPERATORS = frozenset(
    {
        "Bernoulli",
        "Dropout",  # random in training mode only
        "Multinomial",
        "RandomNormal",
        "RandomNormalLike",
        "RandomUniform",
        "RandomUniformLike",
    }
)
_OPSET_TOO_NEW = re.compile(r"Opset (\d+) is under development.* is till opset (\d+)", re.DOTALL)

Array = NDArray[Any]
Run = Callable[[dict[str, Array]], list[Any]]


def run_once_and_twice(model: bytes, inputs: tuple[TensorSpec, ...]) -> tuple[Any, list[list[Any]]]:
    """Return a session, and its answers to one sample and (if the batch is open) to two samples."""
    session = _load(model)
    counts = (1, 2) if inputs[0].shape[0] == -1 else (1,)
    return session, [run(session, inputs, count) for count in counts]


def run(session: Any, inputs: tuple[TensorSpec, ...], count: int, seed: int = 0) -> list[Any]:
    """Return the answers to `count` samples of zeros; with a `seed`, float inputs are noise."""
    feed = {}
    for spec in inputs:
        shape = [count if n == -1 else n for n in spec.shape]
        check_run_size(spec, shape)
        if seed and spec.dtype.kind == "f":
            feed[spec.name] = _noise(spec, shape, seed)
        else:
            feed[spec.name] = np.zeros(shape, spec.dtype)
    try:
        outputs: list[Any] = session.run(None, feed)
    except MemoryError:
        raise
    except Exception as error:  # the runtime's exceptions share no base class
        _raise_if_out_of_memory(error)
        kind = OneSampleOnly if count > 1 else SourceInvalid
        raise kind(f"the model does not run on a batch of {count}: {first_line(error)}; export it again") from error
    return outputs


def answers_agree(
    proto: Any, converted: Any, inputs: tuple[TensorSpec, ...], converted_inputs: tuple[TensorSpec, ...]
) -> bool:
    """Whether `converted` runs and, if the runtime accepts `proto`, gives the same answers as `proto`."""
    try:
        got = run(_load(converted.SerializeToString()), converted_inputs, 1, seed=1)
    except SourceInvalid:
        return False
    try:
        want = run(_load(proto.SerializeToString()), inputs, 1, seed=1)
    except SourceInvalid:
        return True  # this runtime is too old for the original
    return len(want) == len(got) and all(
        getattr(a, "shape", None) == getattr(b, "shape", None)
        and np.allclose(a, b, rtol=1e-3, atol=1e-4, equal_nan=True)
        for a, b in zip(want, got, strict=True)
        if getattr(a, "dtype", np.dtype(object)).kind in "biuf"
    )


def check_answers_repeat(proto: Any, run: Callable[[], list[Any]]) -> None:
    """Raise SourceInvalid if two runs on one sample differ, and the model has one of RANDOM_OPERATORS.

    A model may multiply its random numbers by 0.
    """
    node = next((node for node in nodes_of(proto.graph) if node.op_type in RANDOM_OPERATORS), None)
    if node is not None and not all(map(_equal, run(), run())):
        raise SourceInvalid(
            f"the model draws random numbers ({node.op_type} {(node.name or node.output[0])[:80]!r}), so each run on a sample gives another answer, and no device could "
            "check its answers: export the model in inference mode (in PyTorch: model.eval()), or with the random numbers as an input"
        )


def check_samples_are_independent(run: Run, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> None:
    """Raise OneSampleOnly if the answer to a sample changes with the other sample of a batch of two.

    The samples are noise. Whole numbers are 1 or 0, so that they are valid tokens. A batch that `run` refuses proves
    nothing, and neither do the answers of a model that draws random numbers.
    """
    try:
        alike, mixed = run(_two(inputs, same=True)), run(_two(inputs, same=False))
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - the runtime's exceptions share no base class
        return
    changed = _changed(alike, mixed)
    if changed is not None and _changed(alike, run(_two(inputs, same=True))) is None:
        raise OneSampleOnly(
            f"output {outputs[changed].name!r} of a sample depends on the other samples of its batch; export the model so "
            "that it computes each sample alone, or with the batch fixed to 1"
        )


def shape_of(value: Any) -> tuple[int, ...]:
    return tuple(getattr(value, "shape", ()))


def first_line(error: Exception | str) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = re.sub(r"\[ONNXRuntimeError\] : \d+ : \w+ : ", "", lines[0]) if lines else type(error).__name__
    # ONNX Runtime prepends the position in its source: "/onnxruntime_src/...:46 void f(int) What was wrong".
    return re.sub(r"/onnxruntime_src\S+ .*?\) (?=\w)", "", text)[:400]


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
            f"onnxruntime {onnxruntime.__version__} does not accept the model: {known or first_line(error)}; "
            f"export it with standard operators, opset {OPSET_MIN} to {OPSET_MAX}"
        ) from error


def _raise_if_out_of_memory(error: Exception) -> None:
    if any(words in str(error) for words in ("bad_alloc", "BFCArena", "Failed to allocate memory")):
        raise MemoryError from error


def _changed(before: list[Any], after: list[Any]) -> int | None:
    """Return the number of an output whose first sample differs; None if there is no such output.

    An output whose number of rows depends on the values has no row for each sample.
    """
    pairs = enumerate(zip(before, after, strict=True))
    return next((i for i, (a, b) in pairs if len(a) == len(b) == 2 and not _same(a[0], b[0])), None)


def _two(inputs: Sequence[TensorSpec], *, same: bool) -> dict[str, Array]:
    """Return two samples for each input. The first sample is always the same; the second one may equal it."""
    return {spec.name: np.stack([(first := _sample(spec)), first if same else _other(spec)]) for spec in inputs}


def _sample(spec: TensorSpec) -> Array:
    return _noise(spec, spec.shape[1:], 1) if spec.dtype.kind == "f" else np.ones(spec.shape[1:], spec.dtype)


def _other(spec: TensorSpec) -> Array:
    is_float, shape = spec.dtype.kind == "f", spec.shape[1:]
    return np.asarray(LOUDER * _noise(spec, shape, 2)) if is_float else np.zeros(shape, spec.dtype)


def _noise(spec: TensorSpec, shape: Sequence[int], seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(spec.dtype)


def _same(a: Array, b: Array) -> bool:
    if a.dtype.kind != "f" or a.shape != b.shape:
        return np.array_equal(a, b)
    atol = TOLERANCE * float(np.abs(a).max(initial=0.0, where=np.isfinite(a)))
    return np.allclose(a, b, rtol=TOLERANCE, atol=atol, equal_nan=True)


def _equal(a: Any, b: Any) -> bool:
    return not isinstance(a, np.ndarray) or np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
