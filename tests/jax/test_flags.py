"""Which flags a plan gets, and with which values."""

from dataclasses import replace

import pytest

from ebbtide.errors import PlanError
from ebbtide.jax.flag_check import check_flags
from ebbtide.jax.flag_syntax import parse_xla_flags
from ebbtide.jax.flags import FlagSet, xla_flags
from ebbtide.machine import Machine
from ebbtide.plan import Decision, Plan

GIB = 2**30
MACHINE = Machine(
    name="test",
    device_bytes=100 * GIB,
    host_bytes=256 * GIB,
    out_bytes_per_s=50 * 10**9,
    in_bytes_per_s=50 * 10**9,
    both_bytes_per_s=90 * 10**9,
    num_local_ranks=2,
)
PLAN = Plan(
    name="lp",
    model="Block",
    fingerprint="0" * 16,
    decisions={"x": Decision.HOST},
    host_bytes=40 * GIB,
    disk_bytes=0,
    max_out_bytes_in_flight=0,
    max_in_bytes_in_flight=0,
    budget_bytes=20 * GIB,
)


def values(flags: FlagSet) -> dict[str, str]:
    return {s.name: s.value for s in (*flags.flags, *flags.variables)}


def test_a_scan_that_offloads_gets_every_flag() -> None:
    assert values(xla_flags(MACHINE, PLAN)) == {
        "xla_gpu_enable_latency_hiding_scheduler": "true",
        "xla_gpu_enable_pipelined_host_offloading": "true",
        "xla_gpu_experimental_parallel_async_compute_limit": "8",
        "xla_gpu_enable_command_buffer": "",
        "xla_gpu_experimental_parallel_collective_overlap_limit": "1",
        "xla_gpu_memory_limit_slop_factor": "95",
        "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "46",
        "XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE": "false",
    }


def test_unrolled_layers_keep_command_buffers_and_get_their_budget() -> None:
    unrolled = values(xla_flags(MACHINE, PLAN, is_scanned=False))
    assert "xla_gpu_enable_command_buffer" not in unrolled
    assert unrolled["xla_gpu_enable_pipelined_host_offloading"] == "false"
    assert unrolled["xla_gpu_memory_limit_slop_factor"] == "20"
    no_budget = xla_flags(MACHINE, replace(PLAN, budget_bytes=0), is_scanned=False)
    assert values(no_budget)["xla_gpu_memory_limit_slop_factor"] == "95"


def test_a_plan_that_moves_nothing_gets_none() -> None:
    flags = xla_flags(MACHINE, replace(PLAN, host_bytes=0))
    assert flags == FlagSet()
    assert dict(flags.environment("--a=1")) == {}
    assert str(flags) == "no flags: the plan moves nothing to the host"


def test_each_setting_has_a_reason_and_a_source() -> None:
    flags = xla_flags(MACHINE, PLAN)
    for setting in (*flags.flags, *flags.variables):
        assert setting.reason
        assert "#" in setting.source or "measured" in setting.source or "NVIDIA" in setting.source
        assert f"{setting.name}={setting.value}: {setting.reason}" in str(flags)


def test_ours_come_after_what_is_there_and_count() -> None:
    there = "--xla_gpu_enable_latency_hiding_scheduler=false --xla_dump_to='a b'"
    environment = xla_flags(MACHINE, PLAN).environment(there)
    parsed = parse_xla_flags(environment["XLA_FLAGS"], lambda _: None)
    assert parsed.ignored == ""
    assert [str(a) for a in parsed.arguments[:2]] == [
        "--xla_gpu_enable_latency_hiding_scheduler=false",
        "--xla_dump_to=a b",
    ]
    last = parsed.last("xla_gpu_enable_latency_hiding_scheduler")
    assert last is not None and last.value == "true"
    assert environment["XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"] == "46"


def test_host_memory_is_within_what_a_rank_may_pin() -> None:
    full = replace(PLAN, host_bytes=128 * GIB)
    assert values(xla_flags(MACHINE, full))["XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"] == "128"
    with pytest.raises(PlanError, match=r"moves 128\.\d* GiB to the host, and a rank of test may"):
        xla_flags(MACHINE, replace(PLAN, host_bytes=128 * GIB + GIB // 8))


@pytest.mark.parametrize("is_scanned", [True, False])
def test_what_is_chosen_has_no_findings(is_scanned: bool) -> None:
    flags = xla_flags(MACHINE, PLAN, is_scanned=is_scanned)
    environment = flags.environment()
    assert check_flags(environment, "0.11.2", wanted=flags, is_scanned=is_scanned) == ()
