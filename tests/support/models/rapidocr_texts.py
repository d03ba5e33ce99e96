"""Write the texts that rapidocr reads from its own recognizer's scores, for the test of CTC.

    python -m tests.support.models.rapidocr_texts    # fetches rapidocr-onnxruntime, as bench.zoo does

The file holds, for lines of rendered text, the four best classes of each step, and the texts and probabilities that
rapidocr's own decoder makes of all of them.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np

from bench.zoo.models import _text_lines
from bench.zoo.packages import model_file
from tests.support.paths import ROOT

FILE = ROOT / "tests/device/processing/data/rapidocr.npz"
BEST = 4
PACKAGE = "rapidocr-onnxruntime"


def main() -> None:
    import onnxruntime

    lines = _text_lines(23, 5, 48, 320)
    lines = np.concatenate([lines, np.ones_like(lines[:1])])  # the last is empty
    session = onnxruntime.InferenceSession(
        model_file(PACKAGE, "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx")
    )
    characters = session.get_modelmeta().custom_metadata_map["character"].splitlines()
    scores = session.run(None, {"x": lines})[0]
    read = _decoder()(character=list(characters))(scores)
    order = np.argsort(-scores, axis=-1, kind="stable")[..., :BEST]
    np.savez_compressed(
        FILE,
        classes=order.astype(np.uint16),
        probabilities=np.take_along_axis(scores, order, axis=-1),
        characters=np.frombuffer("\n".join(characters).encode(), np.uint8),
        texts=np.array([text for text, _ in read]),
        means=np.array([mean for _, mean in read]),
    )


def _decoder() -> Any:
    path = model_file(PACKAGE, "rapidocr_onnxruntime/ch_ppocr_rec/utils.py")
    spec = importlib.util.spec_from_file_location("rapidocr_utils", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.CTCLabelDecode


if __name__ == "__main__":
    main()
