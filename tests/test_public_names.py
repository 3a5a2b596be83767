"""Pins what users may import; a change here is a change for them."""

import ebbtide
from ebbtide import errors


def test_public_names_are_these() -> None:
    assert sorted(ebbtide.__all__) == [
        "BudgetError",
        "CorruptionError",
        "DiskSpec",
        "EbbtideError",
        "MemoryTierError",
        "MissingExtraError",
        "ModelError",
        "PinnedMemoryError",
        "PlanError",
        "RankError",
        "RuntimeStateError",
        "TraceError",
        "__version__",
        "format_bytes",
        "parse_bytes",
        "parse_path_and_cap",
    ]


def test_every_public_name_exists() -> None:
    assert [name for name in ebbtide.__all__ if name not in vars(ebbtide)] == []


def test_every_error_that_a_user_may_catch_is_public() -> None:
    names = {name for name, of in vars(errors).items() if _is_error(of)}
    assert names - set(ebbtide.__all__) == set()


def _is_error(of: object) -> bool:
    return isinstance(of, type) and issubclass(of, ebbtide.EbbtideError)
