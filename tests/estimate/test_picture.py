from dataclasses import replace
from pathlib import Path

import pytest

from ebbtide.catalog.models import MODELS
from ebbtide.errors import MissingExtraError
from ebbtide.estimate.answer import Answer, make_answer
from ebbtide.estimate.picture import draw_answer, draw_swept
from ebbtide.estimate.setup import Setup
from tests.estimate.asking import ask

SETUP = Setup(shape=replace(MODELS["gpt2"], num_layers=4), context=1024, batch=32)
# The first colours of matplotlib's cycle.
CYCLE = ("1f77b4", "ff7f0e", "2ca02c", "d62728", "9467bd", "8c564b", "e377c2")


@pytest.fixture(scope="module")
def answer() -> Answer:
    return make_answer(ask(SETUP, "rtx4090"))


def count_colours(path: Path) -> dict[str, int]:
    """Return how many pixels have each colour of the cycle."""
    image = pytest.importorskip("matplotlib.image")
    pixels = (image.imread(path)[:, :, :3] * 255).round().astype(int).reshape(-1, 3)
    return {
        colour: int((pixels == list(bytes.fromhex(colour))).all(axis=1).sum()) for colour in CYCLE
    }


def test_bars_are_as_long_as_what_is_held(tmp_path: Path, answer: Answer) -> None:
    draw_answer(answer, tmp_path / "bars.png")
    found = count_colours(tmp_path / "bars.png")
    holders = {
        name: sum(row.holders[name] for row in answer.rows) for name in answer.rows[0].holders
    }
    # One device sends nothing to others: of that there is the legend's patch alone.
    at = {name: CYCLE[index] for index, name in enumerate(holders)}
    assert holders["communication"] == 0
    patch = found[at["communication"]]
    assert 0 < patch < 500
    drawn = {name: found[at[name]] - patch for name in ("optimizer", "activations", "logits")}
    for name, num_pixels in drawn.items():
        expected = holders[name] / holders["logits"]
        assert num_pixels / drawn["logits"] == pytest.approx(expected, rel=0.1)


def test_each_strategy_has_a_line_of_its_own_colour(tmp_path: Path, answer: Answer) -> None:
    other = make_answer(ask(replace(SETUP, batch=64), "rtx4090"))
    draw_swept("batch", [(64.0, other), (32.0, answer)], tmp_path / "lines.png")
    found = count_colours(tmp_path / "lines.png")
    # The line of `keep` is under that of `ebbtide`, which keeps all too.
    assert all(found[colour] > 100 for colour in CYCLE[1:5])
    assert not any(found[colour] for colour in CYCLE[5:])


def test_what_does_not_fit_is_drawn(tmp_path: Path) -> None:
    answer = make_answer(ask(replace(SETUP, batch=16), "rtx4090", budget="2GiB"))
    assert any(row.short for row in answer.rows)
    draw_answer(answer, tmp_path / "bars.png")
    draw_swept("batch", [(16.0, answer)], tmp_path / "lines.png")
    # A cross for each of the four that have a time.
    assert all(count_colours(tmp_path / "lines.png")[colour] > 10 for colour in CYCLE[1:4])


def test_without_matplotlib_it_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Answer
) -> None:
    monkeypatch.setattr("ebbtide.drawing.find_spec", lambda _: None)
    for draw in (
        lambda path: draw_answer(answer, path),
        lambda path: draw_swept("batch", [(32.0, answer)], path),
    ):
        with pytest.raises(MissingExtraError, match=r"pip install 'ebbtide\[report\]'"):
            draw(tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
