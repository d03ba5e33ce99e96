"""Texts of different lengths for the exported text model (tests/support/models/exported), as samples and as files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert_deploy.packager.samples.lengths import stack_all
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.formats.convert import Conversion
from edgert_deploy.packager.sources.onnx_graph.bucket_axis import read_buckets
from edgert_deploy.packager.sources.source_model import SourceModel, load_source
from tests.support.models.exported import FOLDER

MODEL = FOLDER / "text.onnx"
WORDS = 40
LARGEST = 32


def text(length: int, seed: int = 0) -> dict[str, NDArray[np.int64]]:
    """Return one text as an app sends it: its tokens and their mask, without a batch axis."""
    return {"ids": np.random.default_rng((length, seed)).integers(0, WORDS, length), "mask": np.ones(length, np.int64)}


def texts(count: int, seed: int = 0) -> list[dict[str, NDArray[np.int64]]]:
    """Return `count` texts, whose lengths are spread evenly from 2 to LARGEST."""
    return [text(2 + (i * 7) % (LARGEST - 1), seed + i) for i in range(count)]


def source_in(buckets: str = "tokens=8,16,32", *pads: str, path: Path = MODEL) -> SourceModel:
    return load_source(path, Conversion(buckets=read_buckets(buckets, pads)))


def samples_of(source: SourceModel, rows: list[dict[str, NDArray[np.int64]]]) -> CalibrationSet:
    """Return the texts as samples, as a build reads them."""
    assert source.buckets is not None
    arrays = stack_all(
        "texts", source.inputs, [[row[spec.name] for row in rows] for spec in source.inputs], source.buckets
    )
    lengths = arrays.pop("lengths")
    return CalibrationSet(arrays, None, lengths=lengths, buckets=source.buckets)


def write_texts(folder: Path, rows: list[dict[str, NDArray[np.int64]]]) -> Path:
    """Write a folder for each input, with a file for each text."""
    for i, row in enumerate(rows):
        for name, array in row.items():
            (folder / name).mkdir(parents=True, exist_ok=True)
            np.save(folder / name / f"{i:04}.npy", array)
    return folder


def answers_to(row: dict[str, NDArray[np.int64]], path: Path = MODEL) -> dict[str, Any]:
    """Return the model's own answer to one text, in ONNX Runtime alone and without padding."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    got = session.run(None, {name: array[None] for name, array in row.items()})
    return {name: array[0] for name, array in zip(names, got, strict=True)}
