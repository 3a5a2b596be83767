"""What all pictures share: matplotlib without a window system."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from ebbtide.errors import MissingExtraError


def check_can_draw(needed_by: str) -> None:
    """Refuse before anything is computed.

    Args:
        needed_by: What the user asked for: "ebbtide plan --plot".

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise MissingExtraError.for_extra("report", needed_by=needed_by)


def check_picture(option: str, path: Path, needed_by: str) -> None:
    """Refuse a picture that could not be drawn there.

    Raises:
        ValueError: The name does not end in `.png`.
        MissingExtraError: matplotlib is not installed.
    """
    if path.suffix != ".png":
        raise ValueError(f"{option} {path}: a PNG is written; give a name that ends in .png")
    check_can_draw(needed_by)


def make_axes(width_in: float, height_in: float) -> Any:
    """Return the axes of a new figure; matplotlib must be installed."""
    # Through the object interface: pyplot would choose a window system.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_in, height_in), dpi=120, layout="tight")
    FigureCanvasAgg(figure)
    return cast(Any, figure.add_subplot())
