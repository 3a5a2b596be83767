"""A sweep over budgets, and its picture."""

from itertools import pairwise
from pathlib import Path

import pytest

from ebbtide.catalog import find_machine
from ebbtide.errors import MissingExtraError, PlanError
from ebbtide.planner.result import Code
from ebbtide.planner.solve import plan_for_budget
from ebbtide.sweep import SweepPoint, sweep_budgets
from ebbtide.sweep_plot import draw_sweep
from ebbtide.workload import Workload

ROOT = Path(__file__).parents[1]
WORKLOAD = Workload.from_json((ROOT / "docs" / "examples" / "workload.json").read_text())
MACHINE = find_machine("h200-pcie5")


@pytest.fixture(scope="module")
def points() -> tuple[SweepPoint, ...]:
    return sweep_budgets(WORKLOAD, MACHINE, 4, "greedy")


def test_budgets_go_evenly_from_the_smallest_that_fits_to_all(
    points: tuple[SweepPoint, ...],
) -> None:
    budgets = [point.budget_bytes for point in points]
    distances = [high - low for low, high in pairwise(budgets)]
    assert len(budgets) == 4
    assert max(distances) - min(distances) <= 1
    refused = plan_for_budget(WORKLOAD, MACHINE, budget_bytes=0, planner="greedy")
    assert budgets[0] == refused.smallest_budget_bytes
    assert [point.outcome.code for point in points] == [Code.FOUND] * 3 + [Code.EVERYTHING_FITS]


def test_every_plan_keeps_to_its_budget_and_to_its_bound(points: tuple[SweepPoint, ...]) -> None:
    for point in points:
        plan = point.outcome.plan
        assert plan is not None
        assert plan.peak_bytes <= plan.budget_bytes == point.budget_bytes
        assert plan.bound_step_ns <= plan.predicted_step_ns


def test_more_memory_costs_less_time(points: tuple[SweepPoint, ...]) -> None:
    steps = [point.outcome.plan.predicted_step_ns for point in points if point.outcome.plan]
    assert steps == sorted(steps, reverse=True)
    assert steps[0] > steps[-1]


def test_the_options_of_a_plan_hold_for_a_sweep() -> None:
    points = sweep_budgets(
        WORKLOAD, MACHINE, 2, "greedy", host_bytes=0, disk_bytes=0, decide={"*.residual": "keep"}
    )
    plan = points[0].outcome.plan
    assert plan is not None
    assert plan.host_bytes == 0
    assert plan.decisions["model.layers.0.residual"].value == "keep"


def test_equal_budgets_are_planned_once() -> None:
    # Keeping everything has one budget only.
    points = sweep_budgets(WORKLOAD, MACHINE, 3, "keep")
    assert [point.outcome.code for point in points] == [Code.EVERYTHING_FITS]


def test_a_sweep_has_two_ends() -> None:
    with pytest.raises(ValueError, match="num is 1; a sweep has two ends, so it must be 2 or more"):
        sweep_budgets(WORKLOAD, MACHINE, 1)


def test_an_unknown_planner_is_refused() -> None:
    with pytest.raises(PlanError, match="unknown planner 'lpp'"):
        sweep_budgets(WORKLOAD, MACHINE, 2, "lpp")


def test_the_picture_has_both_curves(tmp_path: Path, points: tuple[SweepPoint, ...]) -> None:
    image = pytest.importorskip("matplotlib.image")
    numpy = pytest.importorskip("numpy")
    draw_sweep(points, tmp_path / "sweep.png", title="eight blocks")
    pixels = (image.imread(tmp_path / "sweep.png")[:, :, :3] * 255).round().astype(int)
    colours = {tuple(pixel) for pixel in numpy.unique(pixels.reshape(-1, 3), axis=0).tolist()}
    # The first two colours of matplotlib's cycle; a third would be a third curve.
    assert {(0x1F, 0x77, 0xB4), (0xFF, 0x7F, 0x0E)} <= colours
    assert (0x2C, 0xA0, 0x2C) not in colours


def test_a_picture_without_matplotlib_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, points: tuple[SweepPoint, ...]
) -> None:
    monkeypatch.setattr("ebbtide.drawing.find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'ebbtide\[report\]'"):
        draw_sweep(points, tmp_path / "sweep.png", title="none")
    assert not (tmp_path / "sweep.png").exists()
