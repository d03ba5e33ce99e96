"""The one axis other than the batch that stays open, and its buckets of lengths."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edgert.bundle.buckets import LENGTH_MAX, SIZES_MAX, Buckets, CutOutput, PaddedInput
from edgert.errors import ConfigInvalid, SourceInvalid
from edgert.tensors import TensorSpec
from edgert_deploy.packager.sources.onnx_graph.axes import described, is_open, model_inputs

BUCKETS = re.compile(r"(?P<axis>[^=]+)=(?P<sizes>[0-9]+(?:,[0-9]+)*)")
PAD = re.compile(r"(?P<name>[^=]+)=(?P<value>-?[0-9]+(?:\.[0-9]*)?(?:e-?[0-9]+)?)", re.IGNORECASE)
UNNAMED = ("", "?")
OWN_NAME = "edgert_length"  # an axis without a name gets this name


@dataclass(frozen=True)
class WantedBuckets:
    """The bucket `sizes` that the user wants for one axis.

    `axis` is the name of the axis, or `INPUT:POSITION`. `values` gives the numbers that pad some inputs instead of 0.
    """

    axis: str
    sizes: tuple[int, ...]
    values: Mapping[str, float] = field(default_factory=dict)


def read_buckets(text: str | None, pads: Sequence[str] = ()) -> WantedBuckets | None:
    """Parse buckets such as `tokens=32,64,128` and pads such as `input_ids=1`. Raises ConfigInvalid."""
    if text is None:
        if pads:
            raise ConfigInvalid("--pad needs --buckets, because it pads the inputs that have buckets")
        return None
    match = BUCKETS.fullmatch(text)
    sizes = tuple(sorted({int(n) for n in match["sizes"].split(",")})) if match else ()
    if match is None or len(sizes) > SIZES_MAX or not 1 <= sizes[0] <= sizes[-1] <= LENGTH_MAX:
        raise ConfigInvalid(
            f"--buckets {text!r}: give AXIS=32,64,128, with at most {SIZES_MAX} lengths from 1 to {LENGTH_MAX}"
        )
    values = {}
    for pad in pads:
        if (pad_match := PAD.fullmatch(pad)) is None:
            raise ConfigInvalid(f"--pad {pad!r}: give INPUT=NUMBER, such as input_ids=1")
        values[pad_match["name"]] = float(pad_match["value"])
    return WantedBuckets(match["axis"], sizes, values)


def find_axis(proto: Any, wanted: WantedBuckets) -> Buckets:
    """Find the inputs that have the wanted axis; return them with the buckets. Raises SourceInvalid.

    If the axis has no name, it gets the name OWN_NAME.
    """
    places = [
        (value, axis, dim)
        for value in model_inputs(proto)
        for axis, dim in enumerate(value.type.tensor_type.shape.dim)
        if axis and is_open(dim)
    ]
    pointed = [dim for value, axis, dim in places if f"{value.name}:{axis}" == wanted.axis]
    name = pointed[0].dim_param if pointed and pointed[0].dim_param not in UNNAMED else wanted.axis
    chosen = [place for place in places if place[2] in pointed or (name not in UNNAMED and place[2].dim_param == name)]
    if not chosen:
        shapes = "; ".join(f"{v.name} {described(v.type.tensor_type.shape.dim)}" for v in model_inputs(proto))
        raise SourceInvalid(
            f"--buckets {wanted.axis}: no input leaves an axis of that name open besides the batch; the inputs are {shapes}. "
            "Give the axis's name, or INPUT:POSITION if the axis has no name"
        )
    for _, _, dim in chosen:
        if dim.dim_param in UNNAMED:
            dim.dim_param = OWN_NAME
    names = {value.name for value, _, _ in chosen}
    if unknown := sorted(set(wanted.values) - names):
        raise SourceInvalid(
            f"--pad {unknown[0]}: only inputs with axis {wanted.axis!r} are padded: {', '.join(sorted(names))}"
        )
    padded = tuple(PaddedInput(value.name, axis, wanted.values.get(value.name, 0.0)) for value, axis, _ in chosen)
    return Buckets(wanted.axis, wanted.sizes, padded)


def probed_lengths(buckets: Buckets) -> tuple[int, ...]:
    """Return the lengths that the probe runs, the largest first: all sizes, and the largest size minus 1."""
    return tuple(sorted({*buckets.sizes, max(1, buckets.largest - 1)}, reverse=True))


def cut_outputs(
    outputs: Sequence[TensorSpec], shapes: Mapping[int, Sequence[tuple[int, ...]]], axis_name: str
) -> tuple[tuple[TensorSpec, ...], tuple[CutOutput, ...]]:
    """Return the outputs with the bucket axis open, and how to cut the answers to padded inputs.

    `shapes` has the shapes of the outputs for each length of the axis, the largest length first. Raises SourceInvalid.
    """
    largest = next(iter(shapes))
    specs, cuts = [], []
    for i, spec in enumerate(outputs):
        shape = list(spec.shape)
        for axis in range(1, len(shape)):
            by_length = {length: one[i][axis] for length, one in shapes.items()}
            if len(set(by_length.values())) == 1:
                continue
            divisor = max(1, round(largest / max(1, by_length[largest])))
            cut = CutOutput(spec.name, axis, divisor)
            if any(cut.length(length) != own for length, own in by_length.items()):
                listed = ", ".join(f"{own} for {length}" for length, own in by_length.items())
                raise SourceInvalid(
                    f"output {spec.name!r} has a length along axis {axis} that is not {axis_name!r} divided by a whole number: {listed}. "
                    "So EdgeRT cannot cut the padding off an answer: fix the axis with --input instead of --buckets"
                )
            cuts.append(cut)
            shape[axis] = -1
        specs.append(TensorSpec(spec.name, spec.datatype, tuple(shape)))
    return tuple(specs), tuple(cuts)
