"""A whole step's peak, as XLA plans it, is within the budget."""

from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from ebbtide.errors import BudgetError, ModelError
from ebbtide.jax import Rates, StepPlan, plan_step
from ebbtide.machine import Machine
from ebbtide.plan import Decision
from tests.jax import blocks
from tests.jax.blocks import Array, Block

EXACT = {"xla_allow_excess_precision": False, "xla_backend_optimization_level": 0}
RATES = Rates(flops_per_s=1e12, memory_bytes_per_s=1e11)
MACHINE = Machine(
    name="test",
    device_bytes=2**30,
    host_bytes=2**30,
    out_bytes_per_s=10**9,
    in_bytes_per_s=10**9,
    both_bytes_per_s=2 * 10**9,
)
LAYERS, TOKENS, WIDTH, WIDE, VOCABULARY = 8, 512, 64, 256, 512


def block(params: dict[str, Array], x: Array) -> Array:
    return x + jnp.tanh(x @ params["gate"]) @ params["down"]


def step(block: Block, params: Any, head: Array, x: Array) -> Any:
    """A step with logits and an update."""

    def loss(params: Any, head: Array) -> Array:
        y = jax.lax.scan(lambda h, p: (block(p, h), None), x, params)[0]
        return jax.nn.logsumexp(y @ head, axis=-1).sum()

    grads = jax.grad(loss, (0, 1))(params, head)
    return jax.tree.map(lambda p, g: p - 0.1 * g, (params, head), grads)


def shape(*lengths: int) -> Any:
    return jax.ShapeDtypeStruct(lengths, jnp.float32)


ARGUMENTS = (
    {"gate": shape(LAYERS, WIDTH, WIDE), "down": shape(LAYERS, WIDE, WIDTH)},
    shape(WIDTH, VOCABULARY),
    shape(TOKENS, WIDTH),
)


def plan(budget: int | str, **options: Any) -> StepPlan:
    given: dict[str, Any] = {"machine": MACHINE, "rates": RATES, **options}
    return plan_step(step, ARGUMENTS, block=block, layers=LAYERS, budget=budget, **given)


@pytest.mark.slow
def test_a_step_is_planned_between_nothing_and_everything_recomputed() -> None:
    everything = plan("100%")
    assert everything.tide.keeps_everything
    keeps, again = everything.planned.device_bytes, everything.recomputed.device_bytes
    # Each layer keeps the wide value and its derivative, and full recomputation neither.
    assert keeps - again > LAYERS * TOKENS * WIDE * 4
    budget = (keeps + again) // 2
    planned = plan(budget)
    assert planned.planned.device_bytes <= budget
    assert not planned.tide.keeps_everything
    assert planned.tide.plan.peak_bytes <= budget
    assert str(planned.report()).count("the whole step, as compiled for cpu") == 1
    with pytest.raises(BudgetError, match=r"no plan of uniform fits .* smallest that fits is"):
        plan(again // 2)


@pytest.mark.slow
def test_where_no_plan_that_was_tried_fits_everything_is_recomputed_if_that_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What XLA plans does not shrink byte for byte with what a plan stores."""
    monkeypatch.setattr(import_module("ebbtide.jax.step"), "NUM_TRIES", 0)
    planned = plan("100%")
    assert planned.planned == planned.recomputed
    assert set(planned.tide.plan.decisions.values()) <= {Decision.RECOMPUTE, Decision.KEEP}
    assert not planned.tide.keeps_everything
    assert planned.compiled.memory_analysis().temp_size_in_bytes == planned.recomputed.temp_bytes
    with pytest.raises(BudgetError, match="no plan of 0 that were compiled keeps to"):
        plan(planned.recomputed.device_bytes - 1)
    with pytest.raises(BudgetError, match="no plan of 0 that were compiled keeps to"):
        plan("100%", decide={"*": "KEEP"})


def test_a_step_that_knows_its_block_by_itself_is_refused() -> None:
    with pytest.raises(ModelError, match="the step never called its block"):
        plan_step(
            lambda unused, *given: step(block, *given),
            ARGUMENTS,
            block=block,
            layers=LAYERS,
            budget="50%",
            machine=MACHINE,
            rates=RATES,
        )


def test_blocks_of_several_shapes_are_refused() -> None:
    def two(block: Block, params: Any, x: Array) -> Array:
        return block(params, block(params, x)[:4])

    params = blocks.shapes_of_one(ARGUMENTS[0])
    with pytest.raises(ModelError, match="several sets of shapes"):
        plan_step(
            two,
            (params, ARGUMENTS[2]),
            block=block,
            layers=2,
            budget="50%",
            machine=MACHINE,
            rates=RATES,
        )


@pytest.mark.slow
def test_a_second_stack_is_planned_from_the_first_ones_program() -> None:
    params = {"gate": shape(3, WIDTH, WIDE), "down": shape(3, WIDE, WIDTH)}
    args = (params, params, shape(TOKENS, WIDTH))

    def with_blocks(first: Block, second: Block, one: Any, two: Any, x: Array) -> Any:
        def loss(one: Any, two: Any) -> Array:
            h = jax.lax.scan(lambda h, p: (first(p, h), None), x, one)[0]
            return (jax.lax.scan(lambda h, p: (second(p, h), None), h, two)[0] ** 2).sum()

        return jax.grad(loss, (0, 1))(one, two)

    def plan_stack(stage: Any, pins: dict[str, str], before: StepPlan | None) -> StepPlan:
        given: dict[str, Any] = {"machine": MACHINE, "rates": RATES, "compiler_options": EXACT}
        return plan_step(
            *(stage, args),
            block=block,
            layers=3,
            budget="100%",
            decide=pins,
            before=before,
            **given,
        )

    again = jax.checkpoint(block, prevent_cse=False)
    first = plan_stack(
        lambda planned, *given: with_blocks(planned, again, *given), {"input": "HOST"}, None
    )
    moved = first.tide.checkpoint(block)
    second = plan_stack(
        lambda planned, *given: with_blocks(moved, planned, *given), {"input": "HOST"}, first
    )
    num_bytes = 3 * TOKENS * WIDTH * 4
    assert (first.host_bytes, second.host_bytes) == (num_bytes, 2 * num_bytes)
    assert second.recomputed is first.planned
    assert first.compile_ns > 0 < second.compile_ns
    values = jax.tree.map(lambda s: jax.random.normal(jax.random.key(s.size), s.shape) * 0.1, args)
    plain = jax.jit(lambda *given: with_blocks(block, block, *given), compiler_options=EXACT)
    expected = plain(*values)
    for found, leaf in zip(
        jax.tree.leaves(second.compiled(*values)), jax.tree.leaves(expected), strict=True
    ):
        # A tanh that is made again may differ in its last bit.
        assert jnp.abs(found - leaf).max() < 1e-6 * jnp.abs(leaf).max()
