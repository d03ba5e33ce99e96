"""The reach of the TFLite lowering, by the ONNX project's own node tests (`onnx.backend.test`).

Each test's model is lowered to a float32 .tflite file, run in TFLite's interpreter, and compared with the test's
outputs at the test's tolerances. `support/node_cases.py` decides which tests are expected to pass, and why the others
are not.

    expected      tests of operators that the lowering supports; `passed` of them pass
    unsupported   all other tests; each must be refused with a reason, or pass; none may give a wrong answer

The tests run in processes of their own, so that an abort of the interpreter fails one test only.

    python -m bench.node_tests                     # a summary; exit code 1 if a test fails that is expected to pass
    python -m bench.node_tests --operator Conv     # the tests with Conv, each with its result
    python -m bench.node_tests --json              # one JSON object
    python -m bench.node_tests --docs              # rewrite docs/tflite-operators.md
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np

from bench.support.node_cases import (
    CONSTANT_INPUTS,
    PROMISED_GROUPS,
    NodeTest,
    bound,
    load_tests,
    reason_outside,
    without_lowering,
)
from tests.support.paths import ROOT

DOCS_PAGE = ROOT / "docs/tflite-operators.md"
# A test takes about 10 ms, so a test that takes this long hangs.
TEST_TIMEOUT_S = 120
PROCESSES_MAX = 8

PASSED, REFUSED, WRONG, CRASHED = "passed", "refused", "wrong", "crashed"


@dataclass(frozen=True)
class Result:
    """The result of one test. `outside` is the reason why the test is not expected to pass, or None."""

    name: str
    operators: tuple[str, ...]
    outside: str | None
    status: str
    detail: str = ""

    @property
    def is_broken(self) -> bool:
        """Return whether the test gave a wrong answer, ended the process, or failed although it should pass."""
        return self.status in (WRONG, CRASHED) or (self.outside is None and self.status != PASSED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--docs", action="store_true", help=f"rewrite {DOCS_PAGE.relative_to(ROOT)}")
    parser.add_argument("--operator", action="append", metavar="NAME", help="only tests that hold this operator")
    parser.add_argument("--processes", type=int, default=min(os.cpu_count() or 1, PROCESSES_MAX), metavar="N")
    arguments = parser.parse_args()
    if arguments.docs and arguments.operator:
        parser.error("--docs takes all tests: leave --operator out")
    tests = load_tests()
    if arguments.operator:
        tests = [test for test in tests if set(arguments.operator) & set(test.operators)]
        if not tests:
            parser.error(f"no node test holds {', '.join(arguments.operator)}; names are as in ONNX, e.g. Conv")
    results = run_tests(tests, arguments.processes)
    if arguments.docs:
        DOCS_PAGE.write_text(page(results))
    if arguments.json:
        print(json.dumps(summary(results), indent=1))
    else:
        _print(results, each=bool(arguments.operator))
    sys.stdout.flush()
    sys.exit(any(result.is_broken for result in results))


def summary(results: Sequence[Result]) -> dict[str, Any]:
    expected = [r for r in results if r.outside is None]
    unsupported = [r for r in results if r.outside is not None]
    return {
        "passed": sum(r.status == PASSED for r in expected),
        "expected": len(expected),
        "unsupported": len(unsupported),
        "total": len(results),
        "unsupported_that_pass": sum(r.status == PASSED for r in unsupported),
        "failed": {r.name: f"{r.status}: {r.detail}" for r in expected if r.is_broken},
        "wrong": {r.name: f"{r.status}: {r.detail}" for r in unsupported if r.is_broken},
        "unsupported_by_reason": dict(_by_reason(unsupported)),
    }


# --- running


def run_tests(tests: Sequence[NodeTest], processes: int) -> list[Result]:
    """Return each test's result, in order. Progress goes to stderr."""
    done: dict[int, Result] = {}
    workers = [_Worker(tests, list(range(first, len(tests), processes))) for first in range(processes)]
    while busy := [worker for worker in workers if worker.waiting]:
        ready = wait([worker.pipe for worker in busy], TEST_TIMEOUT_S)
        for worker in busy:
            if worker.pipe in ready or not ready:
                index, result = worker.take()
                done[index] = result
                _progress(len(done), len(tests))
    return [done[index] for index in range(len(tests))]


class _Worker:
    """A process that runs the `waiting` tests in turn; it is restarted when a test ends it."""

    def __init__(self, tests: Sequence[NodeTest], waiting: list[int]) -> None:
        self.tests, self.waiting = tests, waiting
        self._start()

    def take(self) -> tuple[int, Result]:
        """Return the result of the first waiting test, after it is done, has ended the process, or hangs."""
        index = self.waiting.pop(0)
        test = self.tests[index]
        try:
            if not self.pipe.poll():
                raise TimeoutError
            status, detail = self.pipe.recv()
        except (EOFError, TimeoutError) as lost:
            self.process.kill() if isinstance(lost, TimeoutError) else self.process.join()
            status, detail = (
                CRASHED,
                "hangs" if isinstance(lost, TimeoutError) else f"exit code {self.process.exitcode}",
            )
            self._start()
        return index, Result(test.name, tuple(test.operators), reason_outside(test), status, detail)

    def _start(self) -> None:
        # A fork inherits the tests, which take seconds to make. A fork is safe, because no other thread runs.
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=_work, args=(theirs, self.tests, list(self.waiting)), daemon=True)
        self.process.start()
        theirs.close()


def _work(pipe: Connection, tests: Sequence[NodeTest], indices: Sequence[int]) -> None:
    # The interpreter's output before an abort would mix with the progress line.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    for index in indices:
        pipe.send(attempt(tests[index]))


