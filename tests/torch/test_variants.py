"""`attach(compile=True)`: what plans ask of compiled blocks, and the bits that they give."""

# B batch, T tokens, D model width

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config

from ebbtide.errors import ModelError
from ebbtide.plan import Decision
from ebbtide.torch import attach
from ebbtide.torch.blocks import find_blocks
from ebbtide.torch.devices.fake import Schedule
from ebbtide.torch.internals import compiled_call_of
from ebbtide.torch.variants import Compilation
from ebbtide.workload import OpKind
from tests.torch.fakes import FakeTide, MakePlan, offload_everything, planned
from tests.torch.models import BATCH, NUM_BLOCKS, NUM_TOKENS, WIDTH, Gated, Stack, features
from tests.torch.models import gpt2 as build_gpt2
from tests.torch.models import llama as build_llama
from tests.torch.training import (
    PLANS,
    Step,
    Trace,
    attach_here,
    differences,
    feature_step,
    language_step,
    seeded,
    train,
    train_attached,
)

pytestmark = [
    # Dynamo itself looks at `.grad` of the inputs of a graph.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated"),
]

NUM_ROW_BYTES = BATCH * NUM_TOKENS * 4
NUM_STREAM_BYTES = WIDTH * NUM_ROW_BYTES
NUM_WIDE_BYTES = 3 * NUM_STREAM_BYTES
"""Of a Llama's gate or up."""
NUM_LEAN_BYTES = 5 * NUM_STREAM_BYTES + 4 * NUM_ROW_BYTES + 2 * NUM_WIDE_BYTES
"""Input, query, key, value of half the heads, attention's result, o, log-sum-exp, gate and up."""


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def num_graphs() -> int:
    """Return how many graphs were compiled since this was asked last; none may have broken."""
    assert counters["graph_break"] == {}
    assert counters["recompiles"] == {}
    assert counters["frames"]["total"] == counters["frames"]["ok"]
    num = counters["stats"]["unique_graphs"]
    counters.clear()
    torch.compiler.reset()
    return num


def kept_compiled(build: Callable[[], nn.Module], step: Step, backend: str = "aot_eager") -> Trace:
    """Train with compiled blocks and without ebbtide."""
    model = seeded(build)
    for block in find_blocks(model).values():
        block.compile(backend=backend)
    return train(model, step)


MOVED_BYTES = {
    "recompute": 0,
    "offload-inputs": (NUM_BLOCKS - 1) * NUM_STREAM_BYTES,
    "offload": (NUM_BLOCKS - 1) * NUM_LEAN_BYTES,
    "balanced": (NUM_BLOCKS - 1) * (NUM_LEAN_BYTES - NUM_WIDE_BYTES) + NUM_STREAM_BYTES,
    "offload-last:2": 2 * NUM_LEAN_BYTES,
}
NUM_VARIANTS = {"recompute": 1, "offload-inputs": 1}
"""Others take two: the one that is observed, and the plan's."""


@pytest.mark.parametrize("plan", PLANS)
def test_a_plan_moves_what_it_says_and_compiles_each_variant_once(
    plan: str, tmp_path: Path
) -> None:
    wanted = kept_compiled(build_llama, language_step)
    assert num_graphs() == 1
    model = seeded(build_llama)
    with attach_here(model, plan, tmp_path, min_bytes=1, compile="aot_eager") as tide:
        trace = train_attached(tide, model, language_step)
        counts = tide.statistics()
        assert counts.moved_out_bytes == counts.moved_in_bytes == MOVED_BYTES[plan]
        assert counts.num_kept_not_understood == ()
        assert tide.plan is not None and tide.plan.disk_bytes == MOVED_BYTES[plan]
    assert differences(trace, wanted) == []
    assert num_graphs() == NUM_VARIANTS.get(plan, 2)


