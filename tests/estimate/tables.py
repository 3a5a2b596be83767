"""The tables of docs/estimate.md, computed."""

from collections.abc import Iterator
from dataclasses import replace

from ebbtide.catalog.accelerators import ACCELERATORS
from ebbtide.catalog.calls import make_block
from ebbtide.catalog.form import Attention, Form, Implementation
from ebbtide.catalog.layers import make_layer
from ebbtide.catalog.machines import find_machine
from ebbtide.catalog.models import MODELS
from ebbtide.estimate.breakeven import break_even
from ebbtide.estimate.setup import Degrees, Dtype, Optimizer, Setup
from ebbtide.estimate.strategies import Status, Strategy
from tests.estimate.asking import ask
from tests.estimate.deepseek import PUBLISHED, make_rows
from tests.estimate.test_step import MEASURED, SHAPE

GIB, KIB = 2**30, 2**10
QKV = ["query_proj", "key_proj", "value_proj"]


def percent(share: float) -> str:
    """Write a difference, without a minus before zero."""
    return f"{round(share, 3) + 0.0:+.1%}"


def implementations() -> Iterator[str]:
    """KiB that a token keeps in a layer."""
    for name in ("gpt2", "llama-3-8b", "llama-3-70b", "qwen3-14b", "mixtral-8x7b",
                 "deepseek-v3-671b"):  # fmt: skip
        shape = MODELS[name]
        cells: list[str] = []
        for implementation in Implementation:
            try:
                Setup(shape=shape, context=1024, batch=1, implementation=implementation)
            except ValueError:
                cells.append("-")
                continue
            form = Form(tokens=1024, context=1024, implementation=implementation)
            calls = make_layer(shape, shape.num_layers - 1, form).calls
            rates = ACCELERATORS["h200-pcie5"].rates("bf16")
            saved = make_block("", "", calls, rates).num_bytes_saved
            cells.append(f"{saved / 1024 / KIB:.1f}")
        width = 2 * shape.hidden / KIB
        yield f"| {name} | {' | '.join(cells)} | {width:g} |"


def measured() -> Iterator[str]:
    """Measured rows, and ours."""
    for implementation, tokens, strategy, ms, gib in MEASURED:
        setup = Setup(
            shape=SHAPE,
            context=tokens,
            batch=1,
            optimizer=Optimizer.NONE,
            implementation=implementation,
        )
        estimator = ask(setup)
        row = estimator.row(strategy)
        ours_gib = (row.peak_bytes - estimator.residents[0].total) / GIB
        ours_ms = row.step_ns / 1e6
        yield (
            f"| {implementation.value} | {tokens} | {strategy.value} | {gib:.2f} | "
            f"{ours_gib:.2f} | {percent(ours_gib / gib - 1)} | {ms:.1f} | {ours_ms:.1f} | "
            f"{percent(ours_ms / ms - 1)} |"
        )


def deepseek() -> Iterator[str]:
    """The published table, and ours."""
    for name, row in make_rows().items():
        published = PUBLISHED[name]
        ours = f"{row.flops_per_s / 1e12:.1f}"
        peak = f"{row.peak_bytes / GIB:.1f}"
        host = f"{row.host_bytes / GIB:.1f}"
        if published is None:
            yield f"| {name} | OOM | {row.status.value.upper()} | | | {peak} | | {host} |"
            continue
        tflops = row.flops_per_s / 1e12 / published.tflops - 1
        gib = row.peak_bytes / GIB / published.peak_gib - 1
        yield (
            f"| {name} | {published.tflops} | {ours} | {percent(tflops)} | {published.peak_gib} | "
            f"{peak} | {percent(gib)} | {host} |"
        )