def attempt(test: NodeTest) -> tuple[str, str]:
    """Lower, run and compare `test` in this process; return its status and a line about it."""
    from edgert.errors import EdgeRTError
    from edgert_deploy.packager.tflite_lowering import lower

    try:
        model, inputs = bound(test)
        difference = _difference(_run(lower(model), inputs), test)
    except EdgeRTError as error:
        return REFUSED, error.message
    except Exception as error:  # lower() may raise only our errors, and every file must run
        return WRONG, f"{type(error).__name__}: {error}"
    return (WRONG, difference) if difference else (PASSED, "")


def _run(content: bytes, inputs: dict[str, Any]) -> list[Any]:
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model_content=content, num_threads=1)
    interpreter.allocate_tensors()
    for detail in interpreter.get_input_details():
        interpreter.set_tensor(detail["index"], np.asarray(inputs[detail["name"]]))
    interpreter.invoke()
    return [interpreter.get_tensor(detail["index"]) for detail in interpreter.get_output_details()]


def _difference(outputs: Sequence[Any], test: NodeTest) -> str:
    """Return the difference of `outputs` from the expected outputs, or ""."""
    for got, wanted in zip(outputs, map(np.asarray, test.outputs), strict=True):
        if (got.dtype, got.shape) != (wanted.dtype, wanted.shape):
            return f"{got.dtype}{list(got.shape)} instead of {wanted.dtype}{list(wanted.shape)}"
        if not np.allclose(got, wanted, test.relative_tolerance, test.absolute_tolerance, equal_nan=True):
            worst = np.nanmax(np.abs(got.astype(np.float64) - wanted.astype(np.float64)))
            return f"differs by {worst:.3g}"
    return ""


# --- output


def page(results: Sequence[Result]) -> str:
    """Return the documentation page with its tables."""
    total = summary(results)
    expected, others = [r for r in results if r.outside is None], [r for r in results if r.outside is not None]
    wrong = sum(result.status in (WRONG, CRASHED) for result in results)
    missing = sorted({name for r in others for name in without_lowering(r.operators)}, key=str.lower)
    lines = [
        "# Operators that the TFLite lowering supports",
        "",
        "The *lowering* converts an ONNX model to TFLite. Look up each operator of your model here:",
        "",
        "- An operator in [the table](#supported-operators) works in TFLite.",
        "- With [any other operator](#operators-without-a-lowering), a build for TFLite refuses the model and names the operator.",
        "  The other engines may support it.",
        "- [A few forms](#forms-without-a-lowering) of supported operators do not work, either.",
        "",
        "The table counts *node tests*: small models with which the ONNX project tests an operator. Of its",
        f"{total['total']} node tests, {total['expected']} use only supported operators and forms. {total['passed']} of these pass in float32, at their own",
        f"tolerances (DFT: at 1e-6). {_counted(wrong)} a wrong answer. `python -m bench.node_tests --docs` makes this page;",
        "do not edit it.",
        "",
        "## Supported operators",
        "",
        "Some inputs must be constants of the model, as exporters write them. The last column gives the numbers of these",
        "inputs, counted from 0. (If a node test gives such an input at run time, the benchmark makes it a constant.)",
        "",
        "| operator | passed node tests | constant inputs |",
        "|---|---|---|",
        *_operator_rows(expected),
        "",
        "## Operators without a lowering",
        "",
        "The build replaces some of these before the lowering: an `If` whose condition is known, an `STFT` with a constant",
        "window, and the operators of [quantized models](special-models.md#quantized-models).",
        "",
        *textwrap.wrap(", ".join(missing) + ".", 120),
        "",
        "## Forms without a lowering",
        "",
        "These models do not work in TFLite, although it supports their operators:",
        "",
        "| a model with | node tests |",
        "|---|---|",
        *(
            f"| {reason} | {len(names)} |"
            for reason, names in _by_reason([r for r in others if not without_lowering(r.operators)])
        ),
        "",
    ]
    return "\n".join(lines)


def _counted(wrong: int) -> str:
    return {0: "No node test gives", 1: "1 node test gives"}.get(wrong, f"{wrong} node tests give")


def _operator_rows(expected: Sequence[Result]) -> Iterator[str]:
    held = Counter(name for result in expected for name in result.operators)
    passed = Counter(name for result in expected if result.status == PASSED for name in result.operators)
    for group, names in PROMISED_GROUPS.items():
        yield f"| **{group}** | | |"
        for name in sorted(names.split()):
            constants = ", ".join(map(str, CONSTANT_INPUTS.get(name, ())))
            yield f"| {name} | {f'{passed[name]} of {held[name]}' if held[name] else 'no node test'} | {constants} |"


def _by_reason(results: Sequence[Result]) -> list[tuple[str, list[str]]]:
    reasons: dict[str, list[str]] = {}
    for result in results:
        reasons.setdefault(str(result.outside), []).append(result.name)
    return sorted(reasons.items(), key=lambda item: (-len(item[1]), item[0]))


def _print(results: Sequence[Result], each: bool) -> None:
    for result in results:
        if each or result.is_broken:
            outside = f" (not expected to pass: {result.outside})" if result.outside else ""
            print(f"{result.status:8} {result.name}{outside} {result.detail}"[:400])
    total = summary(results)
    print(", ".join(f"{total[key]} {key}" for key in ("passed", "expected", "unsupported", "total")))


def _progress(count: int, total: int) -> None:
    if sys.stderr.isatty() and (count % 10 == 0 or count == total):
        print(f"\r{count} of {total} tests", end="\n" if count == total else "", file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:  # the reader of the output has ended, as with `| head`
        os._exit(1)
