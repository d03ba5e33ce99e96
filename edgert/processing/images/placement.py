"""The mapping of coordinates between a sent image and the model's image: arithmetic without pixels.

Coordinates are continuous and start at the top left corner: pixel i covers i to i + 1.
"""

from __future__ import annotations

from typing import NamedTuple

from edgert.bundle.rules import Resize


class Placement(NamedTuple):
    """Maps an image of `width` x `height`: x becomes x * scale_x + offset_x in the model's image."""

    width: int
    height: int
    scale_x: float = 1.0
    scale_y: float = 1.0
    offset_x: float = 0.0
    offset_y: float = 0.0


class ResizeSteps(NamedTuple):
    """The steps to the model's image: resize `box` of the source to `width` x `height` at (`left`, `top`).

    `box` is left, top, right, bottom. `full` is the size of the whole source at the scale of the resized box.
    """

    box: tuple[float, float, float, float]
    width: int
    height: int
    left: int
    top: int
    full: tuple[int, int]
    placement: Placement


def resize_steps(rule: Resize, width: int, height: int) -> ResizeSteps:
    """Return how `rule` resizes an image of `width` x `height`."""
    if rule.rule == "letterbox":
        return _letterboxed(rule, width, height)
    if rule.rule == "crop":
        return _cropped(rule, width, height)
    placement = Placement(width, height, rule.width / width, rule.height / height)
    return ResizeSteps((0, 0, width, height), rule.width, rule.height, 0, 0, (rule.width, rule.height), placement)


def _letterboxed(rule: Resize, width: int, height: int) -> ResizeSteps:
    scale = min(rule.width / width, rule.height / height)
    new_width = min(rule.width, max(1, round(width * scale)))
    new_height = min(rule.height, max(1, round(height * scale)))
    left, top = (rule.width - new_width) // 2, (rule.height - new_height) // 2
    # The sides are whole pixels, so the scales of x and y differ slightly. With both, the reverse mapping is exact.
    placement = Placement(width, height, new_width / width, new_height / height, left, top)
    return ResizeSteps((0, 0, width, height), new_width, new_height, left, top, (new_width, new_height), placement)


def _cropped(rule: Resize, width: int, height: int) -> ResizeSteps:
    """Return the steps of torchvision's Resize(shortest_side) and CenterCrop.

    The longer side is rounded down, like in torchvision.
    """
    if rule.shortest_side:
        short, long = min(width, height), max(width, height)
        longer = rule.shortest_side * long // short
        full = (rule.shortest_side, longer) if width <= height else (longer, rule.shortest_side)
    else:
        scale = max(rule.width / width, rule.height / height)
        full = (max(rule.width, round(width * scale)), max(rule.height, round(height * scale)))
    left, top = round((full[0] - rule.width) / 2), round((full[1] - rule.height) / 2)
    scale_x, scale_y = full[0] / width, full[1] / height
    box = (
        left / scale_x,
        top / scale_y,
        min(width, (left + rule.width) / scale_x),
        min(height, (top + rule.height) / scale_y),
    )
    placement = Placement(width, height, scale_x, scale_y, -left, -top)
    return ResizeSteps(box, rule.width, rule.height, 0, 0, full, placement)
