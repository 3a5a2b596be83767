"""The named plans on three hand-made blocks, and on random ones against an oracle.

Sizes: T 1024 tokens, D 256 model width, bf16, so that hidden states take 512 KiB.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.errors import PlanError
from ebbtide.plan import Decision, Plan
from ebbtide.planner.named import (
    MIN_BYTES,
    MIN_IN_FLIGHT_BYTES,
    NAMED_PLANS,
    PlanFamily,
    PlanName,
    missing,
    named_plan,
    needed,
    parse_plan_name,
)
from ebbtide.workload import Activation, Block, OpKind, Workload

KEEP, HOST, DISK, RECOMPUTE = Decision.KEEP, Decision.HOST, Decision.DISK, Decision.RECOMPUTE

H = 1024 * 256 * 2  # bytes of hidden states
F = H * 7 // 2  # bytes of one feed-forward activation of the Llama-like block
PLAN_NAMES = (
    "keep",
    "recompute",
    "offload-inputs",
    "offload",
    "balanced",
    "offload-last:1",
    "offload-last:2",
)


class BlockBuilder:
    """Collects activations whose names get the block's name in front."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._activations: list[Activation] = []

    def add(
        self,
        name: str,
        kind: OpKind,
        num_bytes: int,
        *inputs: str,
        is_saved: bool = False,
        is_replayable: bool | None = None,
        group: str | None = None,
    ) -> None:
        never = kind in (OpKind.INPUT, OpKind.RANDOM, OpKind.OPAQUE)
        self._activations.append(
            Activation(
                name=f"{self._name}.{name}",
                op=f"aten.{kind.value}",
                kind=kind,
                num_bytes=num_bytes,
                inputs=tuple(f"{self._name}.{source}" for source in inputs),
                is_saved=is_saved,
                is_replayable=not never if is_replayable is None else is_replayable,
                group=f"{self._name}.{group or name}",
            )
        )

    def block(self) -> Block:
        return Block(name=self._name, class_name="Layer", activations=tuple(self._activations))


