"""The near cache: only near frames share an answer, and its answers are compared with the engine's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgert.tensors import TensorSpec
from edgert.worker.pipeline.near_cache import (
    AGREEMENT_MIN,
    ENTRIES_MAX,
    FIRST_COMPARED,
    OFF_S,
    SAMPLE_EVERY,
    NearCache,
    image_axes,
)
from tests.support.devices import a_device

NHWC = TensorSpec("image", "UINT8", (-1, 64, 64, 3))
ANSWER = [np.array([[0.1, 0.9]], np.float32)]
OTHER = [np.array([[0.9, 0.1]], np.float32)]


def a_cache(
    distance: float = 0.02, spec: TensorSpec = NHWC, value_range: float = 255.0
) -> tuple[NearCache, list[float]]:
    now = [1000.0]
    return NearCache(spec, distance, value_range, ttl_s=60.0, scores=0, clock=lambda: now[0]), now


def a_frame(seed: int = 0) -> NDArray[Any]:
    return np.random.default_rng(seed).integers(40, 200, (1, 64, 64, 3)).astype(np.uint8)


def trusted(cache: NearCache, frame: NDArray[Any], answer: list[NDArray[Any]] = ANSWER) -> None:
    """Keep `frame` and pass the first comparisons."""
    cache.keep(cache.look_up(frame), answer)
    for _ in range(FIRST_COMPARED):
        near = cache.look_up(frame)
        assert near.sampled
        cache.count_agreement(near, answer)


def test_a_frame_that_resembles_an_earlier_frame_gets_its_answer() -> None:
    cache, _ = a_cache()
    frame = a_frame()
    trusted(cache, frame)
    near = cache.look_up(np.clip(frame.astype(int) + 2, 0, 255).astype(np.uint8))
    assert near.outputs is not None
    assert not near.sampled
    assert near.outputs[0].tolist() == ANSWER[0].tolist()
    assert cache.status().hits == 1
    assert 0 < cache.status().distance_mean <= 0.02


def test_a_change_of_one_small_cell_is_noticed() -> None:
    cache, _ = a_cache()
    frame = a_frame()
    trusted(cache, frame)
    changed = frame.copy()
    changed[0, 8:12, 8:12] = 255  # one cell of 256
    assert cache.look_up(changed).outputs is None


def test_a_slow_change_ends_the_use_of_an_old_answer() -> None:
    cache, _ = a_cache()
    frame = np.full((1, 64, 64, 3), 100, np.uint8)
    trusted(cache, frame)
    found = [cache.look_up(frame + np.uint8(step)).outputs is not None for step in range(12)]
    assert found == [True] * 6 + [False] * 6  # 5 / 255 is within 0.02, 6 / 255 is not


def test_answers_expire_and_the_number_of_frames_is_bounded() -> None:
    cache, now = a_cache()
    for seed in range(ENTRIES_MAX + 4):
        cache.keep(cache.look_up(a_frame(seed)), ANSWER)
    assert cache.look_up(a_frame(0)).outputs is None
    assert cache.look_up(a_frame(ENTRIES_MAX)).outputs is not None
    now[0] += 61.0
    assert cache.look_up(a_frame(ENTRIES_MAX)).outputs is None


def test_a_fixed_share_of_near_hits_is_computed_and_compared() -> None:
    cache, _ = a_cache()
    frame = a_frame()
    trusted(cache, frame)
    sampled = 0
    for _ in range(10 * (SAMPLE_EVERY + 1)):
        near = cache.look_up(frame)
        if near.sampled:
            sampled += 1
            cache.count_agreement(near, ANSWER)
    assert sampled == 10
    assert cache.status().agreement == 1.0


def test_the_near_cache_turns_itself_off_if_the_engine_disagrees_and_starts_again_later() -> None:
    cache, now = a_cache()
    frame = a_frame()
    cache.keep(cache.look_up(frame), ANSWER)
    while cache.on:
        near = cache.look_up(frame)
        assert near.sampled, "before it is trusted nobody gets a wrong answer"
        cache.count_agreement(near, OTHER)
    assert (cache.status().agreement or 0.0) < AGREEMENT_MIN
    assert "on again" in cache.status().why
    now[0] += OFF_S + 1
    assert cache.on
    assert cache.look_up(frame).outputs is None, "what was wrong is forgotten"


def test_one_disagreement_does_not_turn_the_near_cache_off() -> None:
    cache, _ = a_cache()
    frame = a_frame()
    trusted(cache, frame)
    near = cache.look_up(frame)
    cache.count_agreement(near, OTHER)
    assert cache.on


@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((-1, 3, 8, 8), 0),
        ((-1, 8, 8, 3), 2),
        ((-1, 1, 20, 20), 0),
        ((-1, 8, 8), None),
        ((-1, 8, 8, 7), None),
        ((-1, 3, -1, 8), None),
    ],
)
def test_images_are_recognized_by_their_channels(shape: tuple[int, ...], axis: int | None) -> None:
    assert image_axes(TensorSpec("x", "FP32", shape)) == axis


@pytest.mark.parametrize(
    ("size", "layout"), [((5, 7), "nhwc"), ((17, 100), "nchw"), ((224, 224), "nchw"), ((8, 8), "nchw")]
)
def test_signatures_are_equal_for_both_layouts(size: tuple[int, int], layout: str) -> None:
    frame = np.random.default_rng(1).random((1, *size, 3)).astype(np.float32)
    shape: tuple[int, ...] = (-1, *size, 3)
    given = frame
    if layout == "nchw":
        given, shape = np.moveaxis(frame, 3, 1), (-1, 3, *size)
    one, _ = a_cache(spec=TensorSpec("x", "FP32", shape), value_range=1.0)
    other, _ = a_cache(spec=TensorSpec("x", "FP32", (-1, *size, 3)), value_range=1.0)
    np.testing.assert_allclose(one.signature(given), other.signature(frame), rtol=1e-5)
    assert 0 <= float(one.signature(given).min()) <= float(one.signature(given).max()) <= 1.0


def test_the_daemon_answers_a_near_frame_from_the_near_cache_and_flags_it() -> None:
    frame = np.random.default_rng(3).random((1, 8, 8, 3)).astype(np.float32)
    with a_device("[models.echo]\nnear = 0.05\n") as device:
        device.put(item_shape=(8, 8, 3))
        with device.client() as client:
            for _ in range(FIRST_COMPARED + 1):
                assert not client.infer("echo", frame, trace=True).cache_hit
            like = client.infer("echo", frame + np.float32(0.01), trace=True)
            unlike = client.infer("echo", frame[:, ::-1], trace=True)
            asked = client.infer("echo", frame + np.float32(0.01), cache=False)["y"]
        stats = device.serving()["near"]
    assert (like.cache_hit, like.batch) == (True, 0)
    assert like.outputs["y"].tolist() == frame.tolist()
    assert not unlike.cache_hit
    assert asked.tolist() == (frame + np.float32(0.01)).tolist()
    assert (stats["hits"], stats["sampled"], stats["agreement"]) == (1, FIRST_COMPARED, 1.0)