def test_blocks_are_described_by_their_products(tmp_path: Path) -> None:
    model = seeded(build_llama)
    with attach_here(model, "balanced", tmp_path, min_bytes=1, compile="aot_eager") as tide:
        train(model, language_step, num_steps=2)
        assert tide.workload is not None and tide.plan is not None
        block = tide.workload.blocks[1]
        assert block.class_name == "LlamaDecoderLayer"
        path, attention = "model.layers.1", "self_attn:scaled_dot_product_flash_attention_for_cpu"
        sizes = {
            f"{path}:input": NUM_STREAM_BYTES,
            f"{path}.self_attn.q_proj": NUM_STREAM_BYTES,
            f"{path}.self_attn.k_proj": NUM_STREAM_BYTES // 2,
            f"{path}.self_attn.v_proj": NUM_STREAM_BYTES // 2,
            f"{path}.{attention}.0": NUM_STREAM_BYTES,
            f"{path}.{attention}.1": 4 * NUM_ROW_BYTES,
            f"{path}.self_attn.o_proj": NUM_STREAM_BYTES,
            f"{path}.mlp.gate_proj": NUM_WIDE_BYTES,
            f"{path}.mlp.up_proj": NUM_WIDE_BYTES,
        }
        assert {a.name: a.num_bytes for a in block.activations} == sizes
        by_name = {a.name.removeprefix(path): a for a in block.activations}
        assert by_name[".mlp.up_proj"].inputs == (f"{path}:input", f"{path}.self_attn.o_proj")
        assert by_name[f".{attention}.0"].kind is OpKind.ATTENTION
        assert by_name[f".{attention}.1"].group == f"{path}.{attention}"
        assert [n for n, a in by_name.items() if not a.is_replayable] == [":input"]
        assert tide.plan.decisions[f"{path}.mlp.up_proj"] is Decision.RECOMPUTE
        assert tide.plan.decisions[f"{path}.mlp.gate_proj"] is Decision.DISK


@pytest.mark.parametrize("plan", ["recompute", "offload"])
def test_dropout_is_never_drawn_again(plan: str, tmp_path: Path) -> None:
    wanted = kept_compiled(build_gpt2, language_step)
    model = seeded(build_gpt2)
    with attach_here(model, plan, tmp_path, min_bytes=1, compile="aot_eager") as tide:
        assert differences(train(model, language_step), wanted) == []
        assert tide.workload is not None
        kinds = {a.kind for a in tide.workload.blocks[0].activations if not a.is_replayable}
        assert kinds == {OpKind.INPUT, OpKind.RANDOM}


@pytest.mark.slow
@pytest.mark.parametrize("build", [build_llama, build_gpt2])
@pytest.mark.parametrize("plan", ["offload-inputs", "balanced"])
def test_generated_code_gives_the_same_gradients(
    build: Callable[[], nn.Module], plan: str, tmp_path: Path
) -> None:
    wanted = kept_compiled(build, language_step, "inductor")
    model = seeded(build)
    with attach_here(model, plan, tmp_path, min_bytes=1, compile=True) as tide:
        trace = train_attached(tide, model, language_step)
        counts = tide.statistics()
        assert tide.plan is not None and counts.moved_in_bytes == tide.plan.disk_bytes > 0
        assert counts.num_kept_not_understood == ()
    assert differences(trace, wanted) == []


@pytest.mark.slow
def test_generated_code_saves_seeds_and_not_masks(tmp_path: Path) -> None:
    model = seeded(build_gpt2)
    with attach_here(model, "offload", tmp_path, min_bytes=1, compile=True) as tide:
        train(model, language_step, num_steps=2)
        assert tide.workload is not None
        random = [a for a in tide.workload.blocks[1].activations if a.kind is OpKind.RANDOM]
        assert [(a.name, a.num_bytes) for a in random] == [("transformer.h.1:inductor_seeds", 24)]


def fake_compiled(model: nn.Module, make_plan: MakePlan, schedule: Schedule = "late") -> FakeTide:
    compilation = Compilation(find_blocks(model), "aot_eager")
    tide = FakeTide(model, make_plan, schedule=schedule, seed=3)
    tide.runtime.compilation = compilation
    return tide


@pytest.mark.parametrize("schedule", ["late", "eager", "random"])
@pytest.mark.parametrize("plan", ["offload-inputs", "balanced", "offload-last:3"])
def test_copies_may_end_at_any_time(plan: str, schedule: Schedule) -> None:
    wanted = kept_compiled(lambda: Stack(Gated), feature_step)
    model = seeded(lambda: Stack(Gated))
    with fake_compiled(model, planned(plan), schedule) as tide:
        assert differences(train(model, feature_step), wanted) == []
        counts = tide.ledger.snapshot()
        assert counts.moved_in_bytes >= 2 * tide.plan.host_bytes > 0
        tide.assert_nothing_is_left()
        tide.assert_bounds_were_kept()


def two_forwards_first(model: nn.Module, index: int) -> Tensor:
    del index
    losses = [model(features()).square().mean() for _ in range(2)]
    for loss in losses:
        loss.backward()
    return losses[0] + losses[1]


def retained(model: nn.Module, index: int) -> Tensor:
    del index
    loss = model(features()).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    return loss


def dropped(model: nn.Module, index: int) -> Tensor:
    model(features())
    return feature_step(model, index)


