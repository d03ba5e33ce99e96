"""Open a .tflite file and run it once: `python smoke.py FILE BATCH...`. A script of its own.

Where TFLite does not like a scale or an operator it may abort the process instead of raising, so that
the builder runs this beside itself. Imports nothing of ours: it is started by its path.
"""

from __future__ import annotations

import sys

import numpy as np
from ai_edge_litert.interpreter import Interpreter


def run_once(path: str, batch: int) -> None:
    """Run on zeros, with `batch` items where the file leaves their number open."""
    interpreter = Interpreter(model_path=path, num_threads=1)
    for detail in interpreter.get_input_details():
        if -1 in detail["shape_signature"]:
            shape = [batch if length == -1 else int(length) for length in detail["shape_signature"]]
            interpreter.resize_tensor_input(detail["index"], shape)
    interpreter.allocate_tensors()
    for detail in interpreter.get_input_details():
        interpreter.set_tensor(detail["index"], np.zeros(detail["shape"], detail["dtype"]))
    interpreter.invoke()


if __name__ == "__main__":
    for batch in map(int, sys.argv[2:]):
        run_once(sys.argv[1], batch)
