"""Pins what users may import; a change here is a change for them."""

import ebbtide


def test_public_names_are_these() -> None:
    assert sorted(ebbtide.__all__) == [
        "BudgetError",
        "DiskSpec",
        "EbbtideError",
        "MemoryTierError",
        "MissingExtraError",
        "ModelError",
        "PlanError",
        "RuntimeStateError",
        "TraceError",
        "__version__",
        "format_bytes",
        "parse_bytes",
        "parse_path_and_cap",
    ]


def test_every_public_name_exists() -> None:
    assert [name for name in ebbtide.__all__ if name not in vars(ebbtide)] == []
