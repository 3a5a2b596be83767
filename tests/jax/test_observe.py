"""What a block is observed to keep, what making it again needs, and what it costs."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from ebbtide.block import OpKind
from ebbtide.errors import ModelError
from ebbtide.jax import Rates, observe, residuals_of
from ebbtide.jax.clock import measure
from ebbtide.jax.graph import Cost
from ebbtide.jax.observe import Observation, Pace
from tests.jax import blocks
from tests.jax.blocks import Array

RATES = Rates(flops_per_s=1e9, memory_bytes_per_s=1e9)
BYTES = blocks.B * blocks.T * blocks.D * 2


def llama() -> Observation:
    params = blocks.shapes_of_one(blocks.make_params(jnp.bfloat16))
    x = jax.ShapeDtypeStruct((blocks.B, blocks.T, blocks.D), jnp.bfloat16)
    return observe(blocks.llama_block, params, x)


def test_values_have_names_bytes_kinds_and_what_they_are_made_from() -> None:
    values = {value.name: value for value in llama().values}
    first = next(iter(values.values()))
    assert (first.name, first.kind, first.num_bytes, first.inputs) == (
        "input",
        OpKind.INPUT,
        BYTES,
        (),
    )
    query = values["attn.btd_dnh_btnh.dot_general.0"]
    assert query.kind is OpKind.MATMUL
    assert query.inputs == ("attn.mul.2",)
    tokens, heads = blocks.B * blocks.T, blocks.N * blocks.H
    assert query.cost.flops == 2 * tokens * blocks.D * heads
    assert query.num_bytes == tokens * heads * 2
    act = values["mlp.mul.3"]
    assert set(act.inputs) == {"mlp.silu.mul.0", "mlp.dot_general.1"}
    assert act.kind is OpKind.ELEMENTWISE
    assert act.cost == Cost(num_bytes=3 * blocks.B * blocks.T * blocks.F * 2)


def test_attentions_output_and_log_sum_exp_are_made_by_one_call() -> None:
    values = {value.name: value for value in llama().values}
    out, lse = values["attention.out"], values["attention.residual.0"]
    assert out.group == lse.group
    assert {out.kind, lse.kind} == {OpKind.ATTENTION}
    assert (out.num_bytes, lse.num_bytes) == (BYTES, blocks.B * blocks.N * blocks.T * 4)
    assert out.inputs == lse.inputs
    assert out.cost.flops == 4 * blocks.B * blocks.N * blocks.T**2 * blocks.H


def test_what_backward_keeps_is_what_jax_keeps_of_the_plain_block() -> None:
    params = blocks.shapes_of_one(blocks.make_params(jnp.float32, blocks.MLP))
    x = jax.ShapeDtypeStruct((blocks.B, blocks.T, blocks.D), jnp.float32)
    saved = {v.name: v.num_bytes for v in observe(blocks.nested_block, params, x).values}
    assert saved["mlp.jitted_mlp.inside.tanh.0"] == blocks.B * blocks.T * blocks.F * 4
    marked = [v.name for v in observe(blocks.nested_block, params, x).values if v.is_saved]
    assert marked == [
        "input",
        "mlp.jitted_mlp.inside.dot_general.0",
        "mlp.jitted_mlp.inside.tanh.0",
        "mlp.add.0",
        "mlp.jitted_mlp.inside.dot_general.2",
        "mlp.jitted_mlp.inside.tanh.1",
    ]
    # jax keeps the derivative of tanh, which is made of what goes in, and tanh for the product.
    wide = (blocks.B, blocks.T, blocks.F)
    plain = [r for r in residuals_of(blocks.nested_block, params, x) if r.shape == wide]
    assert len(plain) == 4


def test_events_ask_in_backwards_order_and_hold_gradients() -> None:
    events = llama().events
    used = [name for event in events for name in event.uses]
    assert used.index("mlp.mul.3") < used.index("attention.out")
    assert used.index("attention.out") < used.index("attn.mul.2")
    flops = sum(event.cost.flops for event in events)
    forward = llama().forward_cost.flops
    attention = 4 * blocks.B * blocks.N * blocks.T**2 * blocks.H
    # Two products for each of forward's; attention's backward has five for its two.
    assert flops == 2 * (forward - attention) + attention * 5 // 2
    assert max(event.held_bytes for event in events) >= 2 * BYTES


def test_a_workload_has_equal_layers_and_the_times_of_the_rates() -> None:
    observation = llama()
    workload = observation.to_workload(
        3, Pace(rates=RATES, forward_ns=0, backward_ns=0), is_scanned=True
    )
    assert [block.name for block in workload.blocks] == ["layers.0", "layers.1", "layers.2"]
    block = workload.blocks[1]
    assert block.is_fused
    assert block.activations[0].name == "layers.1.input"
    query = next(a for a in block.activations if a.name.endswith("dot_general.0"))
    assert query.make_ns == 2 * blocks.B * blocks.T * blocks.D * blocks.N * blocks.H
    assert workload.is_timed
    assert workload.from_json(workload.to_json()) == workload


@pytest.mark.parametrize("flops_per_s", [1e9, 1e6], ids=["products and bytes", "all scaled"])
def test_a_measured_time_is_shared_out_in_full(flops_per_s: float) -> None:
    rates = Rates(flops_per_s=flops_per_s, memory_bytes_per_s=1e9)
    pace = Pace(rates=rates, forward_ns=1_000_000, backward_ns=3_000_000)
    block = llama().to_workload(1, pace, is_scanned=False).blocks[0]
    assert block.forward_ns == pytest.approx(1_000_000, rel=1e-3)
    assert block.backward_ns == pytest.approx(3_000_000, rel=1e-3)
    assert not block.is_fused


def test_a_collective_is_never_run_again() -> None:
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec()

    def block(params: Array, x: Array) -> Array:
        def inside(params: Array, x: Array) -> Array:
            return jnp.sin(jax.lax.psum(x * params, "d"))

        return jax.shard_map(inside, mesh=mesh, in_specs=(spec, spec), out_specs=spec)(params, x)

    x = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    kinds = {value.name: value.kind for value in observe(block, x, x).values}
    assert [name for name, kind in kinds.items() if kind is OpKind.OPAQUE] == [
        name for name in kinds if "psum" in name
    ]
    assert any("psum" in name for name in kinds)


def test_the_users_names_are_the_values_names() -> None:
    params = blocks.shapes_of_one(blocks.make_params(jnp.float32, blocks.MLP))
    x = jax.ShapeDtypeStruct((blocks.B, blocks.T, blocks.D), jnp.float32)
    names = [value.name for value in observe(blocks.user_named_block, params, x).values]
    assert names == [
        "decoder_layer_input",
        "wide",
        "silu.logistic.0",
        "act",
        "dot_general.1",
        "add.0",
    ]


def test_a_block_without_a_floating_point_input_is_refused() -> None:
    x = jax.ShapeDtypeStruct((4,), jnp.int32)
    with pytest.raises(ModelError, match="no input of floating point"):
        observe(lambda params, x: params * x, jax.ShapeDtypeStruct((4,), jnp.float32), x)


def test_a_block_is_compiled_and_timed() -> None:
    def block(params: Array, x: Array) -> Array:
        return x + jnp.tanh(x @ params)

    params = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    x: Any = jax.ShapeDtypeStruct((512, 64), jnp.float32)
    observation = observe(block, params, x)
    pace = measure(observation, block, params, x)
    workload = observation.to_workload(2, pace, is_scanned=True)
    assert workload.blocks[0].forward_ns == pytest.approx(pace.forward_ns, rel=0.01)
    assert pace.rates.flops_per_s > 1e6
    assert pace.rates.memory_bytes_per_s > 1e6
