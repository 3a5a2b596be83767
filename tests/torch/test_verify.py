"""`verify`: it finds what was planted, says where, and leaves everything as it was."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode,  # pyright: ignore[reportPrivateUsage]
)

from ebbtide.errors import ModelError, RuntimeStateError
from ebbtide.torch import attach
from ebbtide.torch.tape import Tape
from ebbtide.torch.verification import Difference, Verification
from ebbtide.torch.verify import verify
from tests.torch import faults
from tests.torch.fakes import FakeTide, offload_everything, planned
from tests.torch.models import Gated, Normalised, Stack, Views, features, gpt2, tokens
from tests.torch.training import (
    attach_here,
    differences,
    feature_step,
    language_step,
    seeded,
    train,
)

NUM_BLOCKS = 4


def stack(make_block: Callable[[], nn.Module] = Gated) -> nn.Module:
    return seeded(lambda: Stack(make_block, NUM_BLOCKS))


def square(output: Tensor) -> Tensor:
    return output.square().mean()


def verify_fake(tide: FakeTide, model: nn.Module, **options: Any) -> Verification:
    torch.manual_seed(3)
    return verify(model, tide.runtime, tide.ledger, features(), loss=square, **options)


# -- planted faults --------------------------------------------------------------------------------


FAULTS = {
    "race": (faults.race, Gated),
    "lost stride": (faults.lost_stride, faults.Permuted),
    "lost order": (faults.lost_order, faults.Permuted),
    "swapped": (faults.swapped, Gated),
    "stale": (faults.stale, Gated),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_and_the_last_block_that_it_hits_is_named(name: str) -> None:
    plant, make_block = FAULTS[name]
    model = stack(make_block)
    with FakeTide(model, offload_everything) as tide:
        assert verify_fake(tide, model).equal
        with plant(tide.device):
            found = verify_fake(tide, model)
    assert not found.equal
    assert found.largest_difference > 0.0
    assert found.noise == 0.0
    first = found.first_difference
    assert first is not None and first.step == 1
    # Every block is hit, and backward comes to the last one first.
    assert first.block == f"blocks.{NUM_BLOCKS - 1}"
    assert first.tensor.startswith(f"gradient of blocks.{NUM_BLOCKS - 1}.")
    assert f"DIFFERENT: first {first.tensor}, in block {first.block}" in str(found)


def test_dropout_that_is_run_again_is_found() -> None:
    model = stack(faults.Dropping)
    with faults.dropout_again(), FakeTide(model, planned("recompute")) as tide:
        found = verify_fake(tide, model)
    assert not found.equal and found.first_difference is not None
    assert found.first_difference.block == f"blocks.{NUM_BLOCKS - 1}"


@pytest.mark.parametrize("name", ["race", "stale"])
def test_without_decoys_the_bytes_of_the_step_before_would_pass(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A place or a row that was not written holds what is right, where every step is the same."""

    def nothing(self: object) -> None:
        del self

    model = stack()
    with FakeTide(model, offload_everything) as tide:
        assert verify_fake(tide, model).equal
        plant = faults.stale if name == "stale" else faults.race_on_used_memory
        with plant(tide.device):
            with monkeypatch.context() as patch:
                patch.setattr("ebbtide.torch.verify._Verifier._decoy", nothing)
                verify_fake(tide, model, steps=1)  # its bytes are there from now on
                assert verify_fake(tide, model, steps=2).equal
            assert not verify_fake(tide, model, steps=2).equal


@pytest.mark.parametrize("block", range(NUM_BLOCKS))
def test_the_block_of_a_fault_is_named_though_all_before_it_differ(block: int) -> None:
    model = stack(faults.Permuted)
    with FakeTide(model, offload_everything) as tide:
        assert verify_fake(tide, model).equal
        with faults.lost_order(block=f"blocks.{block}"):
            found = verify_fake(tide, model)
    assert found.first_difference is not None
    assert found.first_difference.block == f"blocks.{block}"


