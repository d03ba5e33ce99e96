"""Computes the model's token ids from a request's text, with the library `tokenizers`.

A request may contain text instead of the inputs that the rule computes: UINT8 [N, bytes], with one UTF-8 text in each
row. Shorter texts are padded with zeros, so zeros at the end of a text are ignored.
"""

from __future__ import annotations

import codecs
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.bundle.text_rules import Text
from edgert.errors import BundleError, RequestError
from edgert.extras import check_tokenizers
from edgert.tensors import TensorSpec

TEXT_BYTES_MAX = 256 * 1024
REQUEST_BYTES_MAX = 4 * 1024**2  # bytes of all texts of a request

Tokens = dict[str, NDArray[Any]]


class TextPreprocessor:
    """Applies `rule` to text for `inputs`; `content` is the tokenizer's file.

    Raises EngineMissing if the library is missing, BundleError if the library cannot use the file.
    """

    of_images = False
    frames: TensorSpec | None = None
    integers: TensorSpec | None = None

    def __init__(self, rule: Text, inputs: Sequence[TensorSpec], content: bytes) -> None:
        self._rule = rule
        self._tokenizer = _tokenizer(rule, content)
        self._specs = {spec.name: spec for spec in inputs if spec.name in rule.inputs}
        own = self._specs[rule.input]
        self._length = own.shape[1]
        self.files = TensorSpec(own.name, "UINT8", (own.shape[0], -1))
        self.forms = (own, self.files)

    def __call__(self, array: NDArray[Any]) -> Tokens:
        """Return the model's tensors for texts, by the names of its inputs. Raises RequestError."""
        return self.tokens(texts_of(array))

    def wants(self, array: NDArray[Any]) -> bool:
        """Return whether `array` (of one of the `forms`) is text and not the model's own tensor."""
        return array.dtype == np.uint8

    def tokens(self, texts: list[str]) -> Tokens:
        """Return ids, mask and types of `texts`, padded to one length. Raises RequestError."""
        rule = self._rule
        rows = self._encoded(texts)
        for i, row in enumerate(rows):
            if not 1 <= len(row.ids) <= rule.max_tokens:
                raise RequestError(
                    f"text {i} of the request has {len(row.ids)} tokens; the model takes 1 to {rule.max_tokens}: "
                    f"{'shorten it' if row.ids else 'send a text that is not empty'}"
                )
        shape = (len(rows), max(len(row.ids) for row in rows) if self._length == -1 else self._length)
        arrays = {name: np.zeros(shape, spec.dtype) for name, spec in self._specs.items()}
        arrays[rule.input][:] = rule.pad_id
        for i, row in enumerate(rows):
            arrays[rule.input][i, : len(row.ids)] = row.ids
            if rule.mask:
                arrays[rule.mask][i, : len(row.ids)] = 1
            if rule.types:
                arrays[rule.types][i, : len(row.ids)] = row.type_ids
        return arrays

    def _encoded(self, texts: list[str]) -> list[Any]:
        try:
            rows: list[Any] = self._tokenizer.encode_batch_fast(texts, add_special_tokens=self._rule.special_tokens)
        except BaseException as error:
            raise RequestError(f"the tokenizer cannot read the text: {_reason_of(error)}") from error
        return rows


def texts_of(array: NDArray[Any]) -> list[str]:
    """Return the rows of UINT8 [N, bytes] as text. Raises RequestError."""
    if array.nbytes > REQUEST_BYTES_MAX:
        raise RequestError(
            f"the texts have {array.nbytes} bytes; at most {REQUEST_BYTES_MAX} are allowed: split the request"
        )
    texts = []
    for i, row in enumerate(array):
        text = row.tobytes().rstrip(b"\0")
        if len(text) > TEXT_BYTES_MAX:
            raise RequestError(
                f"text {i} of the request has {len(text)} bytes; at most {TEXT_BYTES_MAX} are allowed: shorten it"
            )
        try:
            texts.append(text.decode())
        except UnicodeDecodeError as error:
            raise RequestError(
                f"text {i} of the request is not UTF-8: {error.reason} at byte {error.start}: encode it as UTF-8"
            ) from error
    return texts


def text_in_file(path: Path) -> bytes:
    """Return the text of a file, without a byte order mark and without its last newline. Raises OSError."""
    content = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    return content.removesuffix(b"\n").removesuffix(b"\r")


def _tokenizer(rule: Text, content: bytes) -> Any:
    """Return the library's tokenizer, which truncates texts by `rule` and does not pad them."""
    check_tokenizers()
    # The library would start a thread for each processor. The engine was measured without these threads.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import tokenizers

    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(content)
        special = tokenizer.num_special_tokens_to_add(False) if rule.special_tokens else 0
        tokenizer.no_padding()
        tokenizer.no_truncation()
        if rule.truncation != "none" and rule.max_tokens > special:
            tokenizer.enable_truncation(rule.max_tokens, direction=rule.truncation)
    except BaseException as error:
        raise BundleError(
            f"the library tokenizers {tokenizers.__version__} cannot use the tokenizer: {_reason_of(error)}"
        ) from error
    if rule.max_tokens <= special:
        raise BundleError(
            f"text has max_tokens = {rule.max_tokens}, and the tokenizer adds {special} special tokens: raise max_tokens"
        )
    return tokenizer


def _reason_of(error: BaseException) -> str:
    """Return the library's message. Raise `error` again unless it is an Exception or a panic of Rust code."""
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error
    return " ".join(str(error).split())[:200]