def llama_block(name: str) -> Block:
    """GQA with half as many key heads, RMS norm upcast to fp32, rotary embedding, SwiGLU."""
    build = BlockBuilder(name)

    def add_norm(norm: str, source: str) -> None:
        build.add(f"{norm}.fp32", OpKind.ELEMENTWISE, 2 * H, source, is_saved=True)
        build.add(f"{norm}.pow", OpKind.ELEMENTWISE, 2 * H, f"{norm}.fp32")
        build.add(f"{norm}.mean", OpKind.ELEMENTWISE, 4096, f"{norm}.pow")
        build.add(f"{norm}.eps", OpKind.ELEMENTWISE, 4096, f"{norm}.mean")
        build.add(f"{norm}.rsqrt", OpKind.ELEMENTWISE, 4096, f"{norm}.eps", is_saved=True)
        build.add(f"{norm}.mul", OpKind.ELEMENTWISE, 2 * H, f"{norm}.fp32", f"{norm}.rsqrt")
        build.add(f"{norm}.bf16", OpKind.ELEMENTWISE, H, f"{norm}.mul", is_saved=True)
        build.add(f"{norm}.out", OpKind.ELEMENTWISE, H, f"{norm}.bf16", is_saved=True)

    def add_rotary(name: str, num_bytes: int) -> None:
        build.add(f"{name}.cos", OpKind.ELEMENTWISE, num_bytes, name)
        build.add(f"{name}.neg", OpKind.ELEMENTWISE, num_bytes // 2, name)
        build.add(f"{name}.cat", OpKind.ELEMENTWISE, num_bytes, f"{name}.neg", name)
        build.add(f"{name}.sin", OpKind.ELEMENTWISE, num_bytes, f"{name}.cat")
        build.add(
            f"{name}.rot",
            OpKind.ELEMENTWISE,
            num_bytes,
            f"{name}.cos",
            f"{name}.sin",
            is_saved=True,
        )

    build.add("input", OpKind.INPUT, H)
    add_norm("norm1", "input")
    build.add("q", OpKind.MATMUL, H, "norm1.out")
    build.add("k", OpKind.MATMUL, H // 2, "norm1.out")
    build.add("v", OpKind.MATMUL, H // 2, "norm1.out", is_saved=True)
    add_rotary("q", H)
    add_rotary("k", H // 2)
    attended = ("q.rot", "k.rot", "v")
    build.add("attn", OpKind.ATTENTION, H, *attended, is_saved=True)
    build.add("lse", OpKind.ATTENTION, 16384, *attended, is_saved=True, group="attn")
    build.add("o", OpKind.MATMUL, H, "attn")
    build.add("hidden", OpKind.ELEMENTWISE, H, "input", "o")
    add_norm("norm2", "hidden")
    build.add("gate", OpKind.MATMUL, F, "norm2.out", is_saved=True)
    build.add("up", OpKind.MATMUL, F, "norm2.out", is_saved=True)
    build.add("silu", OpKind.ELEMENTWISE, F, "gate", is_saved=True)
    build.add("product", OpKind.ELEMENTWISE, F, "silu", "up", is_saved=True)
    build.add("down", OpKind.MATMUL, H, "product")
    build.add("output", OpKind.ELEMENTWISE, H, "hidden", "down")
    return build.block()


def gpt2_block(name: str) -> Block:
    """Fused layer norms, one matmul for q, k and v, and dropout after each projection."""
    build = BlockBuilder(name)

    def add_norm(norm: str, source: str) -> None:
        build.add(f"{norm}.out", OpKind.NORM, H, source, is_saved=True, group=norm)
        build.add(f"{norm}.mean", OpKind.NORM, 4096, source, is_saved=True, group=norm)
        build.add(f"{norm}.rstd", OpKind.NORM, 4096, source, is_saved=True, group=norm)

    def add_dropout(drop: str, source: str) -> None:
        build.add(f"{drop}.out", OpKind.RANDOM, H, source, group=drop)
        build.add(f"{drop}.mask", OpKind.RANDOM, H // 2, source, is_saved=True, group=drop)

    build.add("input", OpKind.INPUT, H, is_saved=True)
    add_norm("ln1", "input")
    build.add("qkv", OpKind.MATMUL, 3 * H, "ln1.out", is_saved=True)
    build.add("attn", OpKind.ATTENTION, H, "qkv", is_saved=True)
    build.add("lse", OpKind.ATTENTION, 16384, "qkv", is_saved=True, group="attn")
    build.add("copy", OpKind.ELEMENTWISE, H, "attn", is_saved=True)
    build.add("proj", OpKind.MATMUL, H, "copy")
    add_dropout("drop1", "proj")
    build.add("hidden", OpKind.ELEMENTWISE, H, "input", "drop1.out", is_saved=True)
    add_norm("ln2", "hidden")
    build.add("fc", OpKind.MATMUL, 4 * H, "ln2.out", is_saved=True)
    build.add("gelu", OpKind.ELEMENTWISE, 4 * H, "fc", is_saved=True)
    build.add("fc2", OpKind.MATMUL, H, "gelu")
    add_dropout("drop2", "fc2")
    build.add("output", OpKind.ELEMENTWISE, H, "hidden", "drop2.out")
    return build.block()


def opaque_block(name: str) -> Block:
    """An in-place result in the middle, which must not be made again."""
    build = BlockBuilder(name)
    build.add("input", OpKind.INPUT, H)
    build.add("first", OpKind.MATMUL, H, "input")
    build.add("written", OpKind.OPAQUE, H, "first")
    build.add("act", OpKind.ELEMENTWISE, 2 * H, "written", is_saved=True)
    build.add("small", OpKind.OPAQUE, 100, "first")
    build.add("scaled", OpKind.ELEMENTWISE, 2 * H, "act", "small", is_saved=True)
    build.add("second", OpKind.MATMUL, H, "scaled", is_saved=True)
    build.add("unused", OpKind.OPAQUE, H, "second")
    return build.block()


def workload_of(make_block: Callable[[str], Block], num_blocks: int = 3) -> Workload:
    blocks = tuple(make_block(f"h.{index}") for index in range(num_blocks))
    return Workload(model="Model", blocks=blocks)


CORPUS = {
    "llama": workload_of(llama_block),
    "gpt2": workload_of(gpt2_block),
    "opaque": workload_of(opaque_block),
    "mixed": Workload(model="Mixed", blocks=(llama_block("a"), opaque_block("b"), gpt2_block("c"))),
}


def decided(plan: Plan, block: str, *decisions: Decision) -> set[str]:
    """Names in a block, without its own name, that have one of the decisions."""
    return {
        name.removeprefix(f"{block}.")
        for name, decision in plan.decisions.items()
        if name.startswith(f"{block}.") and decision in decisions
    }


def saved_names(block: Block) -> set[str]:
    return {activation.name for activation in block.activations if activation.is_saved}


def stored_names(plan: Plan) -> set[str]:
    return {name for name, decision in plan.decisions.items() if decision is not RECOMPUTE}


NORM1 = {f"norm1.{name}" for name in ("fp32", "pow", "mean", "eps", "rsqrt", "mul", "bf16", "out")}
NORM2 = {name.replace("norm1", "norm2") for name in NORM1}
ROTARY = {f"{name}.{step}" for name in "qk" for step in ("cos", "neg", "cat", "sin", "rot")}


def test_keep_keeps_what_autograd_saves_and_nothing_else() -> None:
    for workload in CORPUS.values():
        plan = named_plan("keep", workload)
        saved = set[str]().union(*(saved_names(block) for block in workload.blocks))
        assert dict(plan.decisions) == dict.fromkeys(saved, KEEP)
        assert (plan.host_bytes, plan.disk_bytes) == (0, 0)


def test_recompute_keeps_only_the_input_of_a_llama_block() -> None:
    plan = named_plan("recompute", CORPUS["llama"])
    for block in ("h.0", "h.1", "h.2"):
        assert decided(plan, block, KEEP) == {"input"}
        assert decided(plan, block, RECOMPUTE) == (
            NORM1
            | NORM2
            | ROTARY
            | {"q", "k", "v", "attn", "lse", "o", "hidden", "gate", "up", "silu", "product"}
        )
        assert decided(plan, block, HOST, DISK) == set()


def test_recompute_keeps_what_random_and_opaque_ops_made() -> None:
    gpt2 = named_plan("recompute", CORPUS["gpt2"])
    assert decided(gpt2, "h.0", KEEP) == {"input", "drop1.out", "drop1.mask", "drop2.mask"}
    opaque = named_plan("recompute", CORPUS["opaque"])
    assert dict(opaque.decisions) == {
        f"h.{index}.{name}": decision
        for index in range(3)
        for name, decision in {
            "written": KEEP,
            "small": KEEP,
            "act": RECOMPUTE,
            "scaled": RECOMPUTE,
            "second": RECOMPUTE,
        }.items()
    }


def test_offload_inputs_evicts_block_inputs_except_the_last() -> None:
    plan = named_plan("offload-inputs", CORPUS["llama"])
    assert [plan.decision(f"h.{index}.input") for index in range(3)] == [HOST, HOST, KEEP]
    assert plan.host_bytes == 2 * H
    recompute = named_plan("recompute", CORPUS["llama"])
    for block in ("h.0", "h.1", "h.2"):
        assert decided(plan, block, RECOMPUTE) == decided(recompute, block, RECOMPUTE)


def test_offload_inputs_evicts_random_and_opaque_results_except_in_the_last_block() -> None:
    gpt2 = named_plan("offload-inputs", CORPUS["gpt2"])
    random = {"input", "drop1.out", "drop1.mask", "drop2.mask"}
    assert decided(gpt2, "h.1", HOST) == random
    assert decided(gpt2, "h.2", KEEP) == random
    opaque = named_plan("offload-inputs", CORPUS["opaque"])
    assert decided(opaque, "h.0", HOST) == {"written"}
    assert decided(opaque, "h.0", KEEP) == {"small"}
    assert decided(opaque, "h.2", KEEP) == {"written", "small"}


def test_offload_evicts_what_is_dear_in_a_llama_block_and_recomputes_the_rest() -> None:
    plan = named_plan("offload", CORPUS["llama"])
    for block in ("h.0", "h.1"):
        # Stored after the rotary embedding and after the residual add, not before.
        assert decided(plan, block, HOST) == (
            {"input", "q.rot", "k.rot", "v", "attn", "hidden", "gate", "up"}
        )
        assert decided(plan, block, KEEP) == {"lse"}
        assert decided(plan, block, RECOMPUTE) == NORM1 | NORM2 | {"silu", "product"}
    assert plan.host_bytes == 2 * (5 * H + 2 * F)


def test_offload_keeps_all_that_the_last_block_saves() -> None:
    for workload in CORPUS.values():
        plan = named_plan("offload", workload)
        last = workload.blocks[-1]
        assert {name for name in plan.decisions if name.startswith(f"{last.name}.")} == (
            saved_names(last)
        )
        assert {plan.decision(name) for name in saved_names(last)} == {KEEP}


def test_offload_stores_the_hidden_state_in_place_of_dropout_output() -> None:
    plan = named_plan("offload", CORPUS["gpt2"])
    assert decided(plan, "h.0", HOST) == (
        {"input", "qkv", "attn", "drop1.mask", "hidden", "fc", "drop2.mask"}
    )
    assert decided(plan, "h.0", KEEP) == {"lse"}
    assert decided(plan, "h.0", RECOMPUTE) == (
        {"copy", "gelu"} | {f"ln{n}.{name}" for n in (1, 2) for name in ("out", "mean", "rstd")}
    )


def test_offload_stores_an_opaque_result_that_is_smaller_than_what_is_made_from_it() -> None:
    plan = named_plan("offload", CORPUS["opaque"])
    assert decided(plan, "h.0", HOST) == {"written", "second"}
    assert decided(plan, "h.0", KEEP) == {"small"}
    assert decided(plan, "h.0", RECOMPUTE) == {"act", "scaled"}


def test_balanced_recomputes_the_second_wide_matmul_of_a_llama_block() -> None:
    plan = named_plan("balanced", CORPUS["llama"])
    for block in ("h.0", "h.1"):
        assert decided(plan, block, HOST) == (
            {"input", "q.rot", "k.rot", "v", "attn", "hidden", "gate"}
        )
        assert decided(plan, block, KEEP) == {"lse"}
        assert decided(plan, block, RECOMPUTE) == NORM1 | NORM2 | {"up", "silu", "product"}
    assert plan.host_bytes == 2 * (5 * H + F) + H  # the last block's input as well


def test_balanced_evicts_only_the_input_of_the_last_block_and_keeps_what_is_wanted_at_once() -> (
    None
):
    for workload in CORPUS.values():
        single = Workload(model="Model", blocks=workload.blocks[:1])
        name = workload.blocks[0].name
        plan, last = named_plan("balanced", workload), named_plan("balanced", single)
        inputs = {
            a.name for a in workload.blocks[0].activations if a.kind is OpKind.INPUT
        } & last.decisions.keys()
        assert {n for n, d in last.decisions.items() if d is HOST} == inputs
        kept = {f"{name}.{n}" for n in decided(plan, name, HOST, KEEP)} - inputs
        assert {n for n, d in last.decisions.items() if d is KEEP} == kept
        assert decided(last, name, RECOMPUTE) == decided(plan, name, RECOMPUTE)


def test_balanced_evicts_what_gpt2_attention_reads_and_recomputes_the_feed_forward() -> None:
    plan = named_plan("balanced", CORPUS["gpt2"])
    assert decided(plan, "h.0", HOST) == (
        {"input", "qkv", "attn", "drop1.mask", "hidden", "drop2.mask"}
    )
    assert plan.decision("h.0.fc") is RECOMPUTE


def test_balanced_stores_every_wide_matmul_that_cannot_be_replayed() -> None:
    build = BlockBuilder("h.0")
    build.add("input", OpKind.INPUT, H)
    build.add("one", OpKind.MATMUL, 3 * H, "input", is_saved=True)
    build.add("two", OpKind.MATMUL, 3 * H, "input", is_saved=True, is_replayable=False)
    build.add("three", OpKind.MATMUL, 3 * H, "input", is_saved=True)
    plan = named_plan("balanced", Workload(model="M", blocks=(build.block(), llama_block("z"))))
    assert decided(plan, "h.0", HOST) == {"input", "one", "two"}
    assert decided(plan, "h.0", RECOMPUTE) == {"three"}


def test_balanced_finds_a_wide_matmul_that_only_recomputing_another_needs() -> None:
    build = BlockBuilder("h.0")
    build.add("input", OpKind.INPUT, H, is_saved=True)
    build.add("first", OpKind.MATMUL, 3 * H, "input")
    build.add("one", OpKind.MATMUL, 3 * H, "input", is_saved=True)
    build.add("two", OpKind.MATMUL, 3 * H, "first", is_saved=True)
    plan = named_plan("balanced", Workload(model="M", blocks=(build.block(), llama_block("z"))))
    assert decided(plan, "h.0", HOST) == {"input", "first"}
    assert decided(plan, "h.0", RECOMPUTE) == {"one", "two"}


def test_balanced_without_a_block_input_finds_nothing_wide() -> None:
    build = BlockBuilder("h.0")
    build.add("one", OpKind.MATMUL, 3 * H, is_saved=True)
    build.add("two", OpKind.MATMUL, 3 * H, is_saved=True)
    plan = named_plan("balanced", Workload(model="M", blocks=(build.block(), llama_block("z"))))
    assert decided(plan, "h.0", HOST) == {"one", "two"}


def test_offload_last_evicts_all_that_the_last_blocks_save_and_recomputes_nothing() -> None:
    workload = CORPUS["llama"]
    plan = named_plan("offload-last:2", workload)
    saved = {name.removeprefix("h.0.") for name in saved_names(workload.blocks[0])}
    small = {"norm1.rsqrt", "norm2.rsqrt", "lse"}
    assert decided(plan, "h.0", KEEP) == saved
    for block in ("h.1", "h.2"):
        assert decided(plan, block, HOST) == saved - small
        assert decided(plan, block, KEEP) == small
    assert RECOMPUTE not in plan.decisions.values()
    assert plan.host_bytes == 2 * (workload.blocks[0].num_bytes_saved - 2 * 4096 - 16384)


def test_the_tier_is_where_evicted_activations_go() -> None:
    on_host = named_plan("balanced", CORPUS["llama"])
    on_disk = named_plan("balanced", CORPUS["llama"], tier=DISK)
    assert (on_disk.host_bytes, on_disk.disk_bytes) == (0, on_host.host_bytes)
    assert decided(on_disk, "h.0", DISK) == decided(on_host, "h.0", HOST)
    assert HOST not in on_disk.decisions.values()


def test_an_activation_below_min_bytes_is_kept_in_place_of_moved() -> None:
    plan = named_plan("offload", CORPUS["llama"], min_bytes=H + 1)
    assert decided(plan, "h.0", HOST) == {"gate", "up"}
    assert decided(plan, "h.0", KEEP) == {"input", "q.rot", "k.rot", "v", "attn", "lse", "hidden"}
    assert named_plan("offload", CORPUS["llama"], min_bytes=16384).decision("h.0.lse") is HOST


def test_an_empty_storage_is_never_moved() -> None:
    build = BlockBuilder("h.0")
    build.add("empty", OpKind.MATMUL, 0, is_saved=True)
    workload = Workload(model="M", blocks=(build.block(),))
    assert named_plan("offload-last:1", workload, min_bytes=0).decision("h.0.empty") is KEEP


def test_a_small_saved_activation_is_stored_in_place_of_the_large_matmul_it_is_made_from() -> None:
    build = BlockBuilder("h.0")
    build.add("input", OpKind.INPUT, H)
    build.add("large", OpKind.MATMUL, 3 * H, "input")
    build.add("sum", OpKind.ELEMENTWISE, 100, "large", is_saved=True)
    plan = named_plan("offload", Workload(model="M", blocks=(build.block(), llama_block("z"))))
    assert decided(plan, "h.0", KEEP) == {"sum"}
    assert decided(plan, "h.0", HOST, RECOMPUTE) == set()


def test_one_sum_is_stored_in_place_of_two_terms() -> None:
    build = BlockBuilder("h.0")
    build.add("input", OpKind.INPUT, H)
    build.add("one", OpKind.MATMUL, H, "input")
    build.add("two", OpKind.MATMUL, H, "input")
    build.add("sum", OpKind.ELEMENTWISE, H, "one", "two")
    build.add("act", OpKind.ELEMENTWISE, 2 * H, "sum", is_saved=True)
    plan = named_plan("offload", Workload(model="M", blocks=(build.block(), llama_block("z"))))
    assert decided(plan, "h.0", HOST) == {"sum"}
    assert decided(plan, "h.0", RECOMPUTE) == {"act"}


def test_nothing_is_stored_past_a_norm_kernel() -> None:
    build = BlockBuilder("h.0")
    build.add("large", OpKind.MATMUL, H)
    build.add("norm", OpKind.NORM, H, "large", is_saved=True)
    plan = named_plan("offload", Workload(model="M", blocks=(build.block(), llama_block("z"))))
    assert decided(plan, "h.0", HOST) == {"large"}
    assert decided(plan, "h.0", RECOMPUTE) == {"norm"}


def test_bytes_in_flight_are_those_of_the_fullest_block_but_not_fewer_than_256_mib() -> None:
    small = named_plan("offload", CORPUS["llama"])
    assert MIN_IN_FLIGHT_BYTES == 256 * 2**20
    assert small.max_out_bytes_in_flight == small.max_in_bytes_in_flight == 256 * 2**20
    build = BlockBuilder("h.0")
    build.add("one", OpKind.MATMUL, 200 * 2**20, is_saved=True)
    build.add("two", OpKind.MATMUL, 100 * 2**20, is_saved=True)
    large = named_plan("offload", Workload(model="M", blocks=(build.block(), llama_block("z"))))
    assert large.max_out_bytes_in_flight == large.max_in_bytes_in_flight == 300 * 2**20


def test_a_plan_carries_its_name_model_and_fingerprint() -> None:
    for workload in CORPUS.values():
        plan = named_plan("offload-last:2", workload)
        assert (plan.name, plan.model) == ("offload-last:2", workload.model)
        plan.check_fits(workload)


def test_a_workload_without_blocks_has_an_empty_plan() -> None:
    plan = named_plan("balanced", Workload(model="M", blocks=()))
    assert dict(plan.decisions) == {}


@pytest.mark.parametrize(
    ("name", "parsed"),
    [
        ("keep", PlanName(family=PlanFamily.KEEP, num_last_blocks=None)),
        ("recompute", PlanName(family=PlanFamily.RECOMPUTE, num_last_blocks=None)),
        ("offload-inputs", PlanName(family=PlanFamily.OFFLOAD_INPUTS, num_last_blocks=None)),
        ("offload", PlanName(family=PlanFamily.OFFLOAD, num_last_blocks=None)),
        ("balanced", PlanName(family=PlanFamily.BALANCED, num_last_blocks=None)),
        ("offload-last:12", PlanName(family=PlanFamily.OFFLOAD_LAST, num_last_blocks=12)),
    ],
)
def test_every_name_is_parsed(name: str, parsed: PlanName) -> None:
    assert parse_plan_name(name) == parsed


def test_the_list_of_names_is_this() -> None:
    assert NAMED_PLANS == (
        "keep",
        "recompute",
        "offload-inputs",
        "offload",
        "balanced",
        "offload-last:K",
    )


@pytest.mark.parametrize("name", ["balance", "Balanced", "keep:1", "offload:2", "", ":"])
def test_an_unknown_name_is_refused(name: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse_plan_name(name)
    assert str(caught.value).startswith(f"unknown plan {name!r}; valid names, nearest first: ")


def test_an_unknown_name_lists_the_valid_ones_nearest_first() -> None:
    with pytest.raises(PlanError) as caught:
        named_plan("offload-input", CORPUS["llama"])
    assert str(caught.value) == (
        "unknown plan 'offload-input'; valid names, nearest first: "
        "offload-inputs, offload, offload-last:K, recompute, balanced, keep"
    )


@pytest.mark.parametrize("count", ["0", "x", "", "-1", "+1", " 1", "1_0", "1.0", "\u0661", "K"])
def test_a_malformed_number_of_blocks_is_refused(count: str) -> None:
    name = f"offload-last:{count}"
    with pytest.raises(PlanError) as caught:
        parse_plan_name(name)
    assert str(caught.value).startswith(
        f"plan {name!r}: K is {count!r}; K is the number of last blocks to evict, a whole number "
        f"of 1 or more, as in 'offload-last:2'. unknown plan {name!r}; valid names, nearest first: "
        "offload-last:K, "
    )


def test_more_blocks_than_the_workload_has_are_refused() -> None:
    assert named_plan("offload-last:3", CORPUS["llama"]).name == "offload-last:3"
    with pytest.raises(PlanError) as caught:
        named_plan("offload-last:4", CORPUS["llama"])
    assert str(caught.value) == (
        "plan 'offload-last:4' evicts the last 4 blocks, but the workload has 3; K is at most the "
        "number of blocks. Ask for 'offload-last:3' or fewer."
    )


@pytest.mark.parametrize("tier", [KEEP, RECOMPUTE])
def test_only_host_and_disk_are_tiers(tier: Decision) -> None:
    with pytest.raises(ValueError, match="evicted activations go to"):
        named_plan("offload", CORPUS["llama"], tier=tier)


def test_a_negative_minimum_is_refused() -> None:
    with pytest.raises(ValueError, match="min_bytes is -1; it must be 0 or more"):
        named_plan("offload", CORPUS["llama"], min_bytes=-1)


def test_needed_follows_recomputed_activations_to_stored_ones() -> None:
    block = opaque_block("h.0")
    every = {f"h.0.{name}" for name in ("act", "scaled", "second")}
    assert needed(block, every) == every
    assert needed(block, {"h.0.act", "h.0.second", "elsewhere"}) == every | {"h.0.small"}
    assert needed(block, set()) == every | {"h.0.written", "h.0.small"}


def test_missing_names_what_a_plan_cannot_restore() -> None:
    workload = workload_of(opaque_block, num_blocks=1)
    plan = named_plan("recompute", workload)
    assert missing(plan, workload) == []

    def without(*names: str) -> Plan:
        decisions = {
            name: decision for name, decision in plan.decisions.items() if name not in names
        }
        return Plan(
            name="broken",
            model=plan.model,
            fingerprint=plan.fingerprint,
            decisions=decisions,
            host_bytes=0,
            disk_bytes=0,
            max_out_bytes_in_flight=0,
            max_in_bytes_in_flight=0,
        )

    assert missing(without("h.0.small"), workload) == ["h.0.scaled", "h.0.second"]
    assert missing(without("h.0.written"), workload) == ["h.0.act", "h.0.scaled", "h.0.second"]
    assert missing(without("h.0.act"), workload) == []


def test_missing_does_not_believe_a_decision_to_recompute_what_cannot_be() -> None:
    workload = workload_of(opaque_block, num_blocks=1)
    plan = named_plan("recompute", workload)
    lie = Plan(
        name="lie",
        model=plan.model,
        fingerprint=plan.fingerprint,
        decisions={**plan.decisions, "h.0.written": RECOMPUTE},
        host_bytes=0,
        disk_bytes=0,
        max_out_bytes_in_flight=0,
        max_in_bytes_in_flight=0,
    )
    assert missing(lie, workload) == ["h.0.act", "h.0.scaled", "h.0.second"]


def assert_sound(plan: Plan, workload: Workload, *, min_bytes: int) -> None:
    """What holds for every named plan, whatever its rule."""
    assert missing(plan, workload) == []
    stored = stored_names(plan)
    num_bytes = {a.name: a.num_bytes for block in workload.blocks for a in block.activations}
    for block in workload.blocks:
        names = {activation.name for activation in block.activations}
        assert {name for name in plan.decisions if name in names} == needed(block, stored)
        for activation in block.activations:
            decision = plan.decision(activation.name)
            assert decision is not RECOMPUTE or activation.is_replayable
            if decision in (HOST, DISK):
                assert activation.num_bytes >= max(min_bytes, 1)
        assert_groups_are_whole(block, stored)
    for tier, total in ((HOST, plan.host_bytes), (DISK, plan.disk_bytes)):
        moved = [num_bytes[name] for name, d in plan.decisions.items() if d is tier]
        assert total == sum(moved)
        assert plan.max_out_bytes_in_flight >= max(moved, default=0)
        assert plan.max_in_bytes_in_flight >= max(moved, default=0)
    plan.check_fits(workload)
    assert Plan.from_json(plan.to_json()) == plan


def assert_groups_are_whole(block: Block, stored: set[str]) -> None:
    """If one output of an attention op is stored, so are all its saved ones."""
    attention = [a for a in block.activations if a.kind is OpKind.ATTENTION]
    stored_groups = {activation.group for activation in attention if activation.name in stored}
    for activation in attention:
        if activation.is_saved and activation.group in stored_groups:
            assert activation.name in stored


def assert_nothing_dominates(block: Block, stored: set[str]) -> None:
    """No unsaved stored activation could be replaced by a smaller one made from it."""
    for source in block.activations:
        if source.name not in stored or source.is_saved:
            continue
        reached = {source.name}
        for target in block.activations:
            if target.kind is not OpKind.ELEMENTWISE or not target.is_replayable:
                continue
            if target.name in stored or reached.isdisjoint(target.inputs):
                continue
            reached.add(target.name)
            if target.num_bytes <= source.num_bytes and target.name in needed(block, stored):
                assert source.name in needed(block, stored | {target.name})


@pytest.mark.parametrize("tier", [HOST, DISK])
@pytest.mark.parametrize("name", PLAN_NAMES)
@pytest.mark.parametrize("workload", CORPUS.values(), ids=CORPUS.keys())
def test_every_plan_is_sound_on_the_corpus(workload: Workload, name: str, tier: Decision) -> None:
    plan = named_plan(name, workload, tier=tier)
    assert_sound(plan, workload, min_bytes=MIN_BYTES)
    assert named_plan(name, workload, tier=tier).to_json() == plan.to_json()


class RandomOp(NamedTuple):
    """What hypothesis draws for one op; `build_random` makes a workload of many."""

    kind: OpKind
    is_pure: bool
    picks: list[int]
    """Which earlier activations it reads, modulo their number."""
    outputs: list[tuple[int, bool]]
    """For each output, its bytes and whether it is saved."""


# Plain tuples, built into a workload by each test: beartype, which checks what the package is
# given, draws random numbers, and hypothesis forbids that inside a strategy.
RANDOM_BLOCKS = st.lists(
    st.lists(
        st.builds(
            RandomOp,
            kind=st.sampled_from(OpKind),
            is_pure=st.sampled_from([True, True, True, False]),
            picks=st.lists(st.integers(0, 20), max_size=3),
            outputs=st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=1, max_size=2),
        ),
        max_size=9,
    ),
    min_size=1,
    max_size=3,
)


def build_random(blocks: list[list[RandomOp]]) -> Workload:
    built: list[Block] = []
    for block_index, ops in enumerate(blocks):
        build, names = BlockBuilder(f"b{block_index}"), list[str]()
        for op_index, op in enumerate(ops):
            picks = {pick % len(names) for pick in op.picks} if names else set[int]()
            inputs = () if op.kind is OpKind.INPUT else [names[pick] for pick in sorted(picks)]
            for output_index, (num_bytes, is_saved) in enumerate(op.outputs):
                name = f"{op_index}.{output_index}"
                build.add(
                    name,
                    op.kind,
                    num_bytes,
                    *inputs,
                    is_saved=is_saved,
                    is_replayable=None if op.is_pure else False,
                    group=str(op_index),
                )
            names.extend(f"{op_index}.{index}" for index in range(len(op.outputs)))
        built.append(build.block())
    return Workload(model="Random", blocks=tuple(built))


@given(blocks=RANDOM_BLOCKS, min_bytes=st.integers(0, 4), tier=st.sampled_from([HOST, DISK]))
def test_every_plan_is_sound_on_random_workloads(
    blocks: list[list[RandomOp]], min_bytes: int, tier: Decision
) -> None:
    workload = build_random(blocks)
    last = f"offload-last:{len(workload.blocks)}"
    for name in ("keep", "recompute", "offload-inputs", "offload", "balanced", last):
        plan = named_plan(name, workload, tier=tier, min_bytes=min_bytes)
        assert_sound(plan, workload, min_bytes=min_bytes)


@given(blocks=RANDOM_BLOCKS)
def test_no_plan_stores_an_activation_where_a_smaller_one_would_do(
    blocks: list[list[RandomOp]],
) -> None:
    workload = build_random(blocks)
    for index, block in enumerate(workload.blocks):
        is_last = index == len(workload.blocks) - 1
        for name in ("balanced",) if is_last else ("balanced", "offload"):
            stored = stored_names(named_plan(name, workload, min_bytes=0))
            assert_nothing_dominates(block, stored)


@given(blocks=RANDOM_BLOCKS)
def test_no_dear_op_is_run_again_by_offload(blocks: list[list[RandomOp]]) -> None:
    workload = build_random(blocks)
    plan = named_plan("offload", workload)
    for block in workload.blocks:
        for activation in block.activations:
            if plan.decision(activation.name) is RECOMPUTE:
                assert activation.kind in (OpKind.ELEMENTWISE, OpKind.NORM)


@given(blocks=RANDOM_BLOCKS)
def test_a_random_workload_survives_its_json_form(blocks: list[list[RandomOp]]) -> None:
    workload = build_random(blocks)
    assert Workload.from_json(workload.to_json()) == workload


def test_the_documented_plan_is_the_one_for_the_documented_workload() -> None:
    text = (Path(__file__).parents[2] / "docs" / "formats.md").read_text(encoding="utf-8")
    workload_text, plan_text = re.findall(r"```json\n(.*?)```", text, flags=re.DOTALL)
    workload = Workload.from_json(workload_text)
    assert workload.to_json() == workload_text
    assert named_plan("offload", workload).to_json() == plan_text
