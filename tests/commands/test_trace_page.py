"""The page of `ebbtide trace --html`: what it says, and what a browser makes of it."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from benchmarks.make_trace import write_steps
from ebbtide.commands.trace_plot import COLORS, EXPOSED_COLOR
from ebbtide.errors import ExitCode
from ebbtide.timeline import Lane
from ebbtide.trace.annotated import write_annotated
from ebbtide.trace.overlap import analyse
from ebbtide.trace.read import read_trace
from tests.commands.browser import Browser, needs_browser, started
from tests.commands.test_trace import run, run_json
from tests.trace.chrome import IN, OUT, a_step, call, copy, kernel, mark, moment, write
from tests.trace.test_recorded import TORCH

pytest.importorskip("bokeh", reason="the extra report is not installed")

SCRIPT = "</script><script>window.broken = 1</script>"
IMAGE = '<img src="x" onerror="window.broken = 2">'
TEX = "$$\\frac{a}{b}$$"


def page_of(trace: Path, *arguments: str | Path) -> Path:
    page = trace.with_suffix(".html")
    finished = run(trace, "--html", page, *arguments)
    assert finished.exit_code == ExitCode.DONE
    assert f"wrote {page}" in finished.stderr
    return page


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with started(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of two GPUs."""
    path = tmp_path_factory.mktemp("steps") / "steps.json"
    write_steps(path, num_gpus=2)
    return path


@pytest.fixture(scope="module")
def steps_page(steps: Path) -> Path:
    return page_of(steps)