@pytest.mark.parametrize("step", [two_forwards_first, retained, dropped], ids=lambda s: s.__name__)
def test_odd_steps_have_the_same_gradients(step: Step) -> None:
    with functorch_config.patch(donated_buffer=False):  # or torch refuses to retain
        wanted = kept_compiled(lambda: Stack(Gated), step)
        model = seeded(lambda: Stack(Gated))
        with fake_compiled(model, offload_everything) as tide:
            assert differences(train(model, step), wanted) == []
            assert tide.ledger.snapshot().moved_in_bytes > 0
            tide.assert_nothing_is_left()


def test_evaluation_compiles_once_whatever_the_plan(tmp_path: Path) -> None:
    def step(model: nn.Module, index: int) -> Tensor:
        loss = feature_step(model, index)
        with torch.no_grad():
            return loss + model(features()).sum()

    model = seeded(lambda: Stack(Gated))
    with attach_here(model, "offload", tmp_path, min_bytes=1, compile="aot_eager"):
        trace = train(model, step)
    # Two variants for a first block that asks for no gradient of its input and for the others,
    # and the one of evaluation.
    assert num_graphs() == 2 * 2 + 1
    assert differences(trace, kept_compiled(lambda: Stack(Gated), step)) == []


class Broken(Gated):
    """A block in two graphs."""

    def forward(self, h_BTD: Tensor) -> Tensor:
        h_BTD = super().forward(h_BTD)
        torch._dynamo.graph_break()  # pyright: ignore[reportPrivateUsage]
        return super().forward(h_BTD)


def test_a_block_in_two_graphs_is_moved_and_not_recomputed(tmp_path: Path) -> None:
    wanted = kept_compiled(lambda: Stack(Broken), feature_step)
    model = seeded(lambda: Stack(Broken))
    with attach_here(model, "offload", tmp_path, min_bytes=1, compile="aot_eager") as tide:
        trace = train_attached(tide, model, feature_step)
        assert tide.workload is not None and tide.plan is not None
        names = [a.name for a in tide.workload.blocks[1].activations if a.kind is OpKind.MATMUL]
        assert names == ["blocks.1.gate", "blocks.1.up", "blocks.1.gate@2", "blocks.1.up@2"]
        assert not any(a.is_replayable for a in tide.workload.blocks[1].activations)
        assert tide.statistics().moved_out_bytes == tide.plan.disk_bytes > 0
    assert differences(trace, wanted) == []


@pytest.mark.parametrize("plan", ["keep", "offload"])
def test_close_leaves_the_blocks_uncompiled(plan: str, tmp_path: Path) -> None:
    model = seeded(lambda: Stack(Gated))
    with attach_here(model, plan, tmp_path, compile="aot_eager"):
        assert all(compiled_call_of(b) is not None for b in find_blocks(model).values())
        train(model, feature_step)
        assert num_graphs() > 0
    assert all(compiled_call_of(block) is None for block in model.modules())
    plain = seeded(lambda: Stack(Gated))
    train(plain, feature_step)
    assert differences(train(model, feature_step), train(plain, feature_step)) == []
    assert num_graphs() == 0


def test_keep_compiles_as_torch_does_and_moves_nothing() -> None:
    wanted = kept_compiled(lambda: Stack(Gated), feature_step)
    alone = num_graphs()
    model = seeded(lambda: Stack(Gated))
    with attach(model, "keep", compile="aot_eager") as tide:
        assert differences(train(model, feature_step), wanted) == []
        assert tide.statistics().moved_out_bytes == 0
    assert num_graphs() == alone


def test_a_compiled_block_is_not_compiled_again() -> None:
    model = seeded(lambda: Stack(Gated))
    next(iter(find_blocks(model).values())).compile(backend="aot_eager")
    with pytest.raises(ModelError) as error:
        attach(model, "keep", compile=True)
    assert str(error.value) == (
        "blocks.0 is compiled already, and compile=True was given. Leave compile= out, or attach "
        "before you compile."
    )


def test_a_budget_for_blocks_that_were_compiled_before_is_refused() -> None:
    model = seeded(lambda: Stack(Gated))
    next(iter(find_blocks(model).values())).compile(backend="aot_eager")
    with pytest.raises(ModelError) as error:
        attach(model, budget="1GiB")
    assert str(error.value) == (
        "budget='1GiB' was given, and blocks.0 is compiled already: what it saves and what it "
        "recomputes was decided then. Let ebbtide compile the blocks, with attach(model, "
        "budget=..., compile=True), or give a plan, such as 'offload'."
    )


def test_a_backend_that_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match="inductor"):
        attach(seeded(lambda: Stack(Gated)), "keep", compile="indutcor")
