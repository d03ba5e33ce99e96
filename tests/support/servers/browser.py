"""A real headless Chromium for tests: pages are opened, measured and photographed as a user sees them.

def test_page(browser: Browser) -> None:                     # the fixture of conftest.py
    page = browser.open(path_or_url, width=390, scheme="dark")
    assert page.overflow_px() == 0 and not page.problems
    page.evaluate("document.title"); page.screenshot(); page.contrast_min(); page.violations()
    page.tab.click("text=Devices"); page.tab.keyboard.press("Tab")      # everything of Playwright's Page

Chromium is the distribution's (`make servers` installs it). Playwright drives it, axe checks accessibility.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from playwright.sync_api import Browser as Chromium
    from playwright.sync_api import Page as Tab
    from playwright.sync_api import Playwright

# The shell has no window around its pages, which takes most of the processor time of the others.
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
TIMEOUT_MS = 30_000
Scheme = Literal["light", "dark"]

# Without such a socket, Chromium takes the network as it was at its start.
NO_NETLINK = r"""
#include <errno.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>
int socket(int domain, int type, int protocol) {
    if (domain == AF_NETLINK) { errno = EAFNOSUPPORT; return -1; }
    return (int)syscall(SYS_socket, domain, type, protocol);
}
"""

# Every visible text as [contrast with its background, text], by the formula of WCAG 2.
CONTRASTS = r"""() => {
  const parse = (colour) => { const n = colour.match(/[\d.]+/g).map(Number); return [n[0], n[1], n[2], n[3] ?? 1]; };
  const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3]));
  const light = (rgb) => rgb.map((v) => v / 255).map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (element) => {
    const layers = [];
    for (let e = element; e; e = e.parentElement) {
      const colour = parse(getComputedStyle(e).backgroundColor);
      layers.push(colour);
      if (colour[3] === 1) break;
    }
    const canvas = matchMedia("(prefers-color-scheme: dark)").matches ? [18, 18, 18] : [255, 255, 255];
    return layers.reverse().reduce((below, top) => over(top, below), canvas);
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode.textContent.trim(), element = walker.currentNode.parentElement;
    const style = getComputedStyle(element);
    if (!text || !element.checkVisibility({visibilityProperty: true, opacityProperty: true})) continue;
    if (["SCRIPT", "STYLE", "TITLE", "DESC"].includes(element.tagName.toUpperCase())) continue;
    const below = behind(element);
    const ink = over(parse(element instanceof SVGElement ? style.fill : style.color), below);
    const [a, b] = [light(ink), light(below)];
    found.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), text]);
  }
  return found;
}"""


def chromium_path() -> str | None:
    """Return the path of an installed Chromium, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def _unaware_of_network(folder: Path) -> dict[str, str | float | bool]:
    """Return the environment, with a library in `folder`, in which Chromium sees no change of the host's network.

    Otherwise Chromium ends its requests when an interface gets an address, for example the interface of a container in
    another test.
    """
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return dict(os.environ)
    source, library = folder / "no_netlink.c", folder / "no_netlink.so"
    source.write_text(NO_NETLINK)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    return {**os.environ, "LD_PRELOAD": os.fspath(library)}


@dataclass
class Page:
    """One open page; `problems` are errors and failed requests, `requests` every requested URL."""

    tab: Tab
    problems: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def evaluate(self, script: str, argument: Any = None) -> Any:
        """Return the value of a JavaScript expression, or of a function called with `argument`."""
        return self.tab.evaluate(script, argument)

    def screenshot(self, path: Path | None = None, *, whole: bool = True) -> bytes:
        """Return the page as PNG, the `whole` page or the window; also write it to `path`."""
        return self.tab.screenshot(path=path, full_page=whole)

    def colours(self) -> int:
        """Return the number of different colours in the window: a blank page has one."""
        from PIL import Image

        picture = Image.open(io.BytesIO(self.screenshot(whole=False))).convert("RGBA")
        return len(np.unique(np.asarray(picture).view(np.uint32)))

    def overflow_px(self) -> int:
        """Return by how many CSS pixels the page is wider than its window."""
        return int(self.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))

    def contrast_min(self) -> tuple[float, str]:
        """Return the lowest contrast of a visible text with its background (1 to 21), and that text.

        The background comes from the background colours of HTML elements: keep text off SVG shapes.
        """
        ratio, text = min(self.evaluate(CONTRASTS))
        return float(ratio), str(text)

    def violations(self) -> list[str]:
        """Return the problems that axe-core finds: labels, roles, headings, keyboard, contrast; one line each."""
        from axe_playwright_python.sync_playwright import Axe

        found = Axe().run(self.tab).response["violations"]
        return [f"{rule['id']}: {node['html'][:200]}" for rule in found for node in rule["nodes"]]


class Browser:
    """A running Chromium. Each `open` has its own context: no shared cookies, cache or storage."""

    def __init__(self, playwright: Playwright, chromium: Chromium, folder: tempfile.TemporaryDirectory[str]) -> None:
        self._playwright = playwright
        self._chromium = chromium
        self._folder = folder

    @classmethod
    def start(cls) -> Browser:
        """Start Chromium. Raises playwright's Error with Chromium's message if it does not start."""
        from playwright.sync_api import sync_playwright

        playwright = sync_playwright().start()
        folder = tempfile.TemporaryDirectory(prefix="edgert-browser-")
        try:
            env = _unaware_of_network(Path(folder.name))
            return cls(playwright, playwright.chromium.launch(executable_path=chromium_path(), env=env), folder)
        except BaseException:
            playwright.stop()
            folder.cleanup()
            raise

    def open(
        self,
        target: str | Path,
        width: int = 1280,
        height: int = 800,
        scheme: Scheme = "light",
        *,
        media: Literal["screen", "print"] = "screen",
        wait_until: Literal["load", "domcontentloaded"] = "load",
    ) -> Page:
        """Open a URL or a file in a window of `width` x `height` CSS pixels, and wait until it is loaded."""
        context = self._chromium.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        context.set_default_timeout(TIMEOUT_MS)
        tab = context.new_page()
        page = Page(tab)
        tab.on("console", lambda said: page.problems.append(said.text) if said.type == "error" else None)
        tab.on("pageerror", lambda error: page.problems.append(str(error)))
        tab.on("requestfailed", lambda failed: page.problems.append(f"{failed.url}: {failed.failure}"))
        tab.on("request", lambda made: page.requests.append(made.url))
        tab.emulate_media(media=media)
        tab.goto(target.resolve().as_uri() if isinstance(target, Path) else target, wait_until=wait_until)
        return page

    def close(self) -> None:
        self._chromium.close()
        self._playwright.stop()
        self._folder.cleanup()
