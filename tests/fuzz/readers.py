"""Every reader of files and texts that come from elsewhere, with what it may say no with.

`read` does with what was read what the commands do: a reader that lets something through which
then breaks the report is as wrong as one that breaks itself.
"""

import gzip
import json
import sqlite3
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import ebbtide
from ebbtide.budget import parse_budget
from ebbtide.catalog.config import read_config
from ebbtide.catalog.machines import find_machine
from ebbtide.commands.arguments import read_machine, read_named_plan, read_workload
from ebbtide.commands.trace_json import describe_trace
from ebbtide.commands.trace_report import write_trace
from ebbtide.errors import PlanError, TraceError
from ebbtide.integrations.maxtext import read_maxtext
from ebbtide.jax.flag_check import check_flags
from ebbtide.jax.flags import HOST_LIMIT, XLA_FLAGS, xla_flags
from ebbtide.jax.hlo import lines_of, read_transfers
from ebbtide.machine import Machine
from ebbtide.plan import Plan
from ebbtide.timeline import Timeline
from ebbtide.trace.findings import find
from ebbtide.trace.overlap import analyse
from ebbtide.trace.read import read_trace
from ebbtide.units import format_bytes, parse_bytes, parse_path_and_cap
from ebbtide.workload import Workload
from tests.catalog.test_config import DEEPSEEK_V3, LLAMA_3_8B, QWEN3_30B
from tests.fuzz.edits import broken_bytes, broken_json
from tests.jax import hlo_texts
from tests.test_docs import FORMATS, json_examples
from tests.trace import chrome, test_hlo_program, test_nsys, test_xplane
from tests.trace.planes import Plane, Programs, space

SOURCES = Path(ebbtide.__file__).parent
MACHINE = find_machine("h200-pcie5")
WORKLOAD, PLAN, MACHINE_FORM, TIMELINE = json_examples(FORMATS)

# The forms before the present one, which are read too.
OLD_WORKLOAD = json.dumps(
    {
        "format": "ebbtide-workload",
        "version": 1,
        "model": "M",
        "blocks": [
            {
                "name": "h.0",
                "class_name": "B",
                "activations": [
                    {
                        "name": "h.0.input",
                        "op": "",
                        "kind": "input",
                        "num_bytes": 8,
                        "inputs": [],
                        "is_saved": True,
                        "is_replayable": False,
                        "group": "h.0.input",
                    }
                ],
            }
        ],
    }
)

FLAGS = (
    b"--xla_gpu_enable_latency_hiding_scheduler=true --xla_gpu_enable_command_buffer= "
    b'--xla_gpu_memory_limit_slop_factor=95 --xla_gpu_x=\'a b\' --xla_gpu_y="a\\" b"',
    b"--xla_gpu_experimental_parallel_async_compute_limit=8 --xla_gpu_z",
    b"/tmp/no-such-file-of-flags",
)

MAXTEXT = (
    "base_config: base.yml\ndecoder_block: llama2\nattention: cudnn_flash_te\nhardware: gpu\n"
    "remat_policy: custom\nscan_layers: true\ncontext: offload\nquery_proj: device\n"
    "mlp_activations: [silu, linear]\nnum_experts: 1\nq_lora_rank: 0\n",
    "remat_policy: minimal_offloaded\ndecoder_block: deepseek\nhardware: tpu\n",
)

SIZES = (b"40GiB", b"1.5 GB", b"1024", b"0B", b"50%", b"auto")
DISKS = (b"/nvme/scratch:500GiB", b"C:/x:y:1GB")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """One reader, the files to try it with, and the errors that are answers."""

    name: str
    make: Callable[[Random], bytes]
    """Makes a broken file of its kind, or now and then a good one."""
    read: Callable[[bytes, Path], object]
    """Reads the bytes; it may write them to the folder that it is given."""
    refusals: tuple[type[Exception], ...]

    def is_read(self, content: bytes, folder: Path) -> bool:
        """Return whether it takes the bytes; an exception that is no refusal comes out."""
        try:
            self.read(content, folder)
        except self.refusals as error:
            # A sentence of ours, not what a library says that was taken by surprise.
            assert type(error) in self.refusals, f"{type(error).__name__}: {error}"
            raised = list(traceback.walk_tb(error.__traceback__))[-1][0].f_code.co_filename
            assert Path(raised).is_relative_to(SOURCES), f"{raised}: {error}"
            assert 40 <= len(str(error)) <= 5000 + 2 * len(content), error
            return False
        return True


def _write(content: bytes, folder: Path, name: str) -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def _read_workload(content: bytes, folder: Path) -> None:
    try:
        read_workload(_write(content, folder, "workload.json"))
    except ValueError as error:
        if "it has no times" not in str(error):
            raise
    workload = Workload.from_json(content.decode("utf-8"))
    again = Workload.from_json(workload.to_json())
    assert again == workload
    assert again.fingerprint == workload.fingerprint
    format_bytes(workload.num_bytes_saved)


