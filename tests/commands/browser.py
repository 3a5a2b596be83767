"""A headless Chromium for tests of pages, driven by selenium; nothing is downloaded."""

import importlib.util
import json
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
DRIVER = "chromedriver"
MAX_FRAMES = 500
_ARGUMENTS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--force-color-profile=srgb", "about:blank"),
)


def why_no_browser() -> str:
    """What is missing, or nothing."""
    if importlib.util.find_spec("selenium") is None:
        return "the package selenium is not installed"
    if not any(map(shutil.which, BROWSERS)):
        return f"none of {', '.join(BROWSERS)} is on the PATH"
    return "" if shutil.which(DRIVER) else f"{DRIVER} is not on the PATH"


needs_browser = pytest.mark.skipif(
    bool(why_no_browser()), reason=why_no_browser() or "there is one"
)


class Browser:
    """One page at a time, with what it logs and asks for."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self._shown: Path | None = None

    def show(self, page: Path) -> None:
        """Load a page as a desktop in light colours, if it is not already there.

        What an earlier test did to it, such as zooming, may still be so.
        """
        if self._shown != page:
            self.open(page)
            self._shown = page

    def open(
        self, page: Path, *, width: int = 1200, is_dark: bool = False, is_phone: bool = False
    ) -> None:
        """Load a page, and wait until bokeh has drawn."""
        self._shown = None
        self.logs()
        self.requests()
        self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=900, deviceScaleFactor=1, mobile=is_phone,
        )  # fmt: skip
        self.command("Emulation.setTouchEmulationEnabled", enabled=is_phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.command("Emulation.setEmulatedMedia", features=[scheme])
        self.open_plain(page)
        self._driver.execute_async_script(_WHEN_DRAWN)

    def open_plain(self, page: Path) -> None:
        """Load a page without bokeh."""
        self._shown = None
        self._driver.get(page.as_uri())

    def command(self, name: str, **arguments: Any) -> Any:
        """Send a command of the DevTools protocol."""
        return self._driver.execute_cdp_cmd(name, arguments)

    def run(self, script: str, *arguments: Any) -> Any:
        """Run the body of a function, with `find_view`, `read_pixels` and `all` at hand."""
        return self._driver.execute_script(_LIBRARY + script, *arguments)

    def wait(self, is_so: Callable[[], bool]) -> None:
        """Let frames pass until something is so; how fast the machine is does not matter."""
        for _ in range(MAX_FRAMES):
            if is_so():
                return
            self._driver.execute_async_script(_NEXT_FRAMES)
        raise AssertionError("the page did not come to that")

    def point(self, x: float, y: float) -> None:
        """Move the mouse there, in pixels of the window."""
        self.command("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, x: float, y: float) -> None:
        """Press and release the mouse there, in pixels of the window."""
        for kind in ("mousePressed", "mouseReleased"):
            self.command(
                "Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1
            )

    def tap(self, x: float, y: float) -> None:
        """Touch there with a finger, in pixels of the window."""
        touched = {"x": x, "y": y}
        self.command("Input.dispatchTouchEvent", type="touchStart", touchPoints=[touched])
        self.command("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def turn_wheel(self, x: float, y: float, delta: float) -> None:
        """Turn the wheel there with Ctrl held."""
        self.command(
            "Input.dispatchMouseEvent",
            type="mouseWheel", x=x, y=y, deltaX=0, deltaY=delta, modifiers=2,
        )  # fmt: skip

    def logs(self) -> list[str]:
        """Warnings and errors of the console since the last call."""
        return [log["message"] for log in self._driver.get_log("browser") if log["level"] != "INFO"]

    def requests(self) -> list[str]:
        """Addresses that were asked for since the last call, without those inside the page."""
        logs = self._driver.get_log("performance")
        messages = [json.loads(entry["message"])["message"] for entry in logs]
        asked = [m["params"] for m in messages if m["method"] == "Network.requestWillBeSent"]
        # The browser's own first tab has pages of the scheme chrome.
        urls = [a["request"]["url"] for a in asked if not a["documentURL"].startswith("chrome:")]
        return [url for url in urls if not url.startswith(("data:", "blob:"))]


@contextmanager
def started(folder: Path) -> Generator[Browser]:
    """Start a browser whose profile is in an empty folder; end it afterwards."""
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = next(filter(None, map(shutil.which, BROWSERS)))
    for argument in (f"--user-data-dir={folder}", *_ARGUMENTS):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which(DRIVER)))
    try:
        driver.set_script_timeout(300)
        yield Browser(driver)
    finally:
        driver.quit()


_NEXT_FRAMES = """
const done = arguments[arguments.length - 1];
requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 50)));
"""
# From a copy: who reads a canvas itself often is warned in the console.
_READ = """
const read_pixels = (view, ...box) => {
  const {canvas} = view.canvas_view.primary;
  const copy = document.createElement("canvas");
  [copy.width, copy.height] = [canvas.width, canvas.height];
  const context = copy.getContext("2d", {willReadFrequently: true});
  context.drawImage(canvas, 0, 0);
  return context.getImageData(...box).data;
};
"""
# Idle, painted, and for some frames nothing has changed its place.
_WHEN_DRAWN = (
    _READ
    + """
const done = arguments[arguments.length - 1];
function is_painted(view) {
  const {width, height} = view.canvas_view.primary.canvas;
  const data = read_pixels(view, 0, 0, width, height);
  return data.some((value, i) => i % 4 == 3 && value > 0);
}
function places() {
  if (typeof Bokeh === "undefined" || Bokeh.documents.length == 0) { return ""; }
  if (!Bokeh.documents.every((document) => document.is_idle)) { return ""; }
  const views = Bokeh.index.roots.filter((view) => view.canvas_view !== undefined);
  if (!views.every(is_painted)) { return ""; }
  const boxes = Bokeh.index.roots.map((view) => view.el.getBoundingClientRect());
  return JSON.stringify([boxes, views.map((view) => view.frame_view.bbox)]);
}
let [before, num_same] = ["", 0];
function look() {
  const now = places();
  num_same = now != "" && now == before ? num_same + 1 : 0;
  before = now;
  if (num_same == 5) { done(); } else { requestAnimationFrame(() => setTimeout(look, 10)); }
}
look();
"""
)
_LIBRARY = (
    _READ
    + """
const find_view = (name) => {
  const model = Bokeh.documents[0].get_model_by_name(name);
  return Bokeh.index.find_one(model);
};
// All elements, those in shadow trees too.
function* all(root) {
  for (const element of root.querySelectorAll("*")) {
    yield element;
    if (element.shadowRoot) { yield* all(element.shadowRoot); }
  }
}
"""
)
