"""Files that were made to do harm: each ends in an answer, in the memory that a good file takes.

Without the rule that a test names, what it builds would run for hours, or fill the memory.
"""

import gzip
import json
import re
import sqlite3
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ebbtide import workload as workload_module
from ebbtide.catalog.config import read_config
from ebbtide.commands.arguments import read_machine, read_plan, read_workload
from ebbtide.errors import PlanError, TraceError
from ebbtide.integrations.maxtext import read_maxtext
from ebbtide.jax.flag_check import check_flags
from ebbtide.jax.flags import XLA_FLAGS
from ebbtide.jax.hlo import lines_of, read_transfers
from ebbtide.machine import Machine
from ebbtide.plan import Plan
from ebbtide.timeline import Timeline
from ebbtide.trace.builder import MOST_NOTES, Trace
from ebbtide.trace.read import read_trace
from ebbtide.workload import Workload
from tests.fuzz.readers import EXPORT, PLAN, WORKLOAD, to_sqlite
from tests.trace import chrome

MIB = 1 << 20
FORMS = (Workload.from_json, Plan.from_json, Machine.from_json, Timeline.from_json)

NESTED = (
    "[" * MIB,
    "[" * 400_000 + "]" * 400_000,
    '{"a":' * 200_000,
    '{"format": "ebbtide-plan", "version": 2, "name": ' + "[" * 900 + "]" * 900 + "}",
)