def _read_plan(content: bytes, folder: Path) -> None:
    read_named_plan(str(_write(content, folder, "plan.json")))
    plan = Plan.from_json(content.decode("utf-8"))
    assert Plan.from_json(plan.to_json()) == plan
    for num_bytes in (plan.host_bytes, plan.disk_bytes, plan.peak_bytes, plan.budget_bytes):
        format_bytes(num_bytes)
    try:
        plan.check_fits(Workload.from_json(WORKLOAD))
        xla_flags(MACHINE, plan)
    except PlanError as error:
        str(error).encode("ascii", errors="backslashreplace")


def _read_machine(content: bytes, folder: Path) -> None:
    machine = read_machine(str(_write(content, folder, "machine.json")))
    assert Machine.from_json(machine.to_json()) == machine
    assert machine.slow_ns(1 << 30, machine.out_bytes_per_s) >= 0
    format_bytes(machine.device_bytes)


def _read_timeline(content: bytes, folder: Path) -> None:
    timeline = Timeline.from_json(content.decode("utf-8", errors="replace"))
    assert Timeline.from_json(timeline.to_json()) == timeline
    analyse(timeline, MACHINE)


def _read_trace(name: str) -> Callable[[bytes, Path], None]:
    def read(content: bytes, folder: Path) -> None:
        trace = read_trace(_write(content, folder, name))
        analyses = [analyse(device.timeline, MACHINE) for device in trace.devices]
        findings = [
            finding
            for device, analysis in zip(trace.devices, analyses, strict=True)
            for finding in find(device, analysis, machine=MACHINE)
        ]
        for line in write_trace(trace, analyses, findings, []):
            line.encode("utf-8", errors="backslashreplace")
        json.dumps(describe_trace(trace, analyses, findings, []))

    return read


def _read_config(content: bytes, folder: Path) -> None:
    shape = read_config(_write(content, folder, "config.json"))
    assert shape.num_layers > 0


def _read_maxtext(content: bytes, folder: Path) -> None:
    read_maxtext(content.decode("utf-8", errors="replace"))


def _read_hlo(content: bytes, folder: Path) -> None:
    text = content.decode("utf-8", errors="replace")
    assert read_transfers(lines_of(text)).num_lines <= text.count("\n") + 1


def _read_flags(content: bytes, folder: Path) -> None:
    text = content.decode("utf-8", errors="surrogateescape")
    wanted = xla_flags(MACHINE, Plan.from_json(PLAN))
    for finding in check_flags({XLA_FLAGS: text}, "0.11.2", wanted=wanted):
        assert finding.change
    check_flags({HOST_LIMIT: text, "JAX_OPTIMIZATION_LEVEL": text}, text, wanted=wanted)


def _read_size(content: bytes, folder: Path) -> None:
    text = content.decode("utf-8", errors="surrogateescape")
    num_bytes = parse_budget(text, MACHINE.device_bytes)
    assert num_bytes >= 0
    assert format_bytes(num_bytes)
    if "%" not in text and text.strip().lower() != "auto":
        assert parse_bytes(text) == num_bytes


def _read_disk(content: bytes, folder: Path) -> None:
    spec = parse_path_and_cap(content.decode("utf-8", errors="surrogateescape"))
    assert spec.path.strip()
    assert format_bytes(spec.cap_bytes)


CHROME = chrome.text_of(
    *chrome.a_step(),
    {"ph": "M", "name": "process_name", "pid": 7, "tid": 0, "args": {"name": "/device:GPU:1"}},
    {"ph": "M", "name": "thread_name", "pid": 7, "tid": 3, "args": {"name": "Stream #3"}},
    {
        **{"ph": "X", "name": "MemcpyD2H", "pid": 7, "tid": 3, "ts": 1764000000000000},
        **{"dur": 5, "args": {"memcpy_details": "kind_src:device size:12"}},
    },
    {"ph": "B", "name": "ebbtide: evict a", "pid": 1, "tid": 1, "ts": "12.5", "args": {}},
    {"ph": "E", "name": "ebbtide: evict a", "pid": 1, "tid": 1, "ts": 13, "args": {}},
    {
        **{"ph": "i", "name": "[memory]", "pid": 1, "tid": 1, "ts": 1764000000000001},
        "args": {**{"Device Type": 1, "Device Id": 0, "Total Allocated": 9, "Total Reserved": 12}},
    },
)


def _packed(chance: Random) -> bytes:
    """Broken JSON that is packed well, or good JSON whose packing is broken."""
    if chance.randrange(2):
        return gzip.compress(broken_json(chance, [CHROME]), 1, mtime=0)
    return broken_bytes(chance, [gzip.compress(CHROME.encode(), mtime=0)])


CELLS = (
    *(None, 0, -1, 1, 2**63 - 1, -(2**63), 1.5, float("inf"), "", "a", "12", b"", b"\xff\0"),
    *("step 5", "ebbtide: evict x", 59, 60, "9" * 5000),
)


