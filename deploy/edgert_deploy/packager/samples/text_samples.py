"""Samples of text, converted to tokens by the same code as on devices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgert.bundle.buckets import Buckets
from edgert.bundle.text_rules import Text
from edgert.errors import CalibrationInvalid, RequestError
from edgert.printable import counted
from edgert.processing.text import TEXT_BYTES_MAX, TextPreprocessor, text_in_file, texts_of
from edgert.tensors import TensorSpec, byte_rows
from edgert_deploy.packager.samples.file_labels import Labelling, labels_of
from edgert_deploy.packager.samples.lengths import Arrays, stack_all
from edgert_deploy.packager.samples.sample_files import as_recording, check_size, files_in

SUFFIX = ".txt"
LINES_BYTES_MAX = 256 * 1024**2


def read_texts(path: Path, labelling: Labelling, at_least: int) -> tuple[NDArray[np.uint8], Arrays]:
    """Return the texts, UINT8 [N, bytes], and their labels. Raises CalibrationInvalid.

    `path` is a .txt file with one text on each line, or a folder of .txt files with one text in each file.
    """
    labels: Arrays = {}
    if path.is_file():
        with as_recording(path, LINES_BYTES_MAX, "split it"):
            texts = [line for line in map(bytes.strip, text_in_file(path).splitlines()) if line]
    else:
        files = files_in(path, (SUFFIX,))
        labels = labels_of(path, files, labelling)
        texts = [_file(file) for file in files]
    if len(texts) < at_least:
        raise CalibrationInvalid(
            f"{path} has {counted(len(texts), 'text')}; at least {at_least} are needed: give a folder with one {SUFFIX} file for each "
            f"text, or a {SUFFIX} file with one text on each line"
        )
    check_size(path, len(texts) * max(map(len, texts)))
    return byte_rows(texts), labels


def tokens_of(
    path: Path, inputs: Sequence[TensorSpec], rule: Text, texts: NDArray[np.uint8], buckets: Buckets | None
) -> Arrays:
    """Return the model's tensors for texts. Raises CalibrationInvalid.

    Args:
        path: The texts' file or folder, for messages.
        texts: The texts, UINT8 [N, bytes].
        buckets: The model's buckets. With buckets, the result also has `lengths`.
    """
    if set(rule.inputs) != {spec.name for spec in inputs}:
        raise CalibrationInvalid(
            f"{path} holds text, which becomes {', '.join(rule.inputs)}, but the model has other inputs too: "
            "give an .npz with all inputs"
        )
    preprocessor = TextPreprocessor(rule, inputs, Path(rule.tokenizer).read_bytes())
    rows = []
    for i, text in enumerate(texts):
        try:
            rows.append(preprocessor.tokens(texts_of(text[None])))
        except RequestError as error:
            raise CalibrationInvalid(f"sample {i} of {path}: {error.message}") from error
    columns = [[row[spec.name][0] for row in rows] for spec in inputs]
    if buckets is not None:
        return stack_all(str(path), inputs, columns, buckets)
    return {spec.name: np.stack(column) for spec, column in zip(inputs, columns, strict=True)}


def _file(path: Path) -> bytes:
    with as_recording(path, TEXT_BYTES_MAX, "cut it"):
        text = text_in_file(path)
    if not text.strip():
        raise CalibrationInvalid(f"{path} holds no text: remove the file, or write its text")
    return text
