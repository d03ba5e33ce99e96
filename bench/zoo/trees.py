"""Train the trees of the zoo, and convert them to ONNX.

A trainer takes features `[N, F]` and classes `[N]`. Its model has the input `x`.
"""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

Array = NDArray[Any]


def _sklearn_boosting(train: Array, target: Array) -> bytes:
    from skl2onnx import to_onnx
    from skl2onnx.common.data_types import FloatTensorType
    from sklearn.ensemble import GradientBoostingClassifier

    fitted = GradientBoostingClassifier(random_state=7).fit(train, target)
    types = [("x", FloatTensorType([None, train.shape[1]]))]
    return bytes(to_onnx(fitted, initial_types=types, options={"zipmap": False}, target_opset=15).SerializeToString())


def _lightgbm(train: Array, target: Array) -> bytes:
    from lightgbm import LGBMClassifier
    from onnxmltools import convert_lightgbm
    from onnxmltools.convert.common.data_types import FloatTensorType

    fitted = LGBMClassifier(n_estimators=60, random_state=7, verbose=-1).fit(train, target)
    types = [("x", FloatTensorType([None, train.shape[1]]))]
    return bytes(convert_lightgbm(fitted, initial_types=types, zipmap=False, target_opset=15).SerializeToString())


def _xgboost(train: Array, target: Array) -> bytes:
    from onnxmltools import convert_xgboost
    from onnxmltools.convert.common.data_types import FloatTensorType
    from xgboost import XGBClassifier

    fitted = XGBClassifier(n_estimators=60, random_state=7, base_score=0.5).fit(train, target)
    return bytes(
        convert_xgboost(
            fitted, initial_types=[("x", FloatTensorType([None, train.shape[1]]))], target_opset=15
        ).SerializeToString()
    )


TRAINERS = {"sklearn-boosting": _sklearn_boosting, "lightgbm": _lightgbm, "xgboost": _xgboost}
