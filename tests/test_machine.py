import json
from typing import Any

import pytest

from ebbtide.errors import PlanError
from ebbtide.machine import Machine

NUMBERS = (
    "device_bytes",
    "host_bytes",
    "out_bytes_per_s",
    "in_bytes_per_s",
    "both_bytes_per_s",
    "disk_bytes",
    "disk_write_bytes_per_s",
    "disk_read_bytes_per_s",
    "slowdown_ppm",
    "num_local_ranks",
)


def a_machine(**changes: Any) -> Machine:
    fields: dict[str, Any] = {
        "name": "mine",
        "device_bytes": 100,
        "host_bytes": 1000,
        "out_bytes_per_s": 5,
        "in_bytes_per_s": 6,
        "both_bytes_per_s": 9,
        "disk_bytes": 10_000,
        "disk_write_bytes_per_s": 2,
        "disk_read_bytes_per_s": 3,
        "num_local_ranks": 3,
        "source": "measured",
    }
    return Machine(**{**fields, **changes})


def form_with(**changes: object) -> str:
    return json.dumps({**json.loads(a_machine().to_json()), **changes})


def message_of(text: str) -> str:
    with pytest.raises(PlanError) as caught:
        Machine.from_json(text)
    return str(caught.value)


def test_ranks_share_the_host() -> None:
    assert a_machine().host_bytes_per_rank == 333
    assert a_machine(num_local_ranks=1).host_bytes_per_rank == 1000


def test_json_form_reads_back_equal_and_writes_the_same_bytes() -> None:
    text = a_machine().to_json()
    assert Machine.from_json(text) == a_machine()
    assert Machine.from_json(text).to_json() == text


def test_json_form_is_this_text() -> None:
    assert a_machine().to_json() == (
        "{\n"
        '  "both_bytes_per_s": 9,\n'
        '  "device_bytes": 100,\n'
        '  "disk_bytes": 10000,\n'
        '  "disk_read_bytes_per_s": 3,\n'
        '  "disk_write_bytes_per_day": 0,\n'
        '  "disk_write_bytes_per_s": 2,\n'
        '  "format": "ebbtide-machine",\n'
        '  "host_bytes": 1000,\n'
        '  "in_bytes_per_s": 6,\n'
        '  "name": "mine",\n'
        '  "num_local_ranks": 3,\n'
        '  "out_bytes_per_s": 5,\n'
        '  "slowdown_ppm": 0,\n'
        '  "source": "measured",\n'
        '  "version": 2\n'
        "}\n"
    )


@pytest.mark.parametrize("field", NUMBERS)
def test_a_negative_number_is_refused(field: str) -> None:
    assert message_of(form_with(**{field: -1})) == (
        f"machine 'mine' has {field} -1; times and sizes are 0 or more. Measure it again."
    )


def test_a_machine_without_ranks_is_refused() -> None:
    assert message_of(form_with(num_local_ranks=0)) == (
        "machine 'mine' has 0 local ranks; this process is one."
    )


@pytest.mark.parametrize("field", ["out_bytes_per_s", "in_bytes_per_s", "both_bytes_per_s"])
def test_a_host_tier_without_bandwidth_is_refused(field: str) -> None:
    assert message_of(form_with(**{field: 0})) == (
        f"machine 'mine' has host_bytes 1000 but {field} 0; nothing can be moved there. "
        "Give the bandwidth, or set host_bytes to 0."
    )


@pytest.mark.parametrize("field", ["disk_write_bytes_per_s", "disk_read_bytes_per_s"])
def test_a_disk_tier_without_bandwidth_is_refused(field: str) -> None:
    assert message_of(form_with(**{field: 0})) == (
        f"machine 'mine' has disk_bytes 10000 but {field} 0; nothing can be moved there. "
        "Give the bandwidth, or set disk_bytes to 0."
    )


def test_a_machine_without_tiers_needs_no_bandwidth() -> None:
    machine = Machine(
        name="alone",
        device_bytes=1,
        host_bytes=0,
        out_bytes_per_s=0,
        in_bytes_per_s=0,
        both_bytes_per_s=0,
    )
    assert machine.host_bytes_per_rank == 0
    assert Machine.from_json(machine.to_json()) == machine


def test_version_1_has_no_limit_on_what_a_day_writes() -> None:
    form = json.loads(a_machine(disk_write_bytes_per_day=7).to_json())
    assert Machine.from_json(json.dumps(form)).disk_write_bytes_per_day == 7
    form["version"] = 1
    assert message_of(json.dumps(form)).startswith(
        "machine: unknown field 'disk_write_bytes_per_day'"
    )
    del form["disk_write_bytes_per_day"]
    assert Machine.from_json(json.dumps(form)) == a_machine()


def test_another_format_is_refused() -> None:
    assert message_of(form_with(format="ebbtide-plan")) == (
        "the file's format is 'ebbtide-plan'; this reader takes 'ebbtide-machine' only. "
        "Pass a file of that format."
    )


@pytest.mark.parametrize("version", [3, 0, "1", True, None])
def test_another_version_is_refused(version: object) -> None:
    assert message_of(form_with(version=version)) == (
        f"the file's version is {version!r}; this ebbtide reads versions 1 to 2 of "
        "'ebbtide-machine' only. Write the file again with this ebbtide."
    )


@pytest.mark.parametrize("field", [*NUMBERS, "name", "source"])
def test_no_field_may_be_missing(field: str) -> None:
    form = json.loads(a_machine().to_json())
    del form[field]
    assert message_of(json.dumps(form)) == (
        f"machine has no field '{field}'; it is required. See docs/formats.md."
    )


def test_an_unknown_field_is_refused_with_the_nearest_first() -> None:
    assert message_of(form_with(host_byte=1)).startswith(
        "machine: unknown field 'host_byte'; valid names, nearest first: host_bytes, "
    )


@pytest.mark.parametrize(
    ("field", "value", "wanted"),
    [
        ("name", 3, "name is 3; it must be a text"),
        ("source", None, "source is null; it must be a text"),
        ("device_bytes", "80GiB", 'device_bytes is "80GiB"; it must be a whole number'),
        ("out_bytes_per_s", 5.5e10, "out_bytes_per_s is 55000000000.0; it must be a whole number"),
        ("num_local_ranks", True, "num_local_ranks is true; it must be a whole number"),
    ],
)
def test_a_field_of_the_wrong_type_is_refused(field: str, value: object, wanted: str) -> None:
    assert message_of(form_with(**{field: value})) == f"machine: {wanted}. See docs/formats.md."
