from pathlib import Path

import pytest

from ebbtide.drawing import check_picture, make_axes
from ebbtide.errors import MissingExtraError


def test_a_picture_is_a_png_of_the_size_that_was_asked_for(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    axes = make_axes(4.0, 3.0)
    axes.figure.savefig(tmp_path / "empty.png")
    # 120 dots an inch.
    assert image.imread(tmp_path / "empty.png").shape[:2] == (360, 480)


def test_other_suffixes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"--plot a\.jpg: a PNG is written"):
        check_picture("--plot", Path("a.jpg"), "ebbtide plan --plot")


def test_without_matplotlib_the_message_says_what_needs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ebbtide.drawing.find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match="ebbtide plan --plot needs packages"):
        check_picture("--plot", Path("a.png"), "ebbtide plan --plot")