@pytest.fixture(scope="module")
def hostile_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Names from the trace that would be markup, wherever names are shown."""
    us = 1000
    events = [
        mark("ProfilerStep#3", -10 * us, 90 * us),
        mark(f"ebbtide: evict {SCRIPT}", -3 * us, -1 * us),
        call("cudaMemcpyAsync", -2 * us, -1 * us, 2),
        kernel(IMAGE, 0, 40 * us),
        copy(OUT, 40 * us, 60 * us, 1_200_000, correlation=2),
        copy(IN, 60 * us, 65 * us, 1_000_000),
        kernel(f"{IMAGE}{TEX}", 70 * us, 100 * us),
        {"ph": "X", "cat": IMAGE, "name": SCRIPT, "ts": 1, "dur": 1, "pid": 1, "tid": 1},
    ]
    folder = tmp_path_factory.mktemp("hostile")
    trace = read_trace(write(folder / "plain.json", *events))
    # A GPU's name can only be chosen by who writes the annotated form.
    renamed = replace(trace, devices=(replace(trace.devices[0], name=f"{IMAGE}{TEX}"),))
    path = folder / "<img src=x onerror=window.broken=3>.json"
    write_annotated(path, renamed, [analyse(renamed.devices[0].timeline)])
    return page_of(path)


def pixels(browser: Browser, row: float, color: str) -> list[tuple[float, float]]:
    """Where a row of the timeline has a colour: runs, in ms of the axis."""
    runs = browser.run(
        """
        const [row, color] = arguments;
        const view = find_view("timeline");
        const box = view.frame_view.bbox;
        const y = Math.round(view.frame_view.y_scale.compute(row));
        const data = read_pixels(view, box.left, y, box.width, 1);
        const wanted = [1, 3, 5].map((i) => parseInt(color.slice(i, i + 2), 16));
        const runs = [];
        for (let x = 0; x <= box.width; x++) {
          const is_close = (value, k) => Math.abs(value - data[4 * x + k]) < 12;
          const is_there = x < box.width && wanted.every(is_close);
          const open = runs.length > 0 && runs.at(-1).length == 1;
          if (is_there && !open) { runs.push([x]); }
          if (!is_there && open) { runs.at(-1).push(x); }
        }
        const x_scale = view.frame_view.x_scale;
        return runs.map((run) => run.map((x) => x_scale.invert(box.left + x)));
        """,
        row,
        color,
    )
    return [(start, end) for start, end in runs]


def ms_per_pixel(browser: Browser) -> float:
    return browser.run(
        """
        const {model, frame_view} = find_view("timeline");
        return (model.x_range.end - model.x_range.start) / frame_view.bbox.width;
        """
    )


def place_of(browser: Browser, ms: float, row: float) -> tuple[float, float]:
    """Where a moment of a row is in the window, in pixels; scrolls to it."""
    x, y = browser.run(
        """
        const [ms, row] = arguments;
        const view = find_view("timeline");
        view.el.scrollIntoView({block: "center"});
        const box = view.canvas_view.el.getBoundingClientRect();
        return [box.left + view.frame_view.x_scale.compute(ms),
                box.top + view.frame_view.y_scale.compute(row)];
        """,
        ms,
        row,
    )
    return x, y


ROWS = {Lane.STEP: -1, Lane.COMPUTE: -2, Lane.COPY_OUT: -3, Lane.COPY_IN: -4}
"""Of the first device, where it has steps; exposed parts lie on the lower half."""


def test_the_page_says_what_the_json_says(steps: Path, steps_page: Path) -> None:
    text = steps_page.read_text(encoding="utf-8")
    found = run_json(steps)
    assert len(found["gpus"]) == 2
    for gpu in found["gpus"]:
        assert f"<h3>{gpu['name']}</h3>" in text
        for ms in (gpu["window_ms"], gpu["copy_out"]["exposed_ms"], gpu["copy_in"]["hidden_ms"]):
            assert f"{ms:.2f}<" in text
    for finding in found["findings"]:
        assert finding["code"] in text
        assert escape(finding["advice"]) in text
    assert text.count('<td class="word">ProfilerStep#') == 6


def test_without_memory_events_the_page_says_so(tmp_path: Path) -> None:
    page = page_of(write(tmp_path / "a.json", *a_step()))
    assert "The trace has no memory events." in page.read_text(encoding="utf-8")
    with_memory = write(tmp_path / "b.json", *a_step(), moment(0, 2**30, 2**31))
    text = page_of(with_memory).read_text(encoding="utf-8")
    assert "The trace has no memory events." not in text
    assert "dashed what it held" in text


def test_a_page_of_a_trace_without_copies(tmp_path: Path) -> None:
    text = page_of(write(tmp_path / "a.json", kernel("a", 0, 10))).read_text(encoding="utf-8")
    assert "Nothing was copied between the GPU and the host." in text
    assert "Nothing was found that costs 1 % of the time or more." in text


def test_nothing_is_written_of_a_trace_without_gpus(tmp_path: Path) -> None:
    trace = write(tmp_path / "a.json", mark("step 1", 0, 10))
    finished = run(trace, "--html", tmp_path / "a.html")
    assert finished.exit_code == ExitCode.FAILED
    assert not (tmp_path / "a.html").exists()
    assert "is not written: there is nothing to show" in finished.stderr


def test_a_page_that_cannot_be_written_is_misuse(tmp_path: Path) -> None:
    trace = write(tmp_path / "a.json", *a_step())
    finished = run(trace, "--html", tmp_path / "no" / "a.html")
    assert finished.exit_code == ExitCode.MISUSE
    assert "a.html: the file cannot be written (No such file or directory)" in finished.stderr


def test_nothing_in_the_page_is_loaded_from_elsewhere(steps_page: Path) -> None:
    text = steps_page.read_text(encoding="utf-8")
    elements = Elements(text)
    assert not elements.attributes & {"src", "href", "srcset", "onerror", "onload", "action"}
    assert not elements.names & {"img", "link", "iframe", "object", "embed", "base"}
    assert "default-src 'none'" in text
    assert len(text) < 4_000_000


def test_names_are_escaped_in_the_text(steps_page: Path, hostile_page: Path) -> None:
    text = hostile_page.read_text(encoding="utf-8")
    plain, hostile = Elements(steps_page.read_text(encoding="utf-8")), Elements(text)
    assert hostile.names <= plain.names | {"code"}
    assert hostile.num_scripts == plain.num_scripts
    assert "&lt;img src=x onerror=window.broken=3&gt;.json" in text


class Elements(HTMLParser):
    """The elements of a page, as a parser finds them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.attributes: set[str] = set()
        self.num_scripts = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.attributes.update(name for name, _ in attrs)
        self.num_scripts += tag == "script"