def test_a_fault_that_comes_once_is_found_and_the_step_is_named() -> None:
    model = stack()
    with FakeTide(model, offload_everything) as tide:
        assert verify_fake(tide, model).equal
        with faults.once(
            faults.swapped, tide.device, num_backward=6
        ):  # two to a step: the decoy's and its own
            found = verify_fake(tide, model)
    assert not found.equal and found.first_difference is not None
    assert found.first_difference.step == 3
    assert found.first_difference.block == f"blocks.{NUM_BLOCKS - 1}"


# -- noise, and other ways to run ------------------------------------------------------------------


class Noisy(torch.autograd.Function):
    """Its gradient grows a little from call to call, as sums of atomic additions vary."""

    num_calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        del ctx
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        del ctx
        Noisy.num_calls += 1
        return gradient * (1 + 1e-5 * (Noisy.num_calls % 3))


class NoisyBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = faults.Permuted()

    def forward(self, h_BTD: Tensor) -> Tensor:
        result: Any = Noisy.apply(self.inner(h_BTD))
        return result


def test_runs_without_a_plan_set_the_scale_where_they_differ() -> None:
    model = stack(NoisyBlock)
    with FakeTide(model, offload_everything) as tide:
        found = verify_fake(tide, model)
        assert found.equal and found.first_difference is None
        assert found.noise > 0 and 0 < found.largest_difference < 4 * found.noise
        assert "equal within noise: two runs without a plan differ by" in str(found)
        with faults.lost_order():
            wrong = verify_fake(tide, model)
    assert not wrong.equal
    assert wrong.largest_difference > 100 * wrong.noise > 0


class Deterministic(nn.Module):
    """Has a kernel whose bits vary, as torch says it, and notes when it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Gated()

    def forward(self, h_BTD: Tensor) -> Tensor:
        if torch.are_deterministic_algorithms_enabled():
            raise RuntimeError("cumsum_cuda_kernel does not have a deterministic implementation")
        return self.inner(h_BTD)


def test_without_a_deterministic_kernel_the_default_ones_run() -> None:
    model = stack(Deterministic)
    with FakeTide(model, offload_everything) as tide:
        found = verify_fake(tide, model)
    assert found.equal and not found.is_deterministic
    assert "(plain, default kernels)" in str(found)
    assert not torch.are_deterministic_algorithms_enabled()


class Scarce(nn.Module):
    """Runs out of memory where it keeps everything."""

    is_kept: Callable[[nn.Module], bool]

    def __init__(self) -> None:
        super().__init__()
        self.inner = Gated()

    def forward(self, h_BTD: Tensor) -> Tensor:
        if Scarce.is_kept(self):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")
        return self.inner(h_BTD)


def test_a_step_that_cannot_keep_everything_runs_under_checkpoints() -> None:
    model = stack(Scarce)
    with FakeTide(model, offload_everything) as tide:
        # Without a plan and without a checkpoint.
        Scarce.is_kept = lambda self: tide.runtime.is_paused and "forward" not in vars(self)
        found = verify_fake(tide, model)
        assert found.equal and found.reference == "recompute" and found.is_deterministic
        with pytest.raises(RuntimeStateError, match="out of memory under 'plain' too: CUDA out"):
            verify_fake(tide, model, reference="plain")
    assert all("forward" not in vars(block) for block in model.modules())


@pytest.mark.parametrize("make_block", [Gated, Views, Normalised, faults.Dropping])
@pytest.mark.parametrize("reference", ["plain", "recompute"])
def test_both_references_give_the_same_bits(
    make_block: Callable[[], nn.Module], reference: str
) -> None:
    model = stack(make_block)
    with FakeTide(model, offload_everything) as tide:
        found = verify_fake(tide, model, reference=reference, steps=3)
    assert found.equal and (found.noise, found.largest_difference) == (0.0, 0.0)
    assert found.reference == reference
    assert found.moved_out_bytes == found.moved_in_bytes > 0


class Seeing(nn.Module):
    """Notes whether ebbtide listens while it runs."""

    seen: list[bool]

    def __init__(self) -> None:
        super().__init__()
        self.inner = Gated()

    def forward(self, h_BTD: Tensor) -> Tensor:
        mode = _get_current_dispatch_mode()
        Seeing.seen.append(isinstance(mode, Tape))
        return self.inner(h_BTD)


def test_the_reference_runs_without_ebbtide() -> None:
    Seeing.seen = []
    model = stack(Seeing)
    with FakeTide(model, offload_everything) as tide:
        assert verify_fake(tide, model, steps=2).equal
    # Two references, a first planned step, and a decoy and a step.
    assert Seeing.seen == [False] * 2 * NUM_BLOCKS + [True] * 3 * NUM_BLOCKS


# -- what is put back ------------------------------------------------------------------------------


class Counting(nn.Module):
    """Writes to a parameter and a buffer in forward, and draws from torch and numpy.

    Not from Python's generator: what checks types in tests draws from that one, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inner = Normalised()
        self.steps = nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, h_BTD: Tensor) -> Tensor:
        with torch.no_grad():
            self.steps.add_(1)
        keep = float(numpy.random.rand()) + float(torch.rand(()))
        return self.inner(h_BTD) * keep


