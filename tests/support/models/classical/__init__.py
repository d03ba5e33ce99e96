"""Two small models of scikit-learn, and a tree ensemble written by hand, with matching samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

BOOSTING = Path(__file__).with_name("boosting.onnx")  # made by make_boosting.py
KMEANS = Path(__file__).with_name("kmeans.onnx")  # likewise


def samples(count: int, seed: int = 0) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return readings of four sensors, `[count, 4]` in their own units, and each one's class 0, 1 or 2."""
    rows = np.random.default_rng(seed).normal((20, 1000, 0.5, 3), (5, 40, 0.1, 1), (count, 4)).astype(np.float32)
    labels = np.where(rows[:, 0] > 24, 2, np.where(rows[:, 1] + 100 * rows[:, 2] > 1050, 1, 0))
    return rows, labels.astype(np.int64)


def tree(outputs: str = "int64[N] label, float[N,3] scores") -> Any:
    """Return a tree of two splits over `float[N,4] x`.

    If the first value is low, the second value decides between class 0 and class 1. Otherwise the class is 2.
    """
    from onnx import parser

    return parser.parse_model(f"""
        <ir_version: 8, opset_import: ["" : 17, "ai.onnx.ml" : 3]>
        tree (float[N,4] x) => ({outputs}) {{
            label, scores = ai.onnx.ml.TreeEnsembleClassifier <
                nodes_treeids = [0, 0, 0, 0, 0], nodes_nodeids = [0, 1, 2, 3, 4], nodes_featureids = [0, 1, 0, 0, 0],
                nodes_modes = ["BRANCH_LEQ", "BRANCH_LEQ", "LEAF", "LEAF", "LEAF"],
                nodes_values = [24.0, 1000.0, 0.0, 0.0, 0.0],
                nodes_truenodeids = [1, 3, 0, 0, 0], nodes_falsenodeids = [2, 4, 0, 0, 0],
                class_treeids = [0, 0, 0], class_nodeids = [3, 4, 2], class_ids = [0, 1, 2],
                class_weights = [1.0, 1.0, 1.0], classlabels_int64s = [0, 1, 2], post_transform = "NONE"> (x)
        }}
    """)
