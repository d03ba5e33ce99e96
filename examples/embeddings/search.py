"""Search sentences by meaning: `python -m examples.embeddings.search FILE "what to look for"`.

FILE has a sentence on each line. A daemon on this machine serves the model `minilm` (embeddings.toml).
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from edgert import Client
from edgert.errors import EdgeRTError

SHOWN = 3


def main(file: str, wanted: str) -> None:
    sentences = Path(file).read_text(encoding="utf-8").splitlines()
    with Client() as client:
        vectors = np.stack([client.infer("minilm", one)["last_hidden_state_embedding"] for one in sentences])
        likeness = vectors @ client.infer("minilm", wanted)["last_hidden_state_embedding"]
    for i in np.argsort(-likeness)[:SHOWN]:
        print(f"{likeness[i]:.2f}  {sentences[i]}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    try:
        main(sys.argv[1], sys.argv[2])
    except (OSError, EdgeRTError) as error:
        sys.exit(str(error))