def llama_405b() -> Iterator[str]:
    """Llama 3.1 405B, queries, keys and values offloaded, on three machines."""
    for name in ("gb200-nvl72", "gb300-nvl72", "vera-rubin"):
        setup = Setup(
            shape=MODELS["llama-3.1-405b"],
            context=8192,
            batch=2,
            degrees=Degrees(fsdp=128),
            dtype=Dtype.FP8,
        )
        estimator = ask(setup, name, names=QKV)
        remat = estimator.row(Strategy.REMAT)
        sync, offload = (
            estimator.row(strategy) for strategy in (Strategy.OFFLOAD_SYNC, Strategy.OFFLOAD)
        )
        gain = offload.flops_per_s / remat.flops_per_s - 1
        yield (
            f"| {name} | {remat.flops_per_s / 1e12:.0f} | {sync.flops_per_s / 1e12:.0f} | "
            f"{offload.flops_per_s / 1e12:.0f} | {percent(gain)} | "
            f"{offload.host_bytes / GIB:.1f} | {offload.peak_bytes / GIB:.1f} |"
        )


def free_from() -> Iterator[str]:
    """From which context on offloading is free."""
    for machine in ("a100-pcie4", "h200-pcie5", "rtx4090", "gh200", "gb200-nvl72", "vera-rubin"):
        cells: list[str] = []
        for model in ("llama-3.1-8b", "llama-3.1-70b", "deepseek-v3-671b"):
            setup = Setup(shape=MODELS[model], context=4096, batch=1)
            rates = ACCELERATORS[machine].rates("bf16")
            found = break_even(setup, find_machine(machine), rates)
            for context in (found.everything, found.dear):
                cells.append("never" if context is None else "always" if not context
                             else f"{round(context, -3) // 1000}k")  # fmt: skip
        yield f"| {machine} | {' | '.join(cells)} |"


def shares() -> Iterator[str]:
    """What share of device memory activations take, by setting."""
    asked = {
        "llama-3.1-405b, fsdp 128": Setup(
            shape=MODELS["llama-3.1-405b"], context=8192, batch=1, degrees=Degrees(fsdp=128)
        ),
        "llama-3.1-405b, fsdp 16, tp 8 with sp": Setup(
            shape=MODELS["llama-3.1-405b"],
            context=8192,
            batch=1,
            degrees=Degrees(fsdp=16, tp=8, sp=True),
        ),
        "deepseek-v3-671b, fsdp 16, ep 8": Setup(
            shape=MODELS["deepseek-v3-671b"],
            context=4096,
            batch=1,
            degrees=Degrees(fsdp=16, ep=8),
        ),
    }
    total = find_machine("gb200-nvl72").device_bytes
    for name, setup in asked.items():
        for batch in (1, 2):
            estimator = ask(replace(setup, batch=batch), "gb200-nvl72")
            cells: list[str] = []
            for strategy in (Strategy.KEEP, Strategy.REMAT):
                row = estimator.row(strategy)
                mark = " (OOM)" if row.status is Status.OOM else ""
                cells.append(f"{row.holders['activations'] / total:.0%}{mark}")
            yield f"| {name} | {batch} x {setup.context} | {' | '.join(cells)} |"


def korthikanti() -> Iterator[str]:
    """GPT-2 medium without flash attention, MiB a layer at 2048 tokens, batch 1, by ranks."""
    for t, sp in ((1, False), (8, False), (8, True)):
        form = Form(
            tokens=2048,
            context=2048,
            attention=Attention.MATRIX,
            tensor_parallel=t,
            is_sequence_parallel=sp,
        )
        calls = make_layer(MODELS["gpt2-medium"], 0, form).calls
        rates = ACCELERATORS["h200-pcie5"].rates("bf16")
        small = (":mean", ":rstd")
        saved = sum(
            a.num_bytes
            for a in make_block("", "", calls, rates).activations
            if a.is_saved and not a.name.endswith(small)
        )
        s, h, a = 2048, 1024, 16
        formula = (
            s * (34 * h + 5 * a * s) // t if sp or t == 1
            else s * (10 * h + 24 * h // t + 5 * a * s // t)
        )  # fmt: skip
        assert saved == formula
        yield f"| {t} | {'yes' if sp else 'no'} | {saved / 2**20:.2f} |"


TABLES = {
    "implementations": implementations,
    "measured": measured,
    "deepseek": deepseek,
    "llama_405b": llama_405b,
    "free_from": free_from,
    "shares": shares,
    "korthikanti": korthikanti,
}
"""Name to its rows."""
