from dataclasses import replace
from pathlib import Path

import matplotlib.image
import numpy

from ebbtide.compare.plot import draw_memory_against_time
from ebbtide.compare.results import Comparison
from tests.compare.test_results import COMPARISON, FACTS, KEEP, TRL


def test_the_picture_has_a_dot_of_its_own_colour_for_each_finished_row(tmp_path: Path) -> None:
    path = draw_memory_against_time(COMPARISON, tmp_path / "two.png")
    assert path is not None
    pixels = (matplotlib.image.imread(path)[:, :, :3] * 255).round().astype(int)
    colours = {tuple(pixel) for pixel in numpy.unique(pixels.reshape(-1, 3), axis=0).tolist()}
    # The first three colours of matplotlib's cycle; the third would be a third dot.
    assert (0x1F, 0x77, 0xB4) in colours
    assert (0xFF, 0x7F, 0x0E) in colours
    assert (0x2C, 0xA0, 0x2C) not in colours


def test_rows_on_one_spot_are_drawn(tmp_path: Path) -> None:
    rows = tuple(replace(KEEP, strategy=f"strategy-{number}") for number in range(9))
    path = draw_memory_against_time(Comparison(facts=FACTS, rows=rows), tmp_path / "same.png")
    assert path == tmp_path / "same.png"


def test_no_finished_row_makes_no_picture(tmp_path: Path) -> None:
    comparison = Comparison(facts=FACTS, rows=(TRL,))
    assert draw_memory_against_time(comparison, tmp_path / "none.png") is None
    assert not (tmp_path / "none.png").exists()
