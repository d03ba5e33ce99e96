"""Rules for text: how a device computes token ids from text, and an embedding from the token states.

Rules are values in the manifest, like the rules for images in `edgert.bundle.rules`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgert.bundle.buckets import Buckets
from edgert.bundle.rules import check_choice, spec_of
from edgert.errors import BundleError
from edgert.tensors import TensorSpec
from edgert.typed_json import Closed

TOKENIZER = "tokenizer.json"  # the name of a tokenizer in a bundle
TOKENS_MAX = 2**20  # tokens of one text
TRUNCATIONS = ("right", "left", "none")
POOLINGS = ("mean", "cls", "none")
DATATYPES = ("INT64", "INT32")


@dataclass(frozen=True)
class Text(Closed):
    """The rule that computes token ids from UTF-8 text, with a file of the library `tokenizers`.

    The device pads shorter texts at their end, to the length of the model's input. If this length is open, the device
    pads texts to the length of the longest text of the request, and then to the length of a bucket.

    Attributes:
        tokenizer: The path of the tokenizer's file: in a manifest a name in the bundle, on the host a local path.
        input: The model's input for the token ids.
        max_tokens: The largest number of tokens of a text, including special tokens.
        mask: The model's input with 1 for a token and 0 for padding; "" if the model has no such input.
        types: The model's input for the type ids; "" if the model has no such input.
        truncation: The treatment of a longer text: remove its end ("right") or its start ("left"), or refuse the text
            ("none").
        pad_id: The token id of padding.
    """

    tokenizer: str
    input: str
    max_tokens: int
    mask: str = ""
    types: str = ""
    truncation: str = "right"
    special_tokens: bool = True
    pad_id: int = 0

    @property
    def inputs(self) -> tuple[str, ...]:
        """The inputs that the device computes from a text: ids, mask, types."""
        return tuple(name for name in (self.input, self.mask, self.types) if name)


@dataclass(frozen=True)
class Embed(Closed):
    """The rule that computes one vector for each item of `output`, as the output `<output>_embedding`.

    Attributes:
        output: The output with token states [N, T, D], or with vectors [N, D].
        pooling: "mean" for the mean over the tokens that `mask` marks with 1, "cls" for the state of the first token,
            "none" if the output is already [N, D].
        mask: The model's input that marks tokens, for "mean".
        normalize: Whether each vector gets the length 1.
    """

    output: str
    pooling: str = "mean"
    mask: str = ""
    normalize: bool = True

    @property
    def name(self) -> str:
        """The name of the output with the vectors."""
        return f"{self.output}_embedding"


def check_text(rule: Text, inputs: Sequence[TensorSpec], buckets: Buckets | None) -> None:
    """Raise BundleError unless `rule` can be applied to `inputs`."""
    check_choice("text", "truncation", rule.truncation, TRUNCATIONS)
    specs = [spec_of("text", "input", name, inputs) for name in rule.inputs]
    for spec in specs:
        if spec.datatype not in DATATYPES or len(spec.shape) != 2:
            raise BundleError(f"text gives {' or '.join(DATATYPES)} [N, tokens]; input {spec.name!r} is {spec.form}")
    if len(set(rule.inputs)) < len(rule.inputs):
        raise BundleError(f"text names an input twice: {', '.join(rule.inputs)}; give each its own")
    if len({spec.shape for spec in specs}) > 1:
        raise BundleError(f"text needs inputs of one shape; they are {', '.join(spec.form for spec in specs)}")
    length = specs[0].shape[1]
    if length == -1:
        length = _open_length(rule, buckets)
    if not 1 <= rule.max_tokens <= min(length, TOKENS_MAX):
        raise BundleError(f"text has max_tokens = {rule.max_tokens}; the model allows 1 to {min(length, TOKENS_MAX)}")
    if not 0 <= rule.pad_id < 2**31:
        raise BundleError(f"text has pad_id = {rule.pad_id}; give a token's number, from 0")


def check_embed(rule: Embed, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> None:
    """Raise BundleError unless `rule` can be applied to one of `outputs`."""
    check_choice("embedding", "pooling", rule.pooling, POOLINGS)
    spec = spec_of("embedding", "output", rule.output, outputs)
    axes = 2 if rule.pooling == "none" else 3
    if len(spec.shape) != axes or not spec.datatype.startswith("FP"):
        form = "[N, D]" if axes == 2 else "[N, T, D]"
        raise BundleError(f"pooling {rule.pooling!r} needs floats {form}; output {spec.name!r} is {spec.form}")
    if rule.name in {tensor.name for tensor in outputs}:
        raise BundleError(f"the model has an output {rule.name!r} already: omit the embedding's rule")
    if rule.pooling != "mean":
        return
    mask = next((tensor for tensor in inputs if tensor.name == rule.mask), None)
    if mask is None or len(mask.shape) != 2 or mask.shape[1] != spec.shape[1]:
        raise BundleError(
            f"pooling 'mean' needs the model's attention mask, an input [N, T]; {rule.mask[:80]!r} does not fit output "
            f"{rule.output!r}: give mask = the input's name"
        )


def _open_length(rule: Text, buckets: Buckets | None) -> int:
    """Return the largest bucket. Raises BundleError unless exactly the inputs of `rule` have buckets."""
    if buckets is None:
        raise BundleError(f"input {rule.input!r} has an open length: build with --buckets AXIS=SIZES or --input")
    pads = {place.name: place.value for place in buckets.inputs}
    if set(pads) != set(rule.inputs):
        raise BundleError(
            f"axis {buckets.axis!r} of --buckets is open in {', '.join(pads)}, but [text] gives {', '.join(rule.inputs)}: "
            "name exactly the inputs with this axis in [text]"
        )
    wanted = {name: rule.pad_id if name == rule.input else 0 for name in rule.inputs}
    for name, value in wanted.items():
        if pads[name] != value:
            raise BundleError(
                f"[text] pads input {name!r} with {value}, and --buckets pads it with {pads[name]:g}: give --pad {name}={value}"
            )
    return buckets.largest
