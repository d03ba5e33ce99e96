"""The node tests of the ONNX project pass in the lowering and TFLite's interpreter (`bench/node_tests.py`)."""

from __future__ import annotations

import sys

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("ai_edge_litert")

from bench.node_tests import PASSED, run_tests
from bench.support.node_cases import load_tests

# The number of onnx 1.23's tests that pass; raise it when the lowering supports more operators. Later releases of onnx
# have more tests, and the ONNX Runtime of Python 3.10 does not accept the models of the latest opsets.
PASSED_MIN = 1160 if sys.version_info >= (3, 11) else 980


def test_every_expected_node_test_passes_and_no_node_test_gives_a_wrong_answer() -> None:
    results = run_tests(load_tests(), processes=2)
    assert {result.name: result.detail for result in results if result.is_broken} == {}
    assert sum(result.outside is None and result.status == PASSED for result in results) >= PASSED_MIN
