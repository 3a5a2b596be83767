"""Findings about host memory, on facts that a test makes up."""

from dataclasses import replace

from ebbtide.doctor.facts import Facts, Host
from ebbtide.doctor.finding import Code, Finding, Severity
from ebbtide.doctor.findings import find
from ebbtide.memory.limits import HostLimit
from tests.doctor.machines import GIB, GOOD, GPU, HOST, with_gpu

GROUP = HostLimit(
    text="memory.max of the control group is 100.0 GiB, of which 4.0 GiB is in use",
    room_bytes=90 * GIB,
    advice="Raise the container's memory limit",
    is_of_group=True,
)
REFUSAL = "256.0 MiB of pinned host memory was refused: cudaHostRegister answered 2."


def on(host: Host) -> Facts:
    return replace(GOOD, host=host)


def only(facts: Facts) -> Finding:
    (finding,) = find(facts)
    return finding


def test_memlock_is_a_note_where_pinning_worked() -> None:
    found = only(on(replace(HOST, memlock_bytes=8 * 2**20)))
    assert (found.code, found.severity) == (Code.LOW_MEMLOCK, Severity.NOTE)
    assert found.evidence == (
        "`ulimit -l` is 8.0 MiB, and the host leaves 840.0 GiB; pinning more than that worked all "
        "the same"
    )


def test_memlock_is_serious_where_pinning_was_refused() -> None:
    facts = with_gpu(
        replace(GPU, alone=None, together=None, refusal=REFUSAL),
        on(replace(HOST, memlock_bytes=8 * 2**20)),
    )
    found = find(facts)
    assert [(f.code, f.severity) for f in found] == [
        (Code.PINNING_REFUSED, Severity.SERIOUS),
        (Code.LOW_MEMLOCK, Severity.SERIOUS),
    ]
    assert found[0].evidence == REFUSAL.rstrip(".")
    assert found[1].evidence == "`ulimit -l` is 8.0 MiB, and the host leaves 840.0 GiB"
    assert "ulimit -l unlimited" in found[1].advice


def test_memlock_above_what_is_free_and_without_a_gpu_is_nothing() -> None:
    assert find(on(replace(HOST, memlock_bytes=900 * GIB))) == ()
    without = replace(on(replace(HOST, memlock_bytes=1)), gpus=(), pci_gpus=())
    assert [f.code for f in find(without)] == [Code.NO_GPU]


def test_less_than_was_asked_for_is_a_note() -> None:
    found = only(with_gpu(replace(GPU, refusal=REFUSAL)))
    assert (found.code, found.severity) == (Code.PINNING_REFUSED, Severity.NOTE)


def test_a_control_group_that_leaves_enough_is_a_note() -> None:
    found = only(on(replace(HOST, limit=GROUP)))
    assert (found.code, found.severity) == (Code.GROUP_LIMIT, Severity.NOTE)
    assert found.evidence == f"{GROUP.text}; the machine has 900.0 GiB free"
    assert found.advice == "Raise the container's memory limit if plans need more than 90.0 GiB."


def test_a_control_group_that_leaves_less_than_half_of_a_gpu_is_serious() -> None:
    found = only(on(replace(HOST, limit=replace(GROUP, room_bytes=16 * GIB))))
    assert (found.code, found.severity) == (Code.LITTLE_HOST_MEMORY, Severity.SERIOUS)
    assert found.evidence == (
        f"{GROUP.text}, which leaves 16.0 GiB to be pinned for GPUs with 140.0 GiB"
    )
    assert "attach(disk='FOLDER:SIZE')" in found.advice


def test_a_host_that_is_busy_is_a_note() -> None:
    found = only(on(replace(HOST, load=16.0)))
    assert (found.code, found.severity) == (Code.BUSY_HOST, Severity.NOTE)
    assert found.evidence == (
        "16.0 processes wanted one in the minute before, and this process may use 16"
    )
    assert find(on(replace(HOST, load=15.9))) == ()


def test_no_huge_pages_and_wsl_are_notes() -> None:
    found = find(on(replace(HOST, huge_pages="never", is_wsl=True)))
    assert [(f.code, f.severity) for f in found] == [
        (Code.NO_HUGE_PAGES, Severity.NOTE),
        (Code.WSL, Severity.NOTE),
    ]
    assert "echo madvise >" in found[0].advice
