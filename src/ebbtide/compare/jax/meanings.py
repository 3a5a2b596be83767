"""What the columns of a run in JAX mean, for people."""

from __future__ import annotations

from ebbtide.compare.results import Comparison, to_gib


def list_jax_meanings(comparison: Comparison) -> tuple[str, ...]:
    """Return one sentence for each thing in the table that a name cannot say."""
    facts = comparison.facts
    steps = "1 step" if facts.steps == 1 else f"median of {facts.steps} steps"
    warm_up = "1 warm-up step" if facts.warm_up_steps == 1 else f"{facts.warm_up_steps} of warm-up"
    meanings = [
        f"step: {steps} after {warm_up}, one program of forward, backward and optimizer, which is "
        f"{facts.optimizer}; compile: lowering and compiling it.",
        f"memory: {facts.memory_meaning}. Weights, gradients and optimizer state alone are "
        f"{to_gib(facts.state_bytes):.2f} GiB, below which no strategy here can go; one copy of "
        f"the logits is {to_gib(facts.logits_bytes):.2f} GiB.",
        "host: temporary memory of the program in pinned host memory, by what XLA plans; each "
        "byte goes out and comes back once in a step.",
        "TFLOP/s: the arithmetic of the model's own products in 10^12 a second and device; what "
        "is recomputed is not counted, and causal attention counts half.",
        f"perplexity: on {facts.held_out_tokens} held-out tokens before and after all "
        f"{facts.warm_up_steps + facts.steps} steps; loss: of the last step.",
        f"gradients: those of the first step, all of them, compared with those of "
        f"{facts.gradient_reference}; numbers are the largest absolute difference, and what it is "
        "of the largest element of its leaf."
        if facts.gradient_reference
        else "gradients: not compared, since no run of no-remat or full-remat finished.",
    ]
    if facts.disturbance:
        meanings.append(f"times: {facts.disturbance}.")
    return tuple(meanings)


def list_flag_notes(comparison: Comparison) -> tuple[str, ...]:
    """Return which rows were compiled with which flags, one line a set."""
    rows: dict[str, list[str]] = {}
    for row in comparison.rows:
        if row.jax is not None:
            rows.setdefault(row.jax.xla_flags, []).append(row.strategy)
    return tuple(f"{', '.join(names)}: {flags or 'no flags'}" for flags, names in rows.items())