# In a browser.


@needs_browser
def test_a_request_and_an_error_would_be_seen(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text('<img src="http://127.0.0.1:9/x.png"><script>throw Error("seen")</script>')
    browser.open_plain(page)
    assert "http://127.0.0.1:9/x.png" in browser.requests()
    assert any("seen" in line for line in browser.logs())


@needs_browser
def test_exposed_marks_lie_where_the_numbers_say(browser: Browser, tmp_path: Path) -> None:
    trace = write(tmp_path / "trace.json", *a_step())
    (gpu,) = run_json(trace)["gpus"]
    browser.open(page_of(trace))
    pixel = ms_per_pixel(browser)
    assert 0 < pixel < 0.0002
    for lane, key, ms in ((Lane.COPY_OUT, "copy_out", (0.04, 0.06)),
                          (Lane.COPY_IN, "copy_in", (0.05, 0.07))):  # fmt: skip
        (run_of,) = pixels(browser, ROWS[lane] - 0.2, EXPOSED_COLOR)
        assert run_of == pytest.approx(ms, abs=2 * pixel)
        assert run_of[1] - run_of[0] == pytest.approx(gpu[key]["exposed_ms"], abs=2 * pixel)
    (copied,) = pixels(browser, ROWS[Lane.COPY_OUT] + 0.2, COLORS[Lane.COPY_OUT])
    assert copied == pytest.approx((0.03, 0.06), abs=2 * pixel)
    computed = pixels(browser, ROWS[Lane.COMPUTE], COLORS[Lane.COMPUTE])
    (window,) = gpu["idle_windows"]
    assert computed[0][1] == pytest.approx(window["start_ms"], abs=2 * pixel)
    assert computed[1][0] == pytest.approx(window["end_ms"], abs=2 * pixel)


@needs_browser
def test_it_opens_without_errors_and_asks_for_nothing(browser: Browser, steps_page: Path) -> None:
    browser.show(steps_page)
    assert browser.logs() == []
    assert browser.requests() == [steps_page.as_uri()]


@needs_browser
def test_exposed_marks_of_many_copies_add_up(
    browser: Browser, steps: Path, steps_page: Path
) -> None:
    gpu = run_json(steps)["gpus"][0]
    browser.show(steps_page)
    found = browser.run(
        """
        const exposed = {};
        for (const view of find_view("timeline").renderer_views.values()) {
          const name = view.model.name ?? "";
          if (!name.startsWith("0/")) { continue; }
          const {left, right} = view.glyph;
          const ms = (sx) => view.parent.frame_view.x_scale.invert(sx);
          let total = 0;
          for (let i = 0; i < left.length; i++) {
            total += ms(view.glyph.sright[i]) - ms(view.glyph.sleft[i]);
          }
          exposed[name] = [left.length, total];
        }
        return exposed;
        """
    )
    assert found["0/copy-out"][0] == gpu["copy_out"]["num_copies"] == 24
    for name, key in (("0/copy-out/exposed", "copy_out"), ("0/copy-in/exposed", "copy_in")):
        assert found[name][1] == pytest.approx(gpu[key]["exposed_ms"], abs=1e-4)
    assert found["0/step"][0] == len(gpu["steps"]) == 3


@needs_browser
def test_a_mark_tells_its_name_and_the_wheel_zooms(browser: Browser, steps_page: Path) -> None:
    browser.show(steps_page)
    x, y = place_of(browser, 2.0, ROWS[Lane.COPY_OUT] + 0.2)
    browser.point(x, y)
    told = tooltip(browser, "h.0.input")
    assert "64.00 MiB" in told
    assert "copy out" in told
    before = ms_per_pixel(browser)
    browser.turn_wheel(x, y, -240)
    browser.wait(lambda: ms_per_pixel(browser) < 0.9 * before)
    timeline, memory = browser.run(
        """
        return ["timeline", "memory"].map((name) => {
          const {start, end} = find_view(name).model.x_range;
          return [start, end];
        });
        """
    )
    assert timeline == memory, "memory is zoomed along"
    assert browser.logs() == []


@needs_browser
def test_the_table_sorts(browser: Browser, steps_page: Path) -> None:
    browser.show(steps_page)
    browser.run("document.getElementById('moved').scrollIntoView()")
    browser.wait(lambda: first_cells(browser, 0)[:2] == ["h.7.input", "h.7.input"])
    assert len(first_cells(browser, 4)) >= 10
    for descending in (False, True):
        browser.click(*browser.run(_HEADER, "hidden ms"))
        browser.wait(lambda way=descending: is_sorted(first_cells(browser, 4), way))
    assert browser.logs() == []


@needs_browser
@pytest.mark.parametrize("is_dark", [False, True])
def test_light_and_dark(browser: Browser, steps_page: Path, is_dark: bool) -> None:
    if is_dark:
        browser.open(steps_page, is_dark=True)
    else:
        browser.show(steps_page)
    ground = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(20, 24, 28)" if is_dark else "rgb(255, 255, 255)")
    # The names of lanes, left of the plot's frame: what most pixels have, and the extremes.
    usual, lightest, darkest = browser.run(
        """
        const view = find_view("timeline");
        const {left, bottom} = view.frame_view.bbox;
        const reds = read_pixels(view, 0, 0, left - 4, bottom).filter((_, i) => i % 4 == 0);
        return [reds.toSorted()[reds.length >> 1], Math.max(...reds), Math.min(...reds)];
        """
    )
    assert (usual, lightest > 200, darkest < 60) == (20 if is_dark else 255, True, True)
    cell = browser.run(
        """
        for (const element of all(document)) {
          if (element.classList.contains("slick-cell")) { return getComputedStyle(element).color; }
        }
        """
    )
    assert cell == ("rgb(228, 233, 238)" if is_dark else "rgb(28, 35, 41)")


@needs_browser
@pytest.mark.parametrize("name", ["steps_page", "hostile_page"])
def test_a_telephone_needs_no_sideways_scrolling(
    browser: Browser, name: str, request: pytest.FixtureRequest
) -> None:
    browser.open(request.getfixturevalue(name), width=390, is_phone=True)
    width, inner = browser.run("return [document.scrollingElement.scrollWidth, innerWidth]")
    assert inner == 390
    assert width <= inner
    plot = browser.run(
        """
        const view = find_view("timeline");
        const box = view.el.getBoundingClientRect();
        return [box.left, box.right, view.frame_view.bbox.width, view.model.toolbar.active_drag];
        """
    )
    assert plot[0] >= 0
    assert plot[1] <= 390
    assert plot[2] > 200
    assert plot[3] is None, "a finger on the plot would not scroll the page"
    assert browser.logs() == []


@pytest.mark.slow
@needs_browser
def test_a_recorded_traces_names_are_shown_whole_where_there_is_room(
    browser: Browser, tmp_path: Path
) -> None:
    page = page_of(Path(shutil.copy(TORCH, tmp_path / "torch.json.gz")))
    longest = "model.layers.6.self_attn:scaled_dot_product_cudnn_attention.0"
    browser.open(page)
    rooms = {name: room for name, room in browser.run(_ROOM_FOR_NAMES)}
    assert longest in rooms
    assert min(rooms.values()) >= 0
    assert browser.logs() == []
    browser.open(page, width=390, is_phone=True)
    assert min(room for _, room in browser.run(_ROOM_FOR_NAMES)) < 0
    assert "unrolled_elementwise_kernel<direct_copy_kernel_cuda(TensorIteratorBase&)" in (
        browser.run("return document.body.innerText")
    )


@needs_browser
def test_a_finger_scrolls_the_page_zooms_and_asks_for_names(
    browser: Browser, steps_page: Path
) -> None:
    browser.open(steps_page, width=390, is_phone=True)
    x, y = place_of(browser, 6.0, ROWS[Lane.COPY_OUT] + 0.2)
    browser.tap(x, y)
    assert "h.3.input" in tooltip(browser, "copy out")
    before, top = ms_per_pixel(browser), browser.run("return scrollY")
    browser.command("Input.synthesizeScrollGesture", x=x, y=y, yDistance=-200)
    browser.wait(lambda: browser.run("return scrollY") > top + 100)
    assert ms_per_pixel(browser) == before
    x, y = place_of(browser, 6.0, ROWS[Lane.COPY_OUT] + 0.2)
    browser.command("Input.synthesizePinchGesture", x=x, y=y, scaleFactor=2.0, relativeSpeed=300)
    browser.wait(lambda: ms_per_pixel(browser) < before)
    assert browser.run("return visualViewport.scale") == 1
    assert browser.logs() == []


@needs_browser
def test_names_that_are_markup_are_shown_as_text(browser: Browser, hostile_page: Path) -> None:
    browser.open(hostile_page)
    assert browser.run("return window.broken ?? null") is None
    assert browser.run("return [...all(document)].filter((e) => e.tagName == 'IMG').length") == 0
    cells = browser.run(
        """
        const cells = [...all(document)].filter((e) => e.classList.contains("slick-cell"));
        return cells.map((cell) => cell.textContent);
        """
    )
    assert SCRIPT in cells
    for ms, row, text in (
        (0.02, ROWS[Lane.COMPUTE], IMAGE),
        (0.09, ROWS[Lane.COMPUTE], f"{IMAGE}{TEX}"),
        (0.05, ROWS[Lane.COPY_OUT] + 0.2, SCRIPT),
    ):
        browser.point(*place_of(browser, ms, row))
        tooltip(browser, text)
    body = browser.run("return document.body.innerText")
    assert "<img src=x onerror=window.broken=3>.json" in body
    assert repr(IMAGE) in body, "the note on what was passed over"
    assert f"{IMAGE}{TEX}\n" in body, "the GPU's name"
    assert browser.run("return window.broken ?? null") is None
    assert browser.logs() == []
    assert browser.requests() == [hostile_page.as_uri()]


def is_sorted(cells: list[str], descending: bool) -> bool:
    numbers = [float(cell) for cell in cells]
    return numbers == sorted(numbers, reverse=descending)


def tooltip(browser: Browser, text: str) -> str:
    """What the one tooltip says; waits until it has a text."""
    browser.wait(lambda: any(text in told for told in browser.run(_TOOLTIPS)))
    (told,) = browser.run(_TOOLTIPS)
    return told


def first_cells(browser: Browser, column: int) -> list[str]:
    """The texts of a column, from the top row down."""
    return browser.run(
        """
        const rows = [...all(document)].filter((e) => e.classList.contains("slick-row"));
        rows.sort((a, b) => a.getBoundingClientRect().top - b.getBoundingClientRect().top);
        return rows.map((row) => row.children[arguments[0]].textContent);
        """,
        column,
    )


_TOOLTIPS = """
const tooltips = [...all(document)].filter((e) => e.classList.contains("bk-Tooltip"));
return tooltips.map((e) => [...e.shadowRoot.children]
  .filter((child) => child.tagName != "STYLE").map((child) => child.textContent).join(" "));
"""
_ROOM_FOR_NAMES = """
const cells = [...all(document)].filter((e) => e.matches(".slick-row > .slick-cell.l0"));
return cells.map((cell) => {
  const range = document.createRange();
  range.selectNodeContents(cell);
  return [cell.textContent, cell.clientWidth - range.getBoundingClientRect().width];
});
"""
_HEADER = """
for (const element of all(document)) {
  if (element.classList.contains("slick-column-name") && element.textContent == arguments[0]) {
    const box = element.getBoundingClientRect();
    return [box.left + box.width / 2, box.top + box.height / 2];
  }
}
"""


def test_json_and_page_in_one_call(steps: Path, tmp_path: Path) -> None:
    finished = run(steps, "--json", "--html", tmp_path / "page.html")
    found: dict[str, Any] = json.loads(finished.stdout)
    assert len(found["gpus"]) == 2
    assert (tmp_path / "page.html").exists()
