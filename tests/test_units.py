import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.units import DiskSpec, format_bytes, parse_bytes, parse_path_and_cap


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("40GiB", 40 * 2**30),
        ("40 GB", 40 * 10**9),
        ("512MiB", 512 * 2**20),
        ("1.5GiB", 3 * 2**29),
        ("2TiB", 2 * 2**40),
        ("1 kB", 1000),
        ("1KB", 1000),
        ("1KiB", 1024),
        ("  7 B ", 7),
        ("0", 0),
        ("123", 123),
        ("2.0", 2),
        (123, 123),
        (0, 0),
    ],
)
def test_a_size_is_read_as_bytes(text: str | int, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


def test_a_fraction_of_a_byte_is_dropped() -> None:
    assert parse_bytes("0.0009KiB") == 0
    assert parse_bytes("1.1GiB") == 1181116006


def test_large_sizes_are_exact() -> None:
    assert parse_bytes("9007199.254740993TB") == 9007199254740993000


@pytest.mark.parametrize("text", ["", " ", "GiB", "-1GiB", "nan", "inf", "1e9", "1,5GiB", "1.GiB"])
def test_what_is_not_a_size_is_refused_with_the_rule_and_an_example(text: str) -> None:
    message = (
        f"cannot read {text!r} as a size; a size is a number, zero or more, and a unit, "
        'such as "40GiB", "1.5 GB" or 1024'
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        parse_bytes(text)


def test_a_negative_number_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^size -5 is negative; a size is a number"):
        parse_bytes(-5)


def test_half_a_byte_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^cannot read '1\.5' as a size: bytes are whole"):
        parse_bytes("1.5")


@pytest.mark.parametrize(
    ("text", "unit", "first"), [("40gib", "gib", "GiB"), ("40Gb", "Gb", "GB"), ("4XB", "XB", "B")]
)
def test_an_unknown_unit_is_refused_and_the_nearest_named(text: str, unit: str, first: str) -> None:
    message = (
        f"cannot read {text!r} as a size: unknown unit {unit!r}; valid names, nearest first: "
        f"{first}, "
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (3 * 2**29, "1.5 GiB"),
        (40 * 2**30, "40.0 GiB"),
        (2**20 - 1, "1.0 MiB"),
        (2**40 - 1, "1.0 TiB"),
        (5000 * 2**40, "5000.0 TiB"),
        (-3 * 2**29, "-1.5 GiB"),
        (-1, "-1 B"),
    ],
)
def test_bytes_are_written_for_people(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@given(st.integers(min_value=0, max_value=2**60))
def test_a_written_size_reads_back_within_its_last_digit(num_bytes: int) -> None:
    read_bytes = parse_bytes(format_bytes(num_bytes))
    assert abs(read_bytes - num_bytes) <= num_bytes / 20


@given(st.integers(min_value=0, max_value=2**42), st.integers(min_value=0, max_value=2**42))
def test_a_number_of_bytes_reads_back_exactly(whole: int, other: int) -> None:
    assert parse_bytes(str(whole)) == parse_bytes(f"{whole} B") == parse_bytes(whole)
    assert (parse_bytes(f"{whole}MiB") < parse_bytes(f"{other}MiB")) == (whole < other)


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("/nvme/scratch:500GiB", DiskSpec(path="/nvme/scratch", cap_bytes=500 * 2**30)),
        ("/nvme/a:b: 1 MB", DiskSpec(path="/nvme/a:b", cap_bytes=10**6)),
        ("scratch:0", DiskSpec(path="scratch", cap_bytes=0)),
    ],
)
def test_a_disk_is_a_directory_and_a_cap(text: str, spec: DiskSpec) -> None:
    assert parse_path_and_cap(text) == spec


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("/nvme/scratch", "disk '/nvme/scratch' has no cap; "),
        ("/nvme/scratch:", "disk '/nvme/scratch:' has no cap after the colon; "),
        (":500GiB", "disk ':500GiB' has no directory; "),
        ("/nvme:lots", "disk '/nvme:lots' has a cap that is not a size; "),
        ("/nvme:-1GiB", "disk '/nvme:-1GiB' has a cap that is not a size; "),
        ("", "disk '' has no cap; "),
    ],
)
def test_a_malformed_disk_is_refused_with_an_example(text: str, message: str) -> None:
    rule = 'write a directory, a colon and a cap, such as "/nvme/scratch:500GiB"'
    with pytest.raises(ValueError, match=f"^{re.escape(message + rule)}"):
        parse_path_and_cap(text)
