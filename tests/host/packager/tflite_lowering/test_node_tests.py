"""The node tests of the ONNX project pass in the lowering and TFLite's interpreter (`bench/node_tests.py`)."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("ai_edge_litert")

import onnx

from bench.node_tests import DOCS_PAGE, PASSED, Result, page, run_tests
from bench.support.node_cases import load_tests
from tests.support.paths import ROOT

# The number of onnx 1.23's tests that pass; raise it when the lowering supports more operators. Later releases of onnx
# have more tests, and the ONNX Runtime of Python 3.10 does not accept the models of the latest opsets.
PASSED_MIN = 1180 if sys.version_info >= (3, 11) else 980


@pytest.fixture(scope="module")
def results() -> Sequence[Result]:
    return run_tests(load_tests(), processes=2)


def test_every_expected_node_test_passes_and_no_node_test_gives_a_wrong_answer(results: Sequence[Result]) -> None:
    assert {result.name: result.detail for result in results if result.is_broken} == {}
    assert sum(result.outside is None and result.status == PASSED for result in results) >= PASSED_MIN


def test_the_page_of_operators_has_the_results_of_today(results: Sequence[Result]) -> None:
    locked = re.search(r"^onnx==(\S+)", (ROOT / "requirements/dev.txt").read_text(), re.MULTILINE)
    assert locked is not None
    if sys.version_info < (3, 11) or onnx.__version__ != locked[1]:
        pytest.skip(f"the page is of Python 3.11 or later and onnx {locked[1]}, which has other tests")
    assert DOCS_PAGE.read_text() == page(results), "run: python -m bench.node_tests --docs"
