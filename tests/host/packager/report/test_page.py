"""The report on a bundle in a real browser: complete, readable on any screen, without a request."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edgert.bundle.bundle_file import open_bundle
from edgert.bundle.rules import Classify
from edgert.bundle.signing import SigningKey
from edgert_deploy.cli import main
from edgert_deploy.devices.profiles import load_profile
from edgert_deploy.packager.pack import build_bundle
from edgert_deploy.packager.report import Report, gather
from edgert_deploy.packager.report.page import page
from edgert_deploy.packager.report.sections import SECTIONS
from edgert_deploy.packager.request import BuildRequest
from tests.support.bundles import make_null_bundle
from tests.support.servers.browser import Browser, Page, Scheme

LABELS = tuple("zero one two three four five six seven eight <b>nine</b>".split())  # noqa: SIM905 - ten words
LAYERS = [{"name": f"block{i}/conv", "op": "Conv", "sqnr_db": 12.0 + i} for i in range(60)]
RANGES = [
    {
        "layer": f"block{i}/conv",
        "op": "Conv",
        "low": -(2.0**i),
        "high": 3.0**i,
        "quantiles": [-1, 0.1, i],
        "sqnr_db": 30.5,
    }
    for i in range(60)
]


@pytest.fixture(scope="module")
def bundle(
    digits_source: Any, digits_calibration: Any, digits_holdout: Any, signing_key: SigningKey, tmp_path_factory: Any
) -> Path:
    targets = tuple(load_profile(name) for name in ("this-machine", "jetson-orin-nano"))
    out: Path = tmp_path_factory.mktemp("report") / "digits.edgert"
    request = BuildRequest(
        digits_source, digits_calibration, digits_holdout, targets, "digits",
        engines="first", classify=Classify("scores", LABELS),
    )  # fmt: skip
    build_bundle(request, signing_key, out, lambda line: None, lambda choice: None)
    return out


@pytest.fixture(scope="module")
def full(bundle: Path) -> Report:
    """Return a report with every part of a receipt: a search, times, many layers."""
    with open_bundle(bundle, None) as opened:
        report = gather(opened, bundle.stat().st_size)
    receipt = json.loads(json.dumps(report.receipt))
    receipt["targets"][0]["mixed_precision"] = [
        {"engine": "onnxruntime", "layers": LAYERS, "attempts": [], "budget_spent": False}
    ]
    receipt["targets"][0]["left_out"] = [{"engine": "tflite", "code": "build.failed", "reason": "no <kernel>"}]
    candidate = receipt["candidates"][0]
    candidate["slices"] = [{"name": "night", "samples": 40, "fp32": 0.9, "artifact": 0.75}]
    candidate["buckets"] = [{"name": "64", "samples": 30, "fp32": 0.9, "artifact": 0.9}]
    candidate["outputs"] = [{"name": "values of box", "samples": 30, "fp32": 1.0, "artifact": 0.995}]
    timing = {"id": candidate["id"], "where": "kitchen", "threads": 4, "runs": 50, "engine_version": "1"}
    receipt["targets"][0]["times"] = [
        {**timing, "p50_ms": 1.25, "p90_ms": 2.5, "error": ""},
        {**timing, "id": "tflite-int8", "p50_ms": 0.0, "p90_ms": 0.0, "error": "does not load"},
    ]
    candidate["float_layers"] = ["block0/conv"]
    receipt["activations"] = RANGES
    return replace(report, receipt=receipt)


@pytest.fixture(scope="module")
def opened_page(browser: Browser, full: Report, tmp_path_factory: Any) -> Callable[..., Page]:
    path: Path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(page(full), encoding="utf-8")

    def opened(width: int, scheme: Scheme, **more: Any) -> Page:
        return browser.open(path, width=width, scheme=scheme, **more)

    return opened


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (390, "light"), (1280, "light"), (1280, "dark")])
def test_the_page_is_complete_and_readable_on_any_screen(opened_page: Any, width: int, scheme: Scheme) -> None:
    seen = opened_page(width, scheme)
    assert seen.overflow_px() == 0
    assert seen.evaluate("[...document.querySelectorAll('h2')].map((e) => e.textContent)") == [
        title for _, title, _ in SECTIONS
    ]
    ratio, text = seen.contrast_min()
    assert ratio >= 4.5, text
    if (width, scheme) in ((390, "dark"), (1280, "light")):  # axe takes a second, and its results hardly differ
        assert seen.violations() == []
    assert seen.problems == []
    assert len(seen.requests) == 1  # the page itself
    assert seen.colours() > 20


def test_text_from_a_bundle_is_shown_and_never_executed(opened_page: Any) -> None:
    seen = opened_page(1280, "light")
    text = seen.evaluate("document.body.innerText")
    for words in (
        "<b>nine</b>",
        "no <kernel>",
        "kitchen",
        "1.25",
        "does not load",
        "night",
        "-0.1500",
        "block0/conv",
        "0.9925",
    ):
        assert words in text
    # The length of a bar is proportional to its number.
    wide, narrow = seen.evaluate("[...document.querySelectorAll('#slices rect')].map((e) => e.width.baseVal.value)")
    assert narrow / wide == pytest.approx(0.75 / 0.9, abs=0.01)


def test_the_link_to_the_content_and_the_folded_parts_work_by_keyboard(opened_page: Any) -> None:
    seen = opened_page(1280, "light")
    seen.tab.keyboard.press("Tab")
    assert seen.evaluate("document.activeElement.textContent") == "To the content"
    assert seen.evaluate("document.activeElement.getBoundingClientRect().left") >= 0
    seen.tab.locator("#harm summary").focus()
    seen.tab.keyboard.press("Enter")
    assert seen.evaluate("document.querySelector('#harm details').open")


def test_a_printed_page_shows_the_folded_parts(opened_page: Any) -> None:
    seen = opened_page(800, "light", media="print")
    assert seen.evaluate("document.querySelector('#harm details tbody tr').checkVisibility()")
    assert seen.evaluate("getComputedStyle(document.querySelector('nav')).display") == "none"


def test_a_bundle_without_a_receipt_shows_its_manifest(
    browser: Browser, signing_key: SigningKey, tmp_path: Path
) -> None:
    path = make_null_bundle(tmp_path, signing_key)
    assert main(["bundle", "report", str(path), "--html", str(tmp_path / "report.html")]) == 0
    seen = browser.open(tmp_path / "report.html", width=390)
    assert seen.overflow_px() == 0
    assert seen.violations() == []
    assert "Candidates" in seen.evaluate("document.body.innerText")
    assert not seen.evaluate("document.querySelector('#classes')")


def test_the_command_writes_the_page_beside_the_bundle(
    bundle: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["bundle", "report", str(bundle)]) == 0
    assert capsys.readouterr().out.startswith(f"{bundle.with_suffix('.html')}: ")
    assert main(["bundle", "report", str(bundle), "--json", "--html", str(tmp_path / "page.html")]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value == {"html": str(tmp_path / "page.html"), "size_bytes": (tmp_path / "page.html").stat().st_size}
    assert main(["bundle", "report", str(bundle), "--json", "--html", str(tmp_path / "no" / "x.html")]) == 4
    assert json.loads(capsys.readouterr().out)["error"]["message"].count("--html")
    assert main(["bundle", "report", str(bundle), "--html", str(bundle)]) == 4
    assert f"{bundle} is the bundle itself" in capsys.readouterr().err


def test_inspect_shows_the_same_values_as_text_and_as_json(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bundle", "inspect", str(bundle)]) == 0
    shown = capsys.readouterr().out
    # Sizes and accuracy depend on ONNX Runtime's release.
    assert re.search(r"artifact  onnxruntime-int8: onnxruntime int8, \d+ bytes", shown)
    assert re.search(r"top1 0\.9\d+ -> 0\.9\d+ on 400 samples, limit 0\.01 \(pass\)", shown)
    assert "8 bits    most harmful for: conv" in shown
    assert re.search(r"golden    \S+ and \S+ differ by at most", shown)
    assert main(["bundle", "inspect", str(bundle), "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["golden_samples"] == 8
    assert value["goldens"][0]["same_class"] == 1.0
    assert value["manifest"]["model"] == "digits"


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        ({"candidates": [{"id": "null"}]}, "candidates[0] of the bundle's receipt.json lacks engine"),
        ({"candidates": ["null"]}, "candidates[0] of the bundle's receipt.json is not an object"),
        ({"targets": {}}, "has a 'targets' that is not a list"),
        ({"activations": [{}]}, "activations[0] of the bundle's receipt.json lacks layer"),
    ],
)
@pytest.mark.parametrize("command", ["inspect", "report"])
def test_the_refusal_of_a_receipt_with_another_shape_names_the_place(
    command: str,
    part: dict[str, Any],
    problem: str,
    signing_key: SigningKey,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = make_null_bundle(tmp_path, signing_key, receipt={"format": 2, **part})
    assert main(["bundle", command, str(path)]) == 5
    assert problem in capsys.readouterr().err
