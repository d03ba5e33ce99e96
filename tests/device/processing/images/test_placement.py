"""Placements: the mapping from the model's image back to the sent image is exact."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from edgert.bundle.rules import Resize
from edgert.processing.answers.detect import in_source
from edgert.processing.images.placement import resize_steps


@given(
    st.sampled_from(["stretch", "crop", "letterbox"]),
    st.integers(1, 4000),
    st.integers(1, 4000),
    st.integers(8, 640),
    st.integers(8, 640),
    st.data(),
)
@settings(max_examples=300, deadline=None)
def test_points_are_converted_back_to_their_places_in_the_image(
    rule: str, width: int, height: int, model_width: int, model_height: int, data: st.DataObject
) -> None:
    placement = resize_steps(Resize(rule, model_height, model_width), width, height).placement
    x, y = data.draw(st.floats(0, width)), data.draw(st.floats(0, height))
    shown = [x * placement.scale_x + placement.offset_x, y * placement.scale_y + placement.offset_y] * 2
    back = in_source(np.array([shown], np.float32), placement)[0]
    # The precision of FP32 for a coordinate in the model's pixels, converted to the image's pixels.
    bound_x = 1e-5 * (abs(shown[0]) + abs(placement.offset_x) + 1) / placement.scale_x
    bound_y = 1e-5 * (abs(shown[1]) + abs(placement.offset_y) + 1) / placement.scale_y
    assert abs(back[0] - x) <= bound_x + 1e-3
    assert abs(back[1] - y) <= bound_y + 1e-3
