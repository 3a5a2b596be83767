"""What host memory cannot hold goes to disk, the earliest first."""

from ebbtide.plan import Decision, Plan
from ebbtide.planner.spill import spill_to_disk
from ebbtide.workload import Activation, Block, OpKind, Workload


def _workload() -> Workload:
    blocks = [
        Block(
            name=f"layers.{i}",
            class_name="Layer",
            activations=tuple(
                Activation(
                    name=f"layers.{i}.{part}",
                    op="mm",
                    kind=OpKind.MATMUL,
                    num_bytes=num_bytes,
                    inputs=(),
                    is_saved=True,
                    is_replayable=True,
                    group=f"layers.{i}.{part}",
                )
                for part, num_bytes in (("up", 100), ("down", 40))
            ),
        )
        for i in range(3)
    ]
    return Workload(model="Model", blocks=tuple(blocks))


def _plan(workload: Workload) -> Plan:
    names = [a.name for b in workload.blocks for a in b.activations]
    return Plan(
        name="offload",
        model=workload.model,
        fingerprint=workload.fingerprint,
        decisions={n: Decision.HOST for n in names[:-1]} | {names[-1]: Decision.KEEP},
        host_bytes=380,
        disk_bytes=0,
        max_out_bytes_in_flight=1000,
        max_in_bytes_in_flight=1000,
    )


def test_the_first_blocks_go_to_disk_and_the_last_stay_in_host_memory() -> None:
    workload = _workload()
    spilled = spill_to_disk(_plan(workload), workload, 240)
    assert {n: d.value for n, d in spilled.decisions.items()} == {
        "layers.0.down": "disk",
        "layers.0.up": "disk",
        "layers.1.down": "host",
        "layers.1.up": "host",
        "layers.2.down": "keep",
        "layers.2.up": "host",
    }
    assert (spilled.host_bytes, spilled.disk_bytes) == (240, 140)


def test_a_plan_that_fits_is_left_as_it_is() -> None:
    workload = _workload()
    assert spill_to_disk(_plan(workload), workload, 380) == _plan(workload)