def test_all_is_as_before(tmp_path: Path) -> None:
    model = stack(Counting)
    with attach_here(model, "offload", tmp_path) as tide:
        feature_step(model, 0)
        blocks: Any = model
        blocks.blocks[1].eval()
        values = {n: t.detach().clone() for n, t in model.state_dict().items()}
        gradients = {
            name: (parameter.grad, parameter.grad.clone())
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }
        modes = [module.training for module in model.modules()]
        batch = features()
        drawn = torch.get_rng_state(), numpy.random.get_state()
        versions = [b._version for _, b in model.named_parameters()]
        found = tide.verify(batch, loss=square)
        assert torch.equal(torch.get_rng_state(), drawn[0])
        assert found.equal and found.moved_out_bytes > 0
        assert all(t.equal(values[n]) for n, t in model.state_dict().items())
        for name, parameter in model.named_parameters():
            if name in gradients:
                kept, value = gradients[name]
                assert parameter.grad is kept and kept.equal(value)
            else:
                assert parameter.grad is None
        assert [module.training for module in model.modules()] == modes
        assert str(numpy.random.get_state()) == str(drawn[1])
        # What no step writes to is not written to either: graphs that saved it stay valid.
        frozen = ["steps" not in name for name, _ in model.named_parameters()]
        now = [b._version for _, b in model.named_parameters()]
        assert all(n == v for n, v, f in zip(now, versions, frozen, strict=True) if f)


def test_training_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    wanted = train(seeded(gpt2), language_step)
    model = seeded(gpt2)
    with attach_here(model, "offload", tmp_path) as tide:
        ids = tokens()
        before = torch.get_rng_state()
        assert tide.verify({"input_ids": ids, "labels": ids}).equal
        assert torch.equal(torch.get_rng_state(), before)
        assert differences(train(model, language_step), wanted) == []


def test_a_step_that_raises_leaves_all_as_before(tmp_path: Path) -> None:
    model = stack(Counting)
    with attach_here(model, "offload", tmp_path) as tide:
        values = {n: t.detach().clone() for n, t in model.state_dict().items()}
        with pytest.raises(ValueError, match="gave a tensor of shape"):
            tide.verify(features())  # no loss
        assert all(t.equal(values[n]) for n, t in model.state_dict().items())
        assert all(p.grad is None for p in model.parameters())
        assert tide.runtime is not None
        assert not tide.runtime.is_paused and not tide.runtime.is_untimed


def test_an_optimizer_in_backward_is_refused(tmp_path: Path) -> None:
    model = stack()
    with attach_here(model, "offload", tmp_path) as tide:
        first = next(model.parameters())
        first.register_post_accumulate_grad_hook(lambda _: None)
        with pytest.raises(ModelError, match=r"blocks\.0\.norm\.weight has a hook that runs when"):
            tide.verify(features(), loss=square)


