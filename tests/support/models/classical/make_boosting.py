"""Make boosting.onnx and kmeans.onnx: models of scikit-learn of `samples`, as skl2onnx converts them by default.

python -m tests.support.models.classical.make_boosting      # in a Python that has scikit-learn and skl2onnx
"""

from __future__ import annotations

from pathlib import Path

from tests.support.models.classical import samples

if __name__ == "__main__":
    from skl2onnx import to_onnx
    from sklearn.cluster import KMeans
    from sklearn.ensemble import GradientBoostingClassifier

    rows, labels = samples(400, seed=1)
    fitted = GradientBoostingClassifier(n_estimators=8, max_depth=3, random_state=0).fit(rows, labels)
    data = to_onnx(fitted, rows[:1], target_opset={"": 17, "ai.onnx.ml": 3}).SerializeToString()
    Path(__file__).with_name("boosting.onnx").write_bytes(data)
    clusters = KMeans(3, random_state=0, n_init=3).fit(rows)
    data = to_onnx(clusters, rows[:1], target_opset={"": 17, "ai.onnx.ml": 3}).SerializeToString()
    Path(__file__).with_name("kmeans.onnx").write_bytes(data)
