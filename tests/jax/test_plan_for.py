"""From a block and a budget to a policy that jax carries out."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from ebbtide.check import check_plan
from ebbtide.errors import BudgetError, PlanError
from ebbtide.jax import Rates, Tide, plan_for, residuals_of
from ebbtide.machine import Machine
from ebbtide.plan import Decision, Plan
from ebbtide.planner.named import named_plan
from ebbtide.simulate import simulate
from tests.jax import blocks
from tests.jax.blocks import Array

# A device so slow that its link carries a part of what a block stores while that computes.
RATES = Rates(flops_per_s=1e9, memory_bytes_per_s=1e9)
MACHINE = Machine(
    name="test",
    device_bytes=2**30,
    host_bytes=2**30,
    out_bytes_per_s=2 * 10**7,
    in_bytes_per_s=2 * 10**7,
    both_bytes_per_s=4 * 10**7,
)
LAYERS = 8


def arguments() -> tuple[Any, Array]:
    params = blocks.shapes_of_one(blocks.make_params(jnp.bfloat16))
    return params, jax.ShapeDtypeStruct((blocks.B, blocks.T, blocks.D), jnp.bfloat16)


def plan(budget: int | str, **options: Any) -> Tide:
    given: dict[str, Any] = {"machine": MACHINE, "rates": RATES, "min_bytes": 0, **options}
    return plan_for(blocks.llama_block, *arguments(), layers=LAYERS, budget=budget, **given)


@pytest.fixture(scope="module")
def small() -> Tide:
    """A plan for a fifth of what keeping everything takes."""
    return plan(plan(2**30).plan.peak_bytes // 5)


def test_where_everything_fits_nothing_is_done() -> None:
    tide = plan("50%")
    assert tide.keeps_everything
    assert tide.checkpoint(blocks.llama_block) is blocks.llama_block
    assert "everything fits" in tide.report()


def test_a_smaller_budget_moves_and_recomputes_alike_in_all_layers(small: Tide) -> None:
    assert small.plan.name == "uniform"
    assert small.plan.peak_bytes <= small.plan.budget_bytes
    assert set(small.plan.decisions.values()) >= {Decision.HOST, Decision.RECOMPUTE}
    for name, decision in small.plan.decisions.items():
        local = name.split(".", 2)[2]
        assert small.plan.decisions[f"layers.0.{local}"] is decision
    policy = small.named_policy()
    assert policy == small.named_policy(LAYERS - 1)
    sizes = {value.name: value.num_bytes for value in small.observation.values}
    moved = sum(sizes[name] for name in policy.offloaded)
    assert small.plan.host_bytes == LAYERS * moved > 0


@pytest.mark.parametrize("share", [2, 3, 4, 5])
def test_no_plan_is_slower_than_recomputing_everything_where_that_fits(share: int) -> None:
    tide = plan(plan(2**30).plan.peak_bytes // share)
    again = simulate(named_plan("recompute", tide.workload), tide.workload, tide.machine)
    assert again.peak_bytes <= tide.plan.budget_bytes
    assert tide.plan.predicted_step_ns <= again.step_ns
    assert simulate(tide.plan, tide.workload, tide.machine).step_ns == tide.plan.predicted_step_ns


def test_a_scan_keeps_nothing_that_is_cheaper_to_make_again_as_unrolled_layers_do() -> None:
    # The sums take 3 passes over memory at most, the stack 10; the rest of the budget is free.
    budget = plan(2**30).plan.peak_bytes * 9 // 10
    scanned, unrolled = plan(budget), plan(budget, scan=False)
    assert scanned.workload.blocks[0].store_ns_per_gib == 10 * 2**30
    assert unrolled.workload.blocks[0].store_ns_per_gib == 0
    for name in ("mlp.silu.mul.0", "mlp.mul.3"):
        assert scanned.plan.decision(f"layers.0.{name}") is Decision.RECOMPUTE, name
        assert unrolled.plan.decision(f"layers.0.{name}") is not Decision.RECOMPUTE, name
    # Moving costs 17 passes more: 17 ns a byte, where both copies take 100.
    assert scanned.machine.slowdown_ppm == 170_000
    assert unrolled.machine == MACHINE


def test_what_costs_more_to_move_than_to_make_again_is_made_again() -> None:
    """On a link that is endless but for what moving costs compute."""
    fast = replace(MACHINE, out_bytes_per_s=10**12, in_bytes_per_s=10**12, both_bytes_per_s=10**12)
    budget = plan(2**30).plan.peak_bytes // 4
    before, priced = (Rates(flops_per_s=1e10, memory_bytes_per_s=rate) for rate in (1e16, 1e9))
    free = plan(budget, machine=fast, rates=before)
    assert free.plan.host_bytes > 0
    assert plan(budget, machine=fast, rates=priced).plan.host_bytes == 0


def test_the_oracle_finds_the_plan_sound(small: Tide) -> None:
    assert check_plan(small.plan, small.workload, small.machine).is_sound


def test_the_residuals_are_those_of_the_plan(small: Tide) -> None:
    policy = small.named_policy()
    residuals = residuals_of(small.checkpoint(blocks.llama_block), *arguments())
    assert {r.name for r in residuals if r.is_on_host} == set(policy.offloaded)
    kept = {r.name for r in residuals if r.name and not r.is_on_host}
    assert kept == set(policy.saved)


@pytest.mark.slow
def test_the_plans_gradients_are_verified_with_the_same_block() -> None:
    params, x = blocks.make_params(jnp.float32, blocks.MLP), blocks.make_input(jnp.float32)
    one = jax.tree.map(lambda leaf: leaf[0], params)
    given: dict[str, Any] = {"machine": MACHINE, "rates": RATES, "min_bytes": 0}
    tide = plan_for(
        *(blocks.nested_block, one, x),
        layers=4,
        budget=2**20,
        decide={"*": "HOST"},
        **given,
    )
    assert tide.named_policy().offloaded
    found = tide.verify(blocks.nested_block, one, x)
    assert (found.equal, found.layers) == (True, 3)


def num_products(block: Any) -> int:
    def loss(params: Any, x: Array) -> Array:
        return block(params, x).astype(jnp.float32).sum()

    return str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(*arguments())).count("dot_general[")


def test_backward_runs_just_the_planned_products_again(small: Tide) -> None:
    for decide in (None, {"mlp.dot_general.*": "RECOMPUTE"}, {"*": "RECOMPUTE"}):
        tide = plan(small.plan.budget_bytes, decide=decide)
        again = {
            value.name
            for value in tide.observation.values
            if tide.plan.decision(f"layers.0.{value.name}") is Decision.RECOMPUTE
        }
        products = {v.name for v in tide.observation.values if v.primitive == "dot_general"}
        extra = num_products(tide.checkpoint(blocks.llama_block)) - num_products(blocks.llama_block)
        # The scores of attention are one more, where its log-sum-exp is made again.
        attention = 2 if "attention.out" in again else int("attention.residual.0" in again)
        assert extra == len(again & products) + attention


def test_a_planned_stack_lowers_for_cuda_with_its_copies(small: Tide) -> None:
    params = jax.eval_shape(lambda: blocks.make_params(jnp.bfloat16))
    stack = blocks.scan_stack(small.checkpoint(blocks.llama_block))

    def loss(params: Any, x: Array) -> Array:
        return stack(params, x).astype(jnp.float32).sum()

    traced = jax.jit(jax.grad(loss)).trace(params, arguments()[1])
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    num_moved = len(small.named_policy().offloaded)
    assert text.count("@annotate_device_placement") == 2 * num_moved > 0


def test_pins_hold_in_every_layer(small: Tide) -> None:
    tide = plan(
        small.plan.budget_bytes, decide={"mlp.dot_general.0": "HOST", "attention.*": "RECOMPUTE"}
    )
    assert "mlp.dot_general.0" in tide.named_policy().offloaded
    assert not [name for name in tide.named_policy().names if name.startswith("attention")]


def test_pins_of_one_layer_alone_are_refused_in_a_scan(small: Tide) -> None:
    pins = {"layers.3.mlp.dot_general.0": "HOST"}
    with pytest.raises(PlanError, match="a scanned stack has one decision for all layers"):
        plan(small.plan.budget_bytes, decide=pins)


def test_a_pin_that_matches_nothing_is_refused(small: Tide) -> None:
    with pytest.raises(PlanError, match=r"'mlp\.dot\.0' matches no activation"):
        plan(small.plan.budget_bytes, decide={"mlp.dot.0": "HOST"})


def test_unrolled_layers_differ_and_want_to_be_told_apart(small: Tide) -> None:
    tide = plan(small.plan.budget_bytes, scan=False)
    assert tide.plan.name == "lp"
    assert len({tide.named_policy(i) for i in range(LAYERS)}) > 1
    with pytest.raises(PlanError, match="differently for the 8 layers"):
        tide.checkpoint(blocks.llama_block)
    with pytest.raises(PlanError, match="layer is 8; the stack has 8"):
        tide.checkpoint(blocks.llama_block, layer=8)
    for layer in (0, LAYERS // 2):
        policy = tide.named_policy(layer)
        residuals = residuals_of(tide.checkpoint(blocks.llama_block, layer=layer), *arguments())
        assert {r.name for r in residuals if r.is_on_host} == set(policy.offloaded)


def test_a_budget_that_nothing_keeps_to_names_the_smallest() -> None:
    with pytest.raises(BudgetError, match=r"the smallest that fits is [0-9.]+ KiB\.$"):
        plan(1000)


def test_host_memory_is_capped(small: Tide) -> None:
    tide = plan(small.plan.budget_bytes, host=small.plan.host_bytes - 1)
    assert tide.plan.host_bytes < small.plan.host_bytes


def test_the_plan_goes_through_json(small: Tide) -> None:
    assert Plan.from_json(small.to_json()) == small.plan
    small.plan.check_fits(small.workload)


def test_without_a_machine_a_cpu_has_no_link_to_measure() -> None:
    with pytest.raises(PlanError, match=r"there is no link to measure: .* Give machine="):
        plan("50%", machine=None)


def test_a_disk_is_not_planned_with() -> None:
    assert plan("50%", machine="h200-pcie5").machine.disk_bytes == 0


@jax.custom_vjp
def wave(x: Array) -> Array:
    return jnp.sin(x)


wave.defvjp(lambda x: (jnp.sin(x), jnp.cos(x)), lambda slope, given: (slope * given,))

NESTED: dict[str, Any] = {
    "jit": jax.nn.silu,
    "custom_jvp in jit": jax.nn.relu,
    "jit in jit": jax.jit(jax.jit(jnp.sin)),
    "custom_vjp in jit": jax.jit(wave),
    "checkpoint": jax.checkpoint(jnp.sin),
    "scan": lambda x: jax.lax.scan(lambda h, _: (jnp.sin(h), None), x, None, length=2)[0],
    "cond": lambda x: jax.lax.cond(True, jnp.sin, jnp.cos, x),
    "the same name inside": jax.jit(lambda x: checkpoint_name(jnp.sin(x), "act")),
    "another name inside": jax.jit(lambda x: 2 * checkpoint_name(jnp.sin(x), "inner")),
    "a view": lambda x: x.reshape(-1).reshape(x.shape),
}


@pytest.mark.parametrize("make", NESTED.values(), ids=NESTED)
def test_a_users_name_on_what_nested_code_makes_is_decided_for(make: Any) -> None:
    def block(params: Any, x: Array) -> Array:
        return x + checkpoint_name(make(x @ params["up"]), "act") @ params["down"]

    def plan_act(decision: str | None) -> tuple[bool, bool]:
        tide = plan_for(
            *(block, WIDE, jax.ShapeDtypeStruct((512, 64), jnp.float32)),
            layers=4,
            budget="20MiB",
            decide={} if decision is None else {"act": decision},
            machine=MACHINE,
            rates=RATES,
        )
        policy = tide.named_policy()
        return "act" in policy.saved, "act" in policy.offloaded

    assert plan_act(None) == (True, False)
    assert plan_act("KEEP") == (True, False)
    assert plan_act("HOST") == (False, True)
    assert plan_act("RECOMPUTE") == (False, False)


WIDE = {
    "up": jax.ShapeDtypeStruct((64, 256), jnp.float32),
    "down": jax.ShapeDtypeStruct((256, 64), jnp.float32),
}