# -- arguments -------------------------------------------------------------------------------------


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack(Gated)

    def forward(self, h_BTD: Tensor, *, scale: float = 1.0) -> dict[str, Tensor]:
        return {"loss": self.stack(h_BTD).square().mean() * scale}


def test_a_batch_is_a_dict_a_tuple_or_the_only_argument(tmp_path: Path) -> None:
    model = seeded(TwoInputs)
    h_BTD = features()
    with attach_here(model, "offload", tmp_path) as tide:
        losses = [
            tide.verify(batch, steps=1).loss
            for batch in ({"h_BTD": h_BTD, "scale": 2.0}, (h_BTD,), [h_BTD], h_BTD)
        ]
    assert losses[1:] == [losses[1]] * 3
    assert losses[0] == pytest.approx(2 * losses[1])


def test_gradients_of_the_batch_are_compared_and_put_back(tmp_path: Path) -> None:
    model = stack()
    h_BTD = features().requires_grad_()
    with attach_here(model, "offload", tmp_path) as tide:
        found = tide.verify(h_BTD, loss=square, steps=1)
    assert h_BTD.grad is None
    num_parameters = len(list(model.parameters()))
    assert found.num_tensors == num_parameters + 3  # the loss, the batch and the random state


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"steps": 0}, ValueError, "steps is 0; compare 1 or more"),
        ({"reference": "plian"}, ValueError, "unknown reference 'plian'"),
        ({"loss": lambda output: output}, ValueError, r"loss\(output\) gave a tensor of shape"),  # pyright: ignore[reportUnknownLambdaType]
    ],
)
def test_wrong_arguments_are_refused(
    options: dict[str, Any], error: type[Exception], said: str, tmp_path: Path
) -> None:
    model = stack()
    with (
        attach_here(model, "offload", tmp_path) as tide,
        pytest.raises(error, match=said),
    ):
        arguments: dict[str, Any] = {"loss": square, **options}
        tide.verify(features(), **arguments)


def test_after_close_it_says_so(tmp_path: Path) -> None:
    model = stack()
    tide = attach_here(model, "offload", tmp_path)
    tide.close()
    with pytest.raises(RuntimeStateError, match=r"verify\(\) was called after close\(\)"):
        tide.verify(features(), loss=square)


def test_a_plan_that_does_nothing_is_equal_and_says_so() -> None:
    model = stack()
    with attach(model, "keep") as tide:
        found = tide.verify(features(), loss=square)
    assert found.equal and found.plan == "keep"
    assert "note: nothing was moved or run again" in str(found)
    model.eval()
    with attach(model, "recompute") as tide:
        assert "note: the model is in evaluation mode" in str(
            tide.verify(features(), loss=square, steps=1)
        )


def test_a_budget_has_its_plan_before_a_step_is_compared(tmp_path: Path) -> None:
    model = stack()
    with attach(model, budget="10GiB", disk=f"{tmp_path}:100MiB") as tide:
        found = tide.verify(features(), loss=square, steps=2)
        assert tide.plan is not None and found.plan == tide.plan.name
        assert found.equal


def test_what_is_not_finite_is_null_in_json() -> None:
    first = Difference(step=1, block="b", tensor="loss", largest_difference=math.nan)
    found = Verification(
        equal=False,
        largest_difference=math.inf,
        noise=0.0,
        first_difference=first,
        model="M",
        plan="offload",
        reference="plain",
        is_deterministic=True,
        is_training=True,
        num_steps=1,
        num_tensors=1,
        loss=math.nan,
        moved_out_bytes=0,
        moved_in_bytes=0,
        num_recomputed_ops=1,
    )
    record = json.loads(found.to_json())
    assert (record["equal"], record["largest_difference"], record["loss"]) == (False, None, None)
    assert record["first_difference"]["largest_difference"] is None
    assert "note: the loss is nan, which can hide what differs" in str(found)
