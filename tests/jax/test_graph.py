"""A jaxpr laid out flat: operations, bytes and costs."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from ebbtide.jax.graph import NO_VALUE, Cost, Graph, flatten


def graph_of(fun: Any, *shapes: tuple[int, ...]) -> Graph:
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return flatten(jax.make_jaxpr(fun)(*arguments).jaxpr)


def test_costs_add_up() -> None:
    assert Cost(flops=1, num_bytes=2) + Cost(flops=3, num_bytes=4) == Cost(flops=4, num_bytes=6)


def test_a_product_has_two_operations_for_each_pair_and_reads_and_writes_all_once() -> None:
    graph = graph_of(jnp.matmul, (2, 3), (3, 5))
    (operation,) = graph.operations
    assert operation.primitive == "dot_general"
    assert operation.cost == Cost(flops=2 * 2 * 3 * 5, num_bytes=4 * (6 + 15 + 10))
    assert (operation.inputs, operation.outputs) == (graph.inputs, graph.outputs)
    assert [graph.num_bytes[v] for v in (*graph.inputs, *graph.outputs)] == [24, 60, 40]


def test_a_nested_jit_and_a_custom_jvp_are_laid_out_in_place() -> None:
    inner = jax.jit(lambda x: jnp.sin(x))
    graph = graph_of(lambda x: jax.nn.relu(inner(x)) + 1.0, (4,))
    names = [operation.primitive for operation in graph.operations]
    assert names == ["sin", "max", "add"]
    sine, largest, add = graph.operations
    assert sine.outputs[0] == largest.inputs[0] and largest.outputs[0] == add.inputs[0]
    assert add.inputs[1] == NO_VALUE
    assert graph.outputs == add.outputs


def test_names_and_effects_are_told() -> None:
    def noisy(x: Any) -> Any:
        jax.debug.print("{x}", x=x)
        return checkpoint_name(x, "mine")

    graph = graph_of(noisy, (2,))
    named = [operation.name for operation in graph.operations if operation.primitive == "name"]
    assert named == ["mine"]
    assert any(operation.has_effect for operation in graph.operations)


@pytest.mark.parametrize("length", [1, 4])
def test_a_scan_costs_its_body_for_each_turn(length: int) -> None:
    def scan(w: Any, x: Any) -> Any:
        return jax.lax.scan(lambda h, _: (h @ w, None), x, None, length=length)[0]

    (operation,) = graph_of(scan, (3, 3), (2, 3)).operations
    assert operation.cost.flops == length * 2 * 2 * 3 * 3


def test_of_a_condition_the_dearest_branch_counts() -> None:
    def choose(x: Any, w: Any) -> Any:
        return jax.lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x + 1.0)

    costs = {o.primitive: o.cost for o in graph_of(choose, (3, 3), (3, 3)).operations}
    assert costs["cond"].flops == 2 * 27
