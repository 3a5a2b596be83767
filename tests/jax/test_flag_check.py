"""What is found in an environment, with its source and what to change."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from ebbtide.jax.flag_check import Concern, FlagFinding, check_flags
from ebbtide.jax.flags import xla_flags
from ebbtide.jax.known_flags import find_unknown_flags, find_xla_libraries
from tests.jax.test_flags import MACHINE, PLAN

GOOD = xla_flags(MACHINE, PLAN).xla_flags
HIDING = "xla_gpu_enable_latency_hiding_scheduler"
PIPELINING = "xla_gpu_enable_pipelined_host_offloading"
BUFFER = "xla_gpu_enable_command_buffer"
OVERLAP = "xla_gpu_experimental_parallel_collective_overlap_limit"
ASYNC = "xla_gpu_experimental_parallel_async_compute_limit"
SLOP = "xla_gpu_memory_limit_slop_factor"


def check(flags: str, version: str | None = "0.11.2", **environ: str) -> list[FlagFinding]:
    return list(check_flags({"XLA_FLAGS": flags, **environ}, version))


def names(findings: Iterable[FlagFinding]) -> list[tuple[Concern, str, bool]]:
    return [(f.concern, f.name, f.is_serious) for f in findings]


def test_an_empty_environment_lacks_three_flags_that_matter_and_one_that_helps() -> None:
    assert names(check_flags({}, "0.11.2")) == [
        (Concern.MISSING, HIDING, True),
        (Concern.MISSING, PIPELINING, True),
        (Concern.MISSING, BUFFER, True),
        (Concern.MISSING, ASYNC, False),
    ]
    assert names(check_flags({}, "0.11.2", is_scanned=False)) == [
        (Concern.MISSING, HIDING, True),
        (Concern.MISSING, ASYNC, False),
    ]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (f"{GOOD} --{HIDING}=false", (Concern.CONTRADICTORY, HIDING, True)),
        (f"{GOOD} --{PIPELINING}=0", (Concern.CONTRADICTORY, PIPELINING, True)),
        (f"{GOOD} --{BUFFER}=FUSION,CUBLAS", (Concern.CONTRADICTORY, BUFFER, True)),
        (f"{GOOD} --{ASYNC}=2", (Concern.CONTRADICTORY, ASYNC, False)),
        (f"{GOOD} --{OVERLAP}=4", (Concern.UNSAFE, OVERLAP, True)),
        (f"{GOOD} --{SLOP}=5", (Concern.CONTRADICTORY, SLOP, False)),
        (f"{GOOD} --{HIDING}=yes", (Concern.UNKNOWN, HIDING, True)),
        (f"{GOOD} --{ASYNC}=many", (Concern.UNKNOWN, ASYNC, True)),
        (f"{GOOD} -{HIDING}=true", (Concern.UNKNOWN, f"-{HIDING}", True)),
        (f"{GOOD} oops --{HIDING}=false", (Concern.IGNORED, "XLA_FLAGS", True)),
    ],
)
def test_each_fault_is_found(flags: str, expected: tuple[Concern, str, bool]) -> None:
    assert expected in names(check(flags))


def test_other_values_of_one_flag_are_found_and_equal_ones_are_not() -> None:
    findings = check(f"--{OVERLAP}=1 {GOOD} --{ASYNC}=4")
    assert names(findings) == [(Concern.DUPLICATE, ASYNC, False)]
    assert findings[0].message == "it is given 2 times: 8, 4; the last counts"
    assert findings[0].change == f"Give it once: --{ASYNC}=4"


def test_an_overlap_limit_is_safe_without_the_scheduler() -> None:
    assert (Concern.UNSAFE, OVERLAP, True) not in names(check(f"--{OVERLAP}=4"))


def test_a_file_of_flags_is_read(tmp_path: Path) -> None:
    path = tmp_path / "flags"
    path.write_text(GOOD.replace(" ", "\n"))
    assert check(str(path)) == []
    missing = check(str(tmp_path / "gone"))
    assert names(missing)[0] == (Concern.UNKNOWN, "XLA_FLAGS", True)
    assert "takes it for the name of a file" in missing[0].message


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.11.0", [(Concern.UNSAFE, "jaxlib", True)]),
        ("0.11.1", [(Concern.UNSAFE, "jaxlib", False)]),
        ("0.10.2", [(Concern.UNSAFE, "jaxlib", False)]),
        ("0.10.1", [(Concern.UNSAFE, "jaxlib", False), (Concern.IGNORED, PIPELINING, False)]),
        ("0.11.2", []),
        ("0.12.0.dev20261101", []),
        (None, []),
    ],
)
def test_what_is_known_of_a_release(
    version: str | None, expected: list[tuple[Concern, str, bool]]
) -> None:
    findings = check(GOOD, version)
    assert names(findings) == expected
    assert all("openxla/xla#4" in finding.source for finding in findings)


def test_unrolled_layers_are_not_touched_by_the_fault_of_scans() -> None:
    flags = xla_flags(MACHINE, PLAN, is_scanned=False).environment()
    assert check_flags(flags, "0.11.0", is_scanned=False) == ()


def test_optimisation_levels_turn_hiding_on_and_make_pipelining_unsafe() -> None:
    findings = check(f"--{PIPELINING}=true --{BUFFER}= --{ASYNC}=8", JAX_OPTIMIZATION_LEVEL="O1")
    assert names(findings) == [(Concern.UNSAFE, "JAX_OPTIMIZATION_LEVEL", True)]
    assert findings[0].source == "openxla/xla#37979"
    assert check(GOOD, JAX_OPTIMIZATION_LEVEL="O0") == []


@pytest.mark.parametrize(("value", "num"), [("1", 1), ("True", 1), ("0", 0), ("false", 0)])
def test_the_coming_remat_is_found(value: str, num: int) -> None:
    findings = check(GOOD, JAX_REMAT3=value)
    assert names(findings) == [(Concern.CONTRADICTORY, "JAX_REMAT3", True)] * num


def test_two_memory_fractions_are_a_contradiction() -> None:
    both = {"XLA_CLIENT_MEM_FRACTION": "0.9", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.75"}
    assert names(check(GOOD, "0.11.2", **both)) == [
        (Concern.CONTRADICTORY, "XLA_PYTHON_CLIENT_MEM_FRACTION", False)
    ]
    assert check(GOOD, XLA_CLIENT_MEM_FRACTION="0.9") == []


def test_a_plan_that_needs_more_host_memory_than_xla_may_pin_is_found() -> None:
    from dataclasses import replace

    wanted = xla_flags(MACHINE, replace(PLAN, host_bytes=100 * 2**30))
    for environ, shown in (({}, "64"), ({"XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "80"}, "80")):
        findings = check_flags({"XLA_FLAGS": GOOD, **environ}, "0.11.2", wanted=wanted)
        assert [finding.name for finding in findings] == ["XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"]
        assert findings[0].message == f"XLA may pin {shown} GiB, and the plan needs 114"
        assert findings[0].is_serious


def test_serious_findings_come_first() -> None:
    ranks = [f.is_serious for f in check(f"--{ASYNC}=1 --{ASYNC}=2 oops", "0.10.2")]
    assert ranks == sorted(ranks, reverse=True)
    assert True in ranks and False in ranks


def test_the_installed_xla_knows_our_flags_and_not_obsolete_ones() -> None:
    libraries = find_xla_libraries()
    assert libraries
    ours = [flag.name for flag in xla_flags(MACHINE, PLAN).flags]
    assert find_unknown_flags([*ours, "xla_gpu_pipeline_all_gather"], libraries) == (
        "xla_gpu_pipeline_all_gather",
    )


def test_unknown_flags_end_the_process_and_those_of_tpus_say_so() -> None:
    flags = f"{GOOD} --xla_tpu_enable_x=true --xla_gone=1"
    findings = check_flags(
        {"XLA_FLAGS": flags},
        "0.11.2",
        find_unknown=lambda names: tuple(n for n in names if n in ("xla_tpu_enable_x", "xla_gone")),
    )
    assert names(findings) == [
        (Concern.UNKNOWN, "xla_gone", True),
        (Concern.UNKNOWN, "xla_tpu_enable_x", True),
    ]
    assert "LIBTPU_INIT_ARGS" in findings[1].change


def test_a_name_is_known_only_if_every_library_has_it(tmp_path: Path) -> None:
    first, second = tmp_path / "a.so", tmp_path / "b.so"
    first.write_bytes(b"..\0xla_a\0xla_b\0xla_cd\0")
    second.write_bytes(b"\0xla_a\0xla_c\0")
    names = ["xla_a", "xla_b", "xla_c"]
    assert find_unknown_flags(names, [first, second]) == ("xla_b", "xla_c")
    assert find_unknown_flags(names, [first]) == ("xla_c",)
    assert find_unknown_flags(names, []) == ()
