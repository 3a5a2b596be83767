from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from ebbtide.compare import loss as loss_module
from ebbtide.compare.loss import LossKind, chunked_loss, describe_loss, find_chunked_loss
from ebbtide.compare.meter import ProcessMeter, is_allocated_known
from ebbtide.planner.advice import CHUNKED_LOSS
from ebbtide.torch import attach

CPU = torch.device("cpu")
VOCABULARY = 4096
IDS = torch.arange(2 * 300).remainder(251).view(2, 300)

needs_torch = pytest.mark.skipif(
    not hasattr(torch.nn, "LinearCrossEntropyOptions"), reason="needs torch's own chunked loss"
)


def make_llama() -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def make_gpt2() -> PreTrainedModel:
    """A head that shares its weight with the embedding."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=32,
        n_layer=2,
        n_head=2,
        vocab_size=VOCABULARY,
        use_cache=False,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return GPT2LMHeadModel(config).train()


def take_step(model: PreTrainedModel) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), gradients


@needs_torch
@pytest.mark.parametrize("make", [make_llama, make_gpt2])
def test_the_chunked_loss_is_the_plain_one(make: Any) -> None:
    model = make()
    plain, expected = take_step(model)
    names = [name for name, _ in model.named_parameters()]
    with chunked_loss(model, LossKind.TORCH):
        assert [name for name, _ in model.named_parameters()] == names
        chunked, found = take_step(model)
    torch.testing.assert_close(chunked, plain)
    assert found.keys() == expected.keys() and len(found) == len(names)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)
    again, gradients = take_step(model)
    assert torch.equal(again, plain)
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)


@needs_torch
def test_the_logits_of_all_tokens_are_never_made() -> None:
    model = make_llama()
    logits_elements = IDS.numel() * VOCABULARY
    with chunked_loss(model, LossKind.TORCH):
        chunked = count_largest_elements(model)
    assert count_largest_elements(model) >= logits_elements
    assert chunked <= logits_elements // 8


def count_largest_elements(model: PreTrainedModel) -> int:
    """Elements of the largest tensor that any operator of one step returns."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        num_elements = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            for part in result if isinstance(result, tuple | list) else (result,):
                if isinstance(part, torch.Tensor):
                    self.num_elements = max(self.num_elements, part.numel())
            return result

    with Largest() as largest:
        take_step(model)
    return largest.num_elements


@needs_torch
@pytest.mark.skipif(not is_allocated_known(), reason="needs a malloc that tells")
def test_the_step_s_peak_falls_by_more_than_the_logits() -> None:
    model = make_llama()
    peaks: list[int] = []
    for kind in (LossKind.PLAIN, LossKind.TORCH):
        meter = ProcessMeter()
        with chunked_loss(model, kind):
            take_step(model)
            meter.reset()
            with meter.watch():
                for _ in range(5):
                    take_step(model)
        peaks.append(meter.read().peak_bytes)
    assert peaks[0] - peaks[1] >= IDS.numel() * VOCABULARY * 4


@needs_torch
def test_plans_keep_the_bits_of_keep_under_the_chunked_loss(tmp_path: Path) -> None:
    model = make_llama()
    with chunked_loss(model, LossKind.TORCH):
        kept, expected = take_step(model)
        for plan in ("recompute", "balanced"):
            disk = None if plan == "recompute" else f"{tmp_path}:1GiB"
            with attach(model, plan=plan, disk=disk, min_bytes=1024) as tide:
                for _ in range(3):
                    loss, found = take_step(model)
                    assert torch.equal(loss, kept)
                    assert all(torch.equal(found[name], expected[name]) for name in expected)
                assert (tide.statistics().moved_out_bytes > 0) == (plan == "balanced")


def test_the_report_names_the_libraries_where_logits_hold_the_peak(tmp_path: Path) -> None:
    model = make_llama()
    told = "beyond weights, gradients and optimizer state, and no plan lowers that: " + CHUNKED_LOSS
    with attach(model, budget="1GiB", disk=f"{tmp_path}:1GiB") as tide:
        for _ in range(3):
            take_step(model)
        assert told in tide.report()


def test_liger_gets_hidden_states_weight_and_shifted_labels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []

    class Fused:
        def __init__(self, ignore_index: int) -> None:
            self.ignore_index = ignore_index

        def __call__(self, weight: Any, hidden: Any, targets: Any, bias: Any) -> Any:
            asked.append((weight, tuple(hidden.shape), targets, bias, self.ignore_index))
            return torch.nn.functional.cross_entropy(hidden @ weight.T, targets)

    module = type("module", (), {"LigerFusedLinearCrossEntropyLoss": Fused})
    monkeypatch.setattr(loss_module, "import_module", lambda name: module)
    model = make_llama()
    plain, expected = take_step(model)
    with chunked_loss(model, LossKind.LIGER):
        fused, found = take_step(model)
    torch.testing.assert_close(fused, plain)
    assert all(torch.allclose(found[n], expected[n], rtol=1e-4, atol=1e-6) for n in expected)
    weight, shape, targets, bias, ignored = asked[0]
    assert weight is model.get_parameter("lm_head.weight")
    assert (shape, bias, ignored) == ((2 * 300, 32), None, -100)
    assert targets.view(2, 300)[:, :-1].equal(IDS[:, 1:])
    assert targets.view(2, 300)[:, -1].tolist() == [-100, -100]


@needs_torch
def test_a_model_that_changes_its_logits_is_refused_and_left_as_it_was() -> None:
    torch.manual_seed(0)
    config = Gemma2Config(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        head_dim=16,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=256,
        final_logit_softcapping=0.01,
        use_cache=False,
    )
    model = Gemma2ForCausalLM(config)
    head = model.get_output_embeddings()
    with (
        pytest.raises(ValueError, match=r"--chunked-loss: Gemma2ForCausalLM .* leave it out"),
        chunked_loss(model, LossKind.TORCH),
    ):
        pass
    assert model.get_output_embeddings() is head


def test_liger_is_taken_on_a_gpu_and_torch_s_own_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn, "LinearCrossEntropyOptions", object(), raising=False)
    monkeypatch.setattr(loss_module, "find_spec", lambda name: object())
    assert find_chunked_loss(torch.device("cuda")) is LossKind.LIGER
    assert find_chunked_loss(CPU) is LossKind.TORCH
    monkeypatch.setattr(
        loss_module, "find_spec", lambda name: None if name == "triton" else object()
    )
    assert find_chunked_loss(torch.device("cuda")) is LossKind.TORCH


@pytest.mark.parametrize(
    ("device", "command"),
    [("cuda", "pip install liger-kernel"), ("cpu", "pip install torch==2.13.0")],
)
def test_without_a_chunked_loss_the_command_that_installs_one_is_named(
    device: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch.nn, "LinearCrossEntropyOptions", raising=False)
    monkeypatch.setattr(loss_module, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=f"has no chunked loss of its own, .*`{command}` brings"):
        find_chunked_loss(torch.device(device))


def test_every_kind_is_described() -> None:
    assert [describe_loss(kind) for kind in LossKind] == [
        "the model's own, on the logits of all tokens",
        "in chunks, Liger's fused linear cross-entropy",
        "in chunks, torch's linear_cross_entropy",
    ]