def _export(chance: Random) -> bytes:
    """An SQLite file with odd values in its cells, or with broken bytes."""
    if chance.randrange(2):
        return broken_bytes(chance, [whole_export()])
    rows = {name: [list(row) for row in table] for name, table in EXPORT.items()}
    for _ in range(chance.randrange(1, 5)):
        line = chance.choice(rows[chance.choice(list(rows))])
        line[chance.randrange(len(line))] = chance.choice(CELLS)
    if chance.randrange(4) == 0:
        del rows[chance.choice(list(rows))]
    return to_sqlite(rows)


EXPORT: dict[str, Sequence[Sequence[Any]]] = {
    **test_nsys.a_step(),
    "StringIds": list(enumerate(test_nsys.STRINGS)),
    "CUPTI_ACTIVITY_KIND_MEMSET": [[1100, 1110, 0, 1, 7, 9, test_nsys.PID, 0, 64]],
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": [[1110, 1120, 0, 1, 7, 10, test_nsys.PID, 3]],
    "ENUM_CUDA_MEMCPY_OPER": [[1, "HTOD", "Host-to-Device"]],
    "ENUM_CUDA_MEM_KIND": [[2, "PINNED", "Pinned"]],
}


@cache
def whole_export() -> bytes:
    """Return an export without a fault."""
    return to_sqlite(EXPORT)


def to_sqlite(tables: Mapping[str, Sequence[Sequence[Any]]]) -> bytes:
    """Return an export with these rows; its columns have no types, and take any value."""
    database = sqlite3.connect(":memory:")
    try:
        # Small pages, so that an edit of the file meets what is read.
        database.execute("PRAGMA page_size = 512")
        for name, rows in tables.items():
            parts = test_nsys.SCHEMA[name].split(", ")
            columns = ", ".join(f'"{part.split()[0]}"' for part in parts)
            database.execute(f"CREATE TABLE {name} ({columns})")
            marks = ", ".join("?" * len(parts))
            database.executemany(f"INSERT INTO {name} VALUES ({marks})", rows)
        database.commit()
        return database.serialize()
    finally:
        database.close()


@cache
def _planes() -> list[bytes]:
    names = Plane("/device:GPU:1")
    names.add_line("Stream #1", 5, ("MemcpyD2H", 0, 9000, {"memcpy_details": "size:77", "n": 1}))
    programs = Programs({41: test_hlo_program.scanned_proto()})
    copies = [test_xplane.copied_by(41, name) for name in ("wrapped_update", "wrapped_slice")]
    return [
        space(test_xplane.host_plane(), test_xplane.gpu_plane(), names),
        space(programs, *copies),
    ]


@cache
def _configs() -> list[str]:
    gpt2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 9}
    return [json.dumps(c) for c in (LLAMA_3_8B, QWEN3_30B, DEEPSEEK_V3, gpt2)]


READERS = (
    Reader(
        name="workload",
        make=lambda chance: broken_json(chance, [WORKLOAD, OLD_WORKLOAD]),
        read=_read_workload,
        refusals=(ValueError, PlanError),
    ),
    Reader(
        name="plan",
        make=lambda chance: broken_json(chance, [PLAN]),
        read=_read_plan,
        refusals=(ValueError, PlanError),
    ),
    Reader(
        name="machine",
        make=lambda chance: broken_json(chance, [MACHINE_FORM]),
        read=_read_machine,
        refusals=(ValueError,),
    ),
    Reader(
        name="timeline",
        make=lambda chance: broken_json(chance, [TIMELINE]),
        read=_read_timeline,
        refusals=(PlanError,),
    ),
    Reader(
        name="chrome trace",
        make=lambda chance: broken_json(chance, [CHROME]),
        read=_read_trace("trace.json"),
        refusals=(TraceError,),
    ),
    Reader(
        name="gzip trace",
        make=_packed,
        read=_read_trace("trace.json.gz"),
        refusals=(TraceError,),
    ),
    Reader(
        name="nsys export",
        make=_export,
        read=_read_trace("trace.sqlite"),
        refusals=(TraceError,),
    ),
    Reader(
        name="xplane",
        make=lambda chance: broken_bytes(chance, _planes()),
        read=_read_trace("trace.xplane.pb"),
        refusals=(TraceError,),
    ),
    Reader(
        name="config.json",
        make=lambda chance: broken_json(chance, _configs()),
        read=_read_config,
        refusals=(ValueError,),
    ),
    Reader(
        name="MaxText YAML",
        make=lambda chance: broken_bytes(chance, [text.encode() for text in MAXTEXT]),
        read=_read_maxtext,
        refusals=(PlanError,),
    ),
    Reader(
        name="HLO text",
        make=lambda chance: broken_bytes(
            chance, [hlo_texts.ENGAGED.encode(), hlo_texts.UNROLLED.encode()]
        ),
        read=_read_hlo,
        refusals=(),
    ),
    Reader(
        name="XLA flags",
        make=lambda chance: broken_bytes(chance, FLAGS),
        read=_read_flags,
        refusals=(),
    ),
    Reader(
        name="size",
        make=lambda chance: broken_bytes(chance, SIZES),
        read=_read_size,
        refusals=(ValueError,),
    ),
    Reader(
        name="disk",
        make=lambda chance: broken_bytes(chance, DISKS),
        read=_read_disk,
        refusals=(ValueError,),
    ),
)
