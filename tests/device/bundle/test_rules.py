"""Processing rules: a wrong rule is refused with the reason, before a device applies it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgert.bundle.rules import (
    IMAGE_SIDE_MAX,
    Classify,
    Ctc,
    Detect,
    Preprocess,
    Resize,
    Smooth,
    check_rules,
    height_and_width,
)
from edgert.errors import BundleError
from edgert.tensors import TensorSpec

INPUTS = (TensorSpec("x", "FP32", (-1, 3, 64, 64)),)
OUTPUTS = (TensorSpec("scores", "FP32", (-1, 10)), TensorSpec("boxes", "FP32", (-1, 14, 100)))
RESIZE = Resize("letterbox", 64, 64)
PREPROCESS = Preprocess("x", resize=RESIZE, decode=True)
DETECT = Detect("boxes")
CTC = Ctc("boxes", tuple("abcdefghijklmn"), time_axis="last")


@pytest.mark.parametrize(
    ("shape", "size"),
    [((-1, 3, 48, 64), (48, 64)), ((-1, 48, 64, 3), (48, 64)), ((1, 48, 64, 4), (48, 64)), ((-1, 1, 8, 3), (8, 3))],
)
def test_the_axis_of_channels_shows_the_height_and_the_width(shape: tuple[int, ...], size: tuple[int, int]) -> None:
    assert height_and_width(shape) == size
    assert height_and_width(shape, "nhwc") == shape[1:3]


def test_rules_that_fit_the_model_are_accepted() -> None:
    check_rules(PREPROCESS, Classify("scores", ()), DETECT, INPUTS, OUTPUTS)
    check_rules(None, None, None, INPUTS, OUTPUTS)
    check_rules(None, Classify("scores", threshold=(0.5,) * 10, smooth=Smooth("all", 2)), None, INPUTS, OUTPUTS, CTC)


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        (replace(PREPROCESS, input="y"), "which the model does not have"),
        (replace(PREPROCESS, layout="chw"), "layout 'chw'; known"),
        (replace(PREPROCESS, colour="gray"), "needs 3 channels"),
        (replace(PREPROCESS, model_layout="nhwc", resize=None), "images have 1 or 3 channels, but input 'x' has 64"),
        (replace(PREPROCESS, frame_colour="gray"), "between gray and colour"),
        (replace(PREPROCESS, std=(0.0,)), "no std may be 0"),
        (replace(PREPROCESS, mean=(1e31,)), "finite mean"),
        (replace(PREPROCESS, scale=1e31), "a finite scale"),
        (replace(PREPROCESS, resize=replace(RESIZE, height=32)), "resizing gives 32 x 64"),
        (replace(PREPROCESS, resize=replace(RESIZE, rule="squeeze")), "rule 'squeeze'"),
        (replace(PREPROCESS, resize=replace(RESIZE, pad_value=256)), "pad_value 256"),
        (replace(PREPROCESS, resize=replace(RESIZE, shortest_side=IMAGE_SIDE_MAX + 1)), "shortest_side"),
        (Classify("logits", ()), "which the model does not have"),
        (Classify("scores", (), top_k=0), "top_k >= 1"),
        (Classify("scores", ("a", "b"), threshold=(0.5,) * 3), "3 thresholds; give one finite number, or 2"),
        (Classify("scores", threshold=(float("nan"),)), "one finite number"),
        (Classify("scores", ("a", "b"), none=("c",)), "the key none has 'c', which is not a label"),
        (Classify("scores", smooth=Smooth("median", 3)), "rule 'median'; known: mean"),
        (Classify("scores", smooth=Smooth("mean", 1)), "windows = 1; give 2 to 1000"),
        (Classify("scores", top_k=2, smooth=Smooth("all", 3)), "leave top_k at 1"),
        (replace(CTC, output="text"), "which the model does not have"),
        (replace(CTC, output="scores"), "needs class scores"),
        (replace(CTC, time_axis="first"), "14 labels, and output 'boxes' has 100 classes"),
        (replace(CTC, time_axis="middle"), "time_axis 'middle'"),
        (replace(CTC, blank=14), "a class from 0 to 13"),
        (replace(CTC, labels=("\0", *CTC.labels[1:])), "NUL"),
        (replace(DETECT, boxes="bbox"), "which the model does not have"),
        (replace(DETECT, boxes="scores"), "needs outputs of 3 axes"),
        (replace(DETECT, form="rows"), "form 'rows'"),
        (replace(DETECT, iou_threshold=1.5), "from 0 to 1"),
        (replace(DETECT, scores="boxes"), "14 values a box"),
    ],
)
def test_a_rule_that_does_not_fit_is_refused(rule: Preprocess | Classify | Detect | Ctc, reason: str) -> None:
    with pytest.raises(BundleError, match=reason):
        check_rules(
            rule if isinstance(rule, Preprocess) else None,
            rule if isinstance(rule, Classify) else None,
            rule if isinstance(rule, Detect) else None,
            INPUTS,
            OUTPUTS,
            rule if isinstance(rule, Ctc) else None,
        )


def test_an_output_of_the_model_with_the_name_of_an_added_output_is_refused() -> None:
    with pytest.raises(BundleError, match="rename it in the model"):
        check_rules(PREPROCESS, None, DETECT, INPUTS, (*OUTPUTS, TensorSpec(DETECT.added[0], "FP32", (-1,))))
