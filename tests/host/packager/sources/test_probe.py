"""The probe: a hostile model ends in one clear error, within bounded memory and time."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edgert.errors import SourceInvalid
from edgert_deploy.packager.processes.sandbox import ChildFailed, Limits
from edgert_deploy.packager.sources.probe import (
    GIB,
    MEMORY_BYTES_MIN,
    ProbeRequest,
    limits_for,
    probe,
    refusal,
    run_in_child,
)
from tests.support import models


def crash(request: dict[str, Any], data: bytes, progress: Callable[[str], None]) -> tuple[dict[str, Any], bytes]:
    progress("onnx read it")
    progress("onnxruntime 1.99 loaded it")
    os.kill(os.getpid(), signal.SIGSEGV)
    return {}, b""


def take_memory(request: dict[str, Any], data: bytes, progress: Callable[[str], None]) -> tuple[dict[str, Any], bytes]:
    np.ones(2**34, np.uint8)
    return {}, b""


def take_time(request: dict[str, Any], data: bytes, progress: Callable[[str], None]) -> tuple[dict[str, Any], bytes]:
    while True:
        pass


def print_and_raise(
    request: dict[str, Any], data: bytes, progress: Callable[[str], None]
) -> tuple[dict[str, Any], bytes]:
    print("a banner")
    raise KeyError("what nobody foresaw")


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (
            crash,
            r"a crash \(SIGSEGV\) while onnxruntime 1\.99 loaded it\. Either the file is damaged, or .* another version",
        ),
        (take_memory, r"more than 2\.0 GiB of memory"),
        (take_time, "more than 1 s"),
        (print_and_raise, "could not be checked: .*foresaw"),
    ],
)
def test_a_failure_in_the_probe_ends_only_the_probe(function: Callable[..., Any], says: str) -> None:
    limits = Limits(2 * GIB, 1 if function is take_time else 60)
    with pytest.raises(SourceInvalid, match=says):
        run_in_child(f"{__name__}:{function.__name__}", {}, b"", limits)


def fills_memory() -> Any:
    body = "c = ConstantOfShape (s) r = ReduceSum <keepdims = 0> (c) y = Add (x, r)"
    return models.model("float[N,4] x) => (float[N,4] y", body, {"s": np.array([2**20, 2**20])})


def never_ends() -> Any:
    from onnx import parser

    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[N,4] x) => (float[N,4] y)
        <int64 times = {4611686018427387904}, bool go = {1}>
        { y = Loop (times, go, x) <body = b (int64 i, bool c, float[N,4] a) => (bool d, float[N,4] s)
          { d = Identity (c) s = Neg (a) }> }"""
    return parser.parse_model(text)


def functions(*calls: tuple[str, str]) -> Any:
    """Return a model with functions, each of which calls another function twice."""
    from onnx import helper

    proto = models.model("float[N,4] x) => (float[N,4] y", "y = Relu (x)")
    proto.graph.node[0].op_type, proto.graph.node[0].domain = calls[-1][0], "own"
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    for name, called in calls:
        domain = "" if called == "Relu" else "own"
        nodes = [helper.make_node(called, [a], [b], domain=domain) for a, b in (("a", "c"), ("c", "b"))]
        proto.functions.append(helper.make_function("own", name, ["a"], ["b"], nodes, opsets))
    proto.opset_import.add(domain="own", version=1)
    return proto


def calls_itself() -> Any:
    return functions(("F", "G"), ("G", "F"))


def doubles_forty_times() -> Any:
    return functions(("F0", "Relu"), *((f"F{i}", f"F{i - 1}") for i in range(1, 40)))


def many_nothings() -> Any:
    proto = models.mlp()
    proto.graph.node.extend([proto.graph.node.add()] * 300_000)
    return proto


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (fills_memory, r"more than 4\.0 GiB of memory"),
        (never_ends, "more than 1 s"),
        (calls_itself, "recursive|cycle|Cycle"),
        (doubles_forty_times, "more than 1 s|GiB of memory"),
        (many_nothings, "operators; a model has at most 200000"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_the_probe_stops_a_bomb_at_the_limits(make: Callable[[], Any], says: str) -> None:
    limits = Limits(MEMORY_BYTES_MIN, 1 if "1 s" in says else 60)
    with pytest.raises(SourceInvalid, match=says):
        probe("onnx", ProbeRequest("bomb.onnx", ""), make().SerializeToString(), limits=limits)


def test_larger_files_get_higher_limits() -> None:
    small, large = limits_for(1000), limits_for(10**9)
    assert small.memory_bytes < large.memory_bytes
    assert small.time_s < large.time_s


def test_a_probe_that_waited_is_reported_as_a_busy_machine_and_not_as_a_bad_model() -> None:
    message = refusal(ChildFailed("wait", ""), Limits(GIB, 60)).message
    assert "1200 s" in message
    assert "overloaded" in message
    assert "loop" not in message
