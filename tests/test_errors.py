import inspect
import pickle

import pytest

from ebbtide import errors
from ebbtide.errors import BudgetError, EbbtideError, MissingExtraError, PlanError


def test_every_exception_is_under_the_root() -> None:
    exceptions = [
        value
        for value in vars(errors).values()
        if inspect.isclass(value) and issubclass(value, Exception)
    ]
    assert len(exceptions) == 11
    assert all(issubclass(exception, EbbtideError) for exception in exceptions)


def test_every_exception_is_in_the_drawn_tree() -> None:
    tree = (errors.__doc__ or "").partition("\n\n")[2].partition("\n\n")[0]
    drawn = [line.split()[0] for line in tree.splitlines()]
    defined = [
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, Exception)
    ]
    assert drawn == ["Exception", *defined]


def test_a_budget_error_is_a_plan_error() -> None:
    with pytest.raises(PlanError, match="over the budget"):
        raise BudgetError("over the budget")


def test_a_missing_extra_is_an_import_error_that_names_the_command() -> None:
    error = MissingExtraError.for_extra("torch", needed_by="ebbtide.torch")
    assert isinstance(error, ImportError)
    assert str(error) == (
        "ebbtide.torch needs packages that are not installed. "
        "Install them with: pip install 'ebbtide[torch]'"
    )


def test_a_missing_extra_survives_a_process_border() -> None:
    error = MissingExtraError.for_extra("jax", needed_by="ebbtide.jax")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_refused_pinned_memory_survives_a_process_border() -> None:
    error = errors.PinnedMemoryError("9 GiB of pinned host memory was refused", 512)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is errors.PinnedMemoryError
    assert issubclass(errors.PinnedMemoryError, errors.MemoryTierError)
    assert (str(again), again.room_bytes) == ("9 GiB of pinned host memory was refused", 512)


def test_exit_codes_are_these() -> None:
    assert {code.name: code.value for code in errors.ExitCode} == {
        "DONE": 0,
        "FAILED": 1,
        "MISUSE": 2,
        "NO_PLAN_FITS": 3,
    }