def peak_bytes(call: Callable[[], object]) -> int:
    """Return the most memory that Python took for a call, at one moment."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("text", NESTED, ids=range(len(NESTED)))
@pytest.mark.parametrize("read", FORMS)
def test_nested_forms_are_refused(read: Callable[[str], object], text: str) -> None:
    with pytest.raises(PlanError):
        read(text)


@pytest.mark.parametrize("text", NESTED, ids=range(len(NESTED)))
def test_nested_traces_and_configurations_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "nested.json"
    path.write_text(text)
    assert read_trace(path).devices == ()
    with pytest.raises(ValueError, match=r"^MODEL"):
        read_config(path)
    with pytest.raises(PlanError):
        read_maxtext(text)


def test_numbers_of_more_than_64_bits_are_refused() -> None:
    with pytest.raises(PlanError) as caught:
        Plan.from_json(PLAN.replace('"disk_bytes": 0', f'"disk_bytes": {2**63}'))
    assert str(caught.value) == (
        "plan: disk_bytes is 9223372036854775808; it must be at most 9223372036854775807 (64 "
        "bits). See docs/formats.md."
    )
    # Python reads no number of so many digits, and says so as a ValueError of its own.
    with pytest.raises(PlanError, match=r"not JSON .*4300 digits"):
        Plan.from_json(PLAN.replace('"disk_bytes": 0', f'"disk_bytes": {"9" * 5000}'))


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400", "1.0"])
def test_numbers_that_are_not_whole_are_refused(number: str) -> None:
    with pytest.raises(PlanError, match=r"disk_bytes is .*; it must be a whole number"):
        Plan.from_json(PLAN.replace('"disk_bytes": 0', f'"disk_bytes": {number}'))


def test_a_long_name_is_compared_and_shown_by_its_start() -> None:
    long = "a" * MIB
    for text in (
        PLAN.replace('"disk_bytes"', f'"{long}"'),
        PLAN.replace('"keep"', f'"{long}"'),
        PLAN.replace('"ebbtide-plan"', f'"{long}"'),
        PLAN.replace('"name"', f'"{long}": 1, "{long}"'),
    ):
        with pytest.raises(PlanError) as caught:
            Plan.from_json(text)
        assert len(str(caught.value)) < 1000


def test_blocks_that_share_a_class_cannot_ask_for_more_than_any_model_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(workload_module, "MOST_ENTRIES", 1000)
    form: dict[str, Any] = json.loads(WORKLOAD)
    form["blocks"] = [{"name": f"h.{i}", "class": 0} for i in range(10_000)]
    with pytest.raises(PlanError) as caught:
        Workload.from_json(json.dumps(form))
    assert re.fullmatch(
        r"workload: the first \d+ of 10000 blocks have 10\d\d activations, inputs and uses; all "
        r"together may have 1000\. Observe the model again: ebbtide observe\.",
        str(caught.value),
    )


def test_a_device_that_never_ends_is_read_no_further_than_a_good_file_goes() -> None:
    zero = Path("/dev/zero")
    for read in (read_workload, read_plan, lambda path: read_machine(str(path)), read_config):
        with pytest.raises(ValueError, match=r"/dev/zero: .*the file has more than \d+\.0 MiB"):
            read(zero)
    findings = check_flags({XLA_FLAGS: "/dev/zero"}, None)
    assert [f.name for f in findings if f.concern.value == "ignored"] == [XLA_FLAGS]


def test_a_name_with_a_nul_is_a_file_that_is_not_there() -> None:
    (finding,) = [f for f in check_flags({XLA_FLAGS: "a\0b"}, None) if f.name == XLA_FLAGS]
    assert "there is none, and the process ends" in finding.message


def test_a_number_behind_what_only_python_calls_a_space_is_unreadable() -> None:
    findings = check_flags({XLA_FLAGS: "--xla_gpu_memory_limit_slop_factor=\x1c95"}, None)
    assert any(f.message.startswith("XLA cannot read") for f in findings)


def test_layers_beyond_all_models_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    given = {"model_type": "gpt2", "n_layer": 10**9, "n_embd": 8, "n_head": 2, "vocab_size": 9}
    path.write_text(json.dumps(given))
    with pytest.raises(ValueError, match="n_layer is 1000000000; it must be at most 100000"):
        read_config(path)


def packed_trace(folder: Path, inside: bytes, times: int) -> Path:
    """Write a gzip file whose text repeats; each repetition is a member of its own."""
    member = gzip.compress(inside, 9, mtime=0)
    path = folder / "trace.json.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents": [', mtime=0) + times * member)
    return path


def test_what_unpacks_to_a_thousand_times_its_size_is_not_followed(tmp_path: Path) -> None:
    # 64 GiB of spaces in 64 MB.
    path = packed_trace(tmp_path, b" " * (4 * MIB), 16 * 1024)
    read: list[Trace] = []
    assert peak_bytes(lambda: read.append(read_trace(path))) < 40 * MIB
    assert (
        read[0]
        .notes[0]
        .startswith(
            "the file is not whole: it unpacks to more than 200 times its size, as no trace does."
        )
    )


def test_events_that_are_all_alike_are_not_unpacked_without_end(tmp_path: Path) -> None:
    name = b"f" * 4000
    event = b'{"ph": "X", "cat": "python_function", "name": "' + name + b'", "ts": 1, "dur": 1},'
    path = packed_trace(tmp_path, event * 1000, 4000)
    trace = read_trace(path)
    # 4000 bytes an event, and no more than 64 MiB.
    assert 16_000 < trace.num_events < 18_000
    assert "200 times its size" in trace.notes[0]


def test_values_of_an_event_may_have_any_type(tmp_path: Path) -> None:
    odd: dict[str, Any] = {"pid": [1], "tid": {"a": [2]}, "ts": 1, "dur": 2}
    path = chrome.write(
        tmp_path / "odd.json",
        *chrome.a_step(),
        *({**odd, "ph": phase, "cat": [], "name": ["x"]} for phase in "XBEMi"),
        *({**odd, "ph": "M", "name": n, "args": {"name": {}}} for n in ("thread_name", "x")),
        {**odd, "ph": "X", "cat": "cuda_runtime", "name": None, "args": []},
        {**odd, "ph": "X", "cat": "gpu_memcpy", "name": {}, "args": {"bytes": "9" * 30}},
        # Nothing in an event can pass for what the reader itself worked out.
        {"ph": "X", "name": "ebbtide: evict a", "start_ns": "0", "end_ns": None, "ts": "x"},
    )
    trace = read_trace(path)
    (device,) = trace.devices
    assert len(device.timeline.spans) == 5
    assert "1 events have no time that can be read; left out" in trace.notes


def test_an_event_with_a_number_of_too_many_digits_is_left_out(tmp_path: Path) -> None:
    path = chrome.write(tmp_path / "long.json", *chrome.a_step())
    first = '"traceEvents": ['
    long = '{"ph": "X", "ts": ' + "9" * 5000 + "}, "
    path.write_text(path.read_text().replace(first, first + long))
    trace = read_trace(path)
    assert len(trace.devices) == 1
    assert trace.notes == ("1 events are broken JSON and were left out",)


def test_a_file_with_many_faults_is_told_about_in_few_notes(tmp_path: Path) -> None:
    copies = [chrome.copy(f"Memcpy to {number}", 0, 1, 8) for number in range(3000)]
    trace = read_trace(chrome.write(tmp_path / "many.json", *chrome.a_step(), *copies))
    assert len(trace.notes) == MOST_NOTES + 1
    assert trace.notes[-1] == f"there was as much to say {3000 - MOST_NOTES} times more"


def endless_tree() -> bytes:
    """An export whose kernels are the leaves of a tree of ten levels that has one page a level."""
    page_bytes, num_cells, num_levels = 512, 70, 10
    whole = bytearray(to_sqlite(EXPORT))
    database = sqlite3.connect(":memory:")
    database.deserialize(bytes(whole))
    (root,) = database.execute(
        "SELECT rootpage FROM sqlite_master WHERE name = 'CUPTI_ACTIVITY_KIND_KERNEL'"
    ).fetchone()
    database.close()
    num_pages = len(whole) // page_bytes
    leaf = bytes(whole[(root - 1) * page_bytes : root * page_bytes])

    def level(child: int) -> bytes:
        cells = [struct.pack(">IB", child, 1 + number) for number in range(num_cells)]
        first = page_bytes - 5 * num_cells
        head = struct.pack(">BHHHBI", 5, 0, num_cells, first, 0, child)
        places = b"".join(struct.pack(">H", first + 5 * number) for number in range(num_cells))
        return (head + places).ljust(first, b"\0") + b"".join(cells)

    pages = [level(num_pages + 1 + number) for number in range(num_levels)]
    whole[(root - 1) * page_bytes : root * page_bytes] = pages[0]
    whole += b"".join(pages[1:]) + leaf
    whole[28:32] = struct.pack(">I", len(whole) // page_bytes)
    return bytes(whole)


def test_a_tree_that_comes_back_to_the_same_rows_ends(tmp_path: Path) -> None:
    path = tmp_path / "endless.sqlite"
    path.write_bytes(endless_tree())
    trace = read_trace(path)
    assert "the file is damaged (interrupted); what was read before that is shown" in trace.notes[0]
    assert trace.num_events < 100


def test_a_view_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "view.sqlite"
    tables = {name: rows for name, rows in EXPORT.items() if "KERNEL" not in name}
    path.write_bytes(to_sqlite(tables))
    database = sqlite3.connect(path)
    endless = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT"
    database.execute(
        f"CREATE VIEW CUPTI_ACTIVITY_KIND_KERNEL AS {endless} x AS start, x AS end FROM n"
    )
    database.commit()
    database.close()
    (device,) = read_trace(path).devices
    assert not any("gemm" in span.name for span in device.timeline.spans)


ALIASES = "a: &a [x, x]\n" + "".join(
    f"{name}: &{name} [*{before}, *{before}]\n"
    for before, name in zip("abcdefghijklmno", "bcdefghijklmnop", strict=True)
)
MERGES = "a: &a {x: 1}\n" + "".join(
    f"{name}: &{name} {{<<: [*{before}, *{before}]}}\n"
    for before, name in zip("abcdefghijklmno", "bcdefghijklmnop", strict=True)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (ALIASES, r"uses the alias \*a, and it may have none\. Write the value out\."),
        (MERGES, r"uses the alias \*a, and"),
        ("remat_policy: &p [*p]", r"uses the alias \*p, and"),
        ("[" * 5000, "is nested more than 20 deep"),
        ("a: !!python/object/apply:os.system [exit 1]", "uses the tag tag:yaml.org,2002:python/"),
        ("a: !!int ''", "uses the tag tag:yaml.org,2002:int, and it may have none"),
        ("a: 2024-99-99", "is no YAML: month must be in 1..12"),
        (f"a: {'9' * 5000}", "is no YAML: Exceeds the limit"),
        ("scan_layers: true\nscan_layers: false", "sets 'scan_layers' twice"),
        ("a" * (MIB + 1), f"has {MIB + 1} characters; it may have {MIB}"),
        ("\0", "is no YAML: unacceptable character"),
    ],
)
def test_yaml_that_is_more_than_settings_is_refused(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        read_maxtext(text)


@pytest.mark.parametrize(
    "line",
    [
        "  x = f32[1] call(y), " + "branch_computations={" * 50_000,
        "  x = f32[1]{0:S(5)} copy(" + "a" * MIB + "#",
        "  x = f32[1]{0:S(5)} copy(" + "%" * MIB,
        "  x = " + "(" * MIB,
        "  x = f32[1] fusion(y), calls=" + "calls=" * 100_000,
        "  " + "x" * MIB,
        " " * MIB,
        "  x = f32[1]{0:S(5)} " + "copy(" * 100_000,
        "  x" + ".remat" * 100_000 + " = f32[1] add(y)",
    ],
    ids=lambda line: line.strip()[:30],
)
def test_a_line_of_a_program_is_read_in_time_that_grows_with_its_length(line: str) -> None:
    text = f"ENTRY %e (x: f32[1]) -> f32[1] {{\n{line}\n{line}\n}}\n"
    assert read_transfers(lines_of(text)).num_lines == 4


def test_a_long_value_of_flags_is_read_in_time_that_grows_with_its_length() -> None:
    for text in ("--a='" + "b" * MIB, '--a="' + "\\" * MIB, "--a " * 100_000, "--" * MIB):
        assert check_flags({XLA_FLAGS: text}, "0.11.2")


def test_a_trace_that_is_nothing_but_a_start_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.pb"
    for content in (b"\n", b"\n\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", b"\n\0" * 10_000):
        path.write_bytes(content)
        try:
            assert read_trace(path).devices == ()
        except TraceError as error:
            assert str(error).startswith(f"{path}: ")
