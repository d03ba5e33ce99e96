"""The browser that tests look through: it finds the faults of a page."""

from __future__ import annotations

from pathlib import Path

from tests.support.servers.browser import Browser


def test_the_browser_reports_a_page_that_is_too_wide_and_too_pale_and_has_errors(
    browser: Browser, tmp_path: Path
) -> None:
    path = tmp_path / "page.html"
    path.write_text(
        """<!doctype html><html lang="en"><title>t</title><meta name="viewport" content="width=device-width">
        <style>body { background: #fff; color: #777 } svg text { fill: #ccc }
        @media (prefers-color-scheme: dark) { body { background: #000; color: #fff } }</style>
        <main><h1>Grey</h1><svg width="800" height="20" role="img" aria-label="x"><text y="12">paler</text></svg>
        <button></button></main><script>console.error("oops")</script>"""
    )
    page = browser.open(path, width=390)
    assert page.overflow_px() > 300
    assert page.problems == ["oops"]
    ratio, text = page.contrast_min()
    assert (round(ratio, 2), text) == (1.61, "paler")
    assert any(line.startswith("button-name") for line in page.violations())
    assert page.colours() > 1
    assert page.screenshot().startswith(b"\x89PNG")

    dark = browser.open(path, width=1000, scheme="dark")
    assert dark.overflow_px() == 0
    assert dark.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(0, 0, 0)"


def test_a_blank_page_has_one_colour(browser: Browser) -> None:
    assert browser.open("about:blank").colours() == 1
