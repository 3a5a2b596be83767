from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from ebbtide.compare.strategies import make_strategy

CPU = torch.device("cpu")
IDS = torch.arange(32).view(1, 32)


class Tally(TorchDispatchMode):
    """Counts the operators that run inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        vocab_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def train(model: LlamaForCausalLM, name: str) -> Counter[str]:
    """Take one step under a strategy; return how often each operator ran in backward."""
    model.zero_grad()
    with make_strategy(name, host=None, disk=None).apply(model, CPU):
        loss = model(input_ids=IDS, labels=IDS).loss
        tally = Tally()
        with tally:
            loss.backward()
    return tally.counts


def list_gradients(model: LlamaForCausalLM) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("name", ["torch-sac:op", "torch-sac:2", "torch-sac:1"])
def test_gradients_are_those_of_keep(name: str) -> None:
    model = make_model()
    train(model, "keep")
    expected = list_gradients(model)
    train(model, name)
    found = list_gradients(model)
    assert len(found) == len(expected) == len(list(model.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_every_second_product_is_recomputed_and_attention_is_not() -> None:
    model = make_model()
    mm, norm = "aten.mm.default", "aten.rsqrt.default"
    attention = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    kept, selected, whole = (train(model, name) for name in ("keep", "torch-sac:op", "torch-sac:1"))
    # A block has 7 products: q, k, v, o, gate, up, down; the 2nd, 4th and 6th run again. The
    # last one's result is needed by none in backward, so whole recomputation ends before it.
    assert selected[mm] - kept[mm] == 4 * 3
    assert whole[mm] - kept[mm] == 4 * 6
    assert (selected[attention], whole[attention]) == (0, 4)
    assert selected[norm] - kept[norm] == whole[norm] - kept[norm] == 4 * 2


def test_of_every_second_block_the_norms_are_recomputed() -> None:
    model = make_model()
    norm = "aten.rsqrt.default"
    kept, halved = train(model, "keep"), train(model, "torch-sac:2")
    assert halved[norm] - kept[norm] == 2 * 2


def test_blocks_have_their_own_forward_again() -> None:
    model = make_model()
    train(model, "torch-sac:op")
    assert not any("forward" in vars(module) for module in model.modules())


def test_evaluation_is_not_checkpointed() -> None:
    model = make_model()
    with make_strategy("torch-sac:op", host=None, disk=None).apply(model, CPU), torch.no_grad():
        under = model(input_ids=IDS).logits
    with torch.no_grad():
        assert torch.equal(under, model(input_ids=IDS).logits)
