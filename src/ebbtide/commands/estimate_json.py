"""What `ebbtide estimate --json` prints: sizes in GiB or MiB (powers of 2), times in seconds."""

from collections.abc import Sequence

from ebbtide.catalog.maxtext import maxtext_name
from ebbtide.estimate.answer import Answer
from ebbtide.estimate.search import Largest
from ebbtide.estimate.strategies import Row

MIB, GIB = 2**20, 2**30


def describe_answer(answer: Answer) -> dict[str, object]:
    """Return the object for one question."""
    setup = answer.setup
    degrees, free = setup.degrees, answer.break_even
    kinds = {
        kind: {name: num_bytes / MIB for name, num_bytes in sizes.items()}
        for kind, sizes in answer.per_layer.items()
    }
    names = {name for sizes in answer.per_layer.values() for name in sizes}
    maxtext = {name: maxtext_name(_local(name)) for name in sorted(names)}
    return {
        "model": setup.shape.name,
        "machine": answer.machine.name,
        "num_parameters": answer.num_parameters,
        "num_devices": degrees.num_devices,
        "context": setup.context,
        "batch": setup.batch,
        "global_batch": setup.batch * setup.accumulate * degrees.num_batches,
        "tokens_per_device": setup.tokens,
        "budget_gib": answer.limits.budget_bytes / GIB,
        "rows": [describe_row(row, answer.peak_flops_per_s) for row in answer.rows],
        # Where all layers are alike, names; otherwise a map for each kind of layer.
        "per_layer_mib": kinds if len(kinds) > 1 else next(iter(kinds.values())),
        "maxtext_names": {ours: theirs for ours, theirs in maxtext.items() if theirs},
        "break_even_context": None
        if free is None
        else {"everything": free.everything, "dear": free.dear},
        "verdict": {
            "advice": answer.verdict.advice.value,
            "offload": list(answer.verdict.moved),
            "sentence": answer.verdict.sentence,
        },
        "assumptions": list(answer.assumptions),
    }


def describe_row(row: Row, peak_flops_per_s: int) -> dict[str, object]:
    """Return the object for one strategy; times are null where there is no plan."""
    return {
        "strategy": row.strategy.value,
        "status": row.status.value,
        "short_of": row.short,
        "step_s": row.step_ns / 1e9 if row.step_ns else None,
        "tflops_per_device": row.flops_per_s / 1e12 if row.step_ns else None,
        "mfu": row.flops_per_s / peak_flops_per_s if row.step_ns else None,
        "peak_gib": row.peak_bytes / GIB,
        "host_gib": row.host_bytes / GIB,
        "disk_gib": row.disk_bytes / GIB,
        "holders_gib": {name: num_bytes / GIB for name, num_bytes in row.holders.items()},
        "collectives_s": {axis.value: ns / 1e9 for axis, ns in row.collectives.items()},
        "moved_gib": {n.lstrip(".:"): num_bytes / GIB for n, num_bytes in row.moved.items()},
    }


def describe_largest(axis: str, found: Largest) -> dict[str, object]:
    """Return the object for `--max`."""
    return {
        "max": axis,
        "keep": found.keep,
        "remat": found.remat,
        "offload": found.offload,
    }


def describe_sweep(axis: str, points: Sequence[tuple[float, Answer]]) -> dict[str, object]:
    """Return the object for `--what-if`."""
    return {
        "what_if": axis,
        "points": [{"value": value, **describe_answer(answer)} for value, answer in points],
    }


def _local(name: str) -> str:
    return f".{name}"
