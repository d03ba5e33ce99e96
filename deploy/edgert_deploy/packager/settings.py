"""The settings of a build. They import no NumPy, because the help of `edgert build` shows them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

METRICS = ("auto", "top1", "top5", "map", "wer", "cer", "window_f1", "event_f1", "decisions", "cosine")
DROP_MAX = 0.01
BUDGET_DEFAULT = 12  # enough for about two searches in a model of 100 layers

RequestedPrecision = Literal["auto", "int8", "fp16", "fp32"]


@dataclass(frozen=True, kw_only=True)
class BuildSettings:
    """The user's settings that the build uses unchanged.

    Attributes:
        max_class_drop: The largest drop in any class or slice. None means no limit.
        metric: A name from metrics.py, or the user's own metric as `module:function`.
        precision: The precision to build. With None, it is each profile's own precision, or "auto" for a model of
            classical machine learning.
        engines: "all" builds an artifact for each engine of a profile that supports the model. "first" builds an
            artifact for the first such engine only.
        recipe: The recipe of INT8 in each engine that has this recipe. With "", the build tries several recipes.
        budget: The number of artifacts that all searches for layers in float may build together.
        with_reference: Add an FP32 artifact of the same engine for each target whose own artifact is not FP32. Devices
            can compare their live answers with the answers of this artifact (docs/serving.md).
        jobs: The number of artifacts to build at once. With 0, as many as fit are built at once.
    """

    release: int = 1
    max_drop: float = DROP_MAX
    max_class_drop: float | None = None
    metric: str = "auto"
    allow_overlap: bool = False
    precision: RequestedPrecision | None = None
    engines: Literal["all", "first"] = "all"
    recipe: str = ""
    budget: int = BUDGET_DEFAULT
    with_reference: bool = False
    licence: str = ""
    notes: str = ""
    jobs: int = 0
