"""The prediction cache: right answers, limited memory, one run for identical requests, off if it does not pay."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgert.errors import EngineFailed
from edgert.worker.pipeline.cache import ENTRY_OVERHEAD_BYTES, OFF_S, OFF_S_MAX, PROBE_LOOKUPS, PredictionCache, tag_of
from tests.support.devices import WAIT_S_MAX, wait_until


def a_cache(max_bytes: int = 10**6, ttl_s: float = 60.0) -> tuple[PredictionCache, list[float]]:
    now = [100.0]
    return PredictionCache(max_bytes, ttl_s, clock=lambda: now[0]), now


class Runs:
    """Counts its runs and returns the answer that it was created with."""

    def __init__(self, value: float = 1.0, size: int = 10) -> None:
        self.count, self.value, self.size = 0, value, size

    def __call__(self) -> list[NDArray[Any]]:
        self.count += 1
        return [np.full(self.size, self.value, np.float32)]


def test_the_second_of_two_equal_requests_is_answered_without_a_run() -> None:
    cache, _ = a_cache()
    run = Runs(7)
    assert cache.get_or_run(b"k", run)[1] is False
    value, hit = cache.get_or_run(b"k", run)
    assert hit
    assert value[0].tolist() == [7.0] * 10
    assert run.count == 1


def test_keys_differ_for_different_values_or_shapes_or_dtypes() -> None:
    cache, _ = a_cache()
    zeros = np.zeros(8, np.float32)
    inputs: list[list[NDArray[Any]]] = [
        [zeros],
        [zeros.reshape(2, 4)],
        [zeros.view(np.int32)],
        [np.ones(8, np.float32)],
        [zeros, zeros],
        [zeros[:4], zeros[:4]],
    ]
    assert len({cache.key(given, tag_of(given)) for given in inputs}) == len(inputs)
    tag = tag_of([zeros])
    assert cache.key([zeros], tag) == cache.key([zeros.copy()], tag)


def test_two_caches_give_the_same_input_different_keys() -> None:
    zeros = [np.zeros(8, np.float32)]
    assert a_cache()[0].key(zeros, b"") != a_cache()[0].key(zeros, b"")


def test_simultaneous_identical_inputs_run_once() -> None:
    cache, _ = a_cache()
    begun, go_on = threading.Event(), threading.Event()
    count = [0]

    def slow() -> list[NDArray[Any]]:
        count[0] += 1
        begun.set()
        assert go_on.wait(WAIT_S_MAX)
        return [np.ones(3)]

    with ThreadPoolExecutor(5) as pool:
        first = pool.submit(cache.get_or_run, b"k", slow)
        assert begun.wait(WAIT_S_MAX)
        others = [pool.submit(cache.get_or_run, b"k", slow) for _ in range(4)]
        wait_until(lambda: len(cache._entries[b"k"].gates) == 4, "the others wait for the first")
        go_on.set()
        assert first.result(WAIT_S_MAX)[1] is False
        assert all(other.result(WAIT_S_MAX)[1] for other in others)
    assert count[0] == 1


def test_a_failure_is_not_cached_and_the_waiting_requests_run_themselves() -> None:
    cache, _ = a_cache()
    begun, go_on = threading.Event(), threading.Event()

    def fails() -> list[NDArray[Any]]:
        begun.set()
        assert go_on.wait(WAIT_S_MAX)
        raise EngineFailed("no")

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(cache.get_or_run, b"k", fails)
        assert begun.wait(WAIT_S_MAX)
        other = pool.submit(cache.get_or_run, b"k", Runs(5))
        wait_until(lambda: len(cache._entries[b"k"].gates) == 1, "the other waits")
        go_on.set()
        with pytest.raises(EngineFailed):
            first.result(WAIT_S_MAX)
        assert other.result(WAIT_S_MAX)[0][0][0] == 5
    assert cache.get_or_run(b"k", Runs(6))[0][0][0] == 6


def test_bytes_are_bounded_and_the_least_recently_used_goes_first() -> None:
    entry = ENTRY_OVERHEAD_BYTES + 40
    cache, _ = a_cache(max_bytes=3 * entry)
    for name in (b"a", b"b", b"c"):
        cache.get_or_run(name, Runs())
    cache.get_or_run(b"a", Runs())
    cache.get_or_run(b"d", Runs())
    assert cache.size_bytes == 3 * entry
    assert cache.get_or_run(b"a", Runs())[1]
    assert not cache.get_or_run(b"b", Runs())[1]


def test_a_new_answer_in_a_full_cache_visits_only_the_answers_that_it_displaces() -> None:
    class Visited(OrderedDict[Any, Any]):
        count = 0

        def __iter__(self) -> Iterator[Any]:
            for key in super().__iter__():
                self.count += 1
                yield key

        def items(self) -> Any:
            return ((key, self[key]) for key in self)

    cache, _ = a_cache(max_bytes=100 * (ENTRY_OVERHEAD_BYTES + 40))
    cache._entries = entries = Visited()
    for i in range(110):
        cache.get_or_run(str(i).encode(), Runs())
    assert (len(entries), entries.count) == (100, 10)


def test_an_answer_that_is_larger_than_the_cache_is_returned_and_not_kept() -> None:
    cache, _ = a_cache(max_bytes=1000)
    assert len(cache.get_or_run(b"big", Runs(size=5000))[0][0]) == 5000
    assert cache.size_bytes == 0


def test_an_answer_expires() -> None:
    cache, now = a_cache(ttl_s=10.0)
    run = Runs()
    cache.get_or_run(b"k", run)
    now[0] += 9.0
    assert cache.get_or_run(b"k", run)[1]
    now[0] += 2.0
    assert not cache.get_or_run(b"k", run)[1]


def test_a_client_cannot_change_a_cached_answer() -> None:
    cache, _ = a_cache()
    cache.get_or_run(b"k", Runs())
    value, _ = cache.get_or_run(b"k", Runs())
    with pytest.raises(ValueError):
        value[0][0] = 9


def test_the_cache_turns_itself_off_if_hits_do_not_pay_and_tries_again_later() -> None:
    cache, now = a_cache()
    for i in range(PROBE_LOOKUPS):
        _, hit = cache.get_or_run(i.to_bytes(4, "little"), Runs())
        cache.count_lookup(hit, spent_ns=2000, engine_ns=20_000)
    assert not cache.on
    assert cache.size_bytes == 0
    now[0] += OFF_S + 1
    assert cache.on


def test_the_cache_stays_on_if_hits_pay() -> None:
    cache, _ = a_cache()
    for i in range(PROBE_LOOKUPS):
        _, hit = cache.get_or_run(bytes([i % 4]), Runs())
        cache.count_lookup(hit, spent_ns=2000, engine_ns=20_000)
    assert cache.on


def test_without_memory_the_cache_is_off() -> None:
    assert not a_cache(max_bytes=0)[0].on


def probed(cache: PredictionCache, hits: int, spent_ns: int = 2000, engine_ns: int = 20_000) -> None:
    """Make one round of PROBE_LOOKUPS lookups, with `hits` hits."""
    for i in range(PROBE_LOOKUPS):
        cache.count_lookup(i < hits, spent_ns=spent_ns, engine_ns=engine_ns)


def test_the_cache_stays_on_exactly_if_hits_save_more_than_lookups_take() -> None:
    # 2 µs a lookup, 20 µs a run: one hit in ten lookups pays for all ten.
    for hits, on in ((PROBE_LOOKUPS // 12, False), (PROBE_LOOKUPS // 8, True)):
        cache, _ = a_cache()
        probed(cache, hits)
        assert cache.on is on


def test_the_cache_stays_on_if_every_lookup_is_a_hit() -> None:
    cache, _ = a_cache()
    probed(cache, PROBE_LOOKUPS, engine_ns=0)
    assert cache.on


def test_the_cache_does_not_flap_if_its_hits_save_about_its_cost() -> None:
    cache, now = a_cache()
    pauses: list[float] = []
    for _ in range(8):
        probed(cache, PROBE_LOOKUPS // 11)  # slightly too few hits
        assert not cache.on
        began = now[0]
        while not cache.on:
            now[0] += 1.0
        pauses.append(now[0] - began)
        probed(cache, PROBE_LOOKUPS // 9)  # slightly more hits than enough: too few to stay on after a pause
        assert not cache.on
        while not cache.on:
            now[0] += 1.0
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (OFF_S, OFF_S_MAX)


def test_the_cache_stays_on_again_once_hits_clearly_pay() -> None:
    cache, now = a_cache()
    probed(cache, 0)
    now[0] += OFF_S
    probed(cache, PROBE_LOOKUPS // 2)
    assert cache.on
    probed(cache, PROBE_LOOKUPS // 9)
    assert cache.on, "after a good measurement, breaking even is enough again"


def test_the_stats_report_whether_the_cache_is_on_and_why() -> None:
    cache, now = a_cache()
    assert "512 lookups" in cache.status().why
    probed(cache, 0)
    said = cache.status()
    assert (said.on, said.worth) == (False, 0.0)
    assert said.why == "off: hits saved 0.0 times the time of lookups; on again in 30 s"
    now[0] += OFF_S
    assert cache.status().why.startswith("on again")
    probed(cache, PROBE_LOOKUPS // 2)
    assert cache.status().why.startswith("on: hits saved")
