"""Small models for the tests: real architectures with tiny sizes, and blocks that do odd things."""

# B batch, T tokens, N tokens of all rows, D model width, F feed-forward width, H heads, K head
# width, E experts, C channels, Y rows, X columns

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

NUM_BLOCKS = 3
WIDTH = 32
NUM_HEADS = 4
VOCABULARY = 64
NUM_TOKENS = 16
BATCH = 2


def llama(*, attention: str = "sdpa", num_layers: int = NUM_BLOCKS) -> nn.Module:
    """Return a Llama whose key and value heads are half as many as its query heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    make_config: Any = LlamaConfig
    config = make_config(
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=num_layers,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_HEADS // 2,
        vocab_size=VOCABULARY,
        use_cache=False,
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config)


def gpt2(*, dropout: float = 0.1, attention: str = "sdpa") -> nn.Module:
    """Return a GPT-2 with dropout, and with one tensor for both embeddings."""
    from transformers import GPT2Config, GPT2LMHeadModel

    make_config: Any = GPT2Config
    config = make_config(
        n_embd=WIDTH,
        n_layer=NUM_BLOCKS,
        n_head=NUM_HEADS,
        n_positions=4 * NUM_TOKENS,
        vocab_size=VOCABULARY,
        bos_token_id=0,
        eos_token_id=0,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        resid_pdrop=dropout,
        use_cache=False,
        attn_implementation=attention,
    )
    model = GPT2LMHeadModel(config)
    assert model.lm_head.weight is model.transformer.wte.weight
    return model


def lora_llama() -> nn.Module:
    """Return a Llama with a frozen base and trainable adapters of rank 4."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.1)
    base: Any = llama()
    with warnings.catch_warnings():
        # peft asks transformers for a name that is deprecated there.
        warnings.simplefilter("ignore", FutureWarning)
        return get_peft_model(base, config)


def tokens(*shape: int, device: str | None = None) -> Tensor:
    """Return random token ids; drawn on the CPU, so equal on every device."""
    drawn = torch.randint(0, VOCABULARY, shape or (BATCH, NUM_TOKENS), device="cpu")
    return drawn.to(device or torch.get_default_device())


def features(*shape: int, device: str | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return random inputs of a `Stack`; drawn on the CPU, so equal on every device."""
    drawn = torch.randn(shape or (BATCH, NUM_TOKENS, WIDTH), device="cpu")
    return drawn.to(device or torch.get_default_device(), dtype)


class Stack(nn.Module):
    """A list of equal blocks, one after another."""

    def __init__(self, make_block: Callable[[], nn.Module], num_blocks: int = NUM_BLOCKS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make_block() for _ in range(num_blocks))

    def forward(self, h_BTD: Tensor) -> Tensor:
        for block in self.blocks:
            h_BTD = block(h_BTD)
        return h_BTD


class Gated(nn.Module):
    """A norm and a gated feed-forward with a residual: what most tests put in a stack."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, 2 * WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, h_BTD: Tensor) -> Tensor:
        x_BTD = self.norm(h_BTD)
        return h_BTD + self.down(functional.silu(self.gate(x_BTD)) * self.up(x_BTD))


class FusedAttention(nn.Module):
    """One product for query, key and value, taken apart by `narrow` or `chunk`."""

    def __init__(self, *, with_chunk: bool) -> None:
        super().__init__()
        self.with_chunk = with_chunk
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, h_BTD: Tensor) -> Tensor:
        fused_BTD = self.qkv(h_BTD)
        if self.with_chunk:
            parts = fused_BTD.chunk(3, dim=-1)
        else:
            parts = tuple(fused_BTD.narrow(-1, i * WIDTH, WIDTH) for i in range(3))
        q_BHTK, k_BHTK, v_BHTK = (p.unflatten(-1, (NUM_HEADS, -1)).transpose(1, 2) for p in parts)
        mixed_BHTK = functional.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)
        return h_BTD + self.out(mixed_BHTK.transpose(1, 2).flatten(2)) + 0.1 * parts[0].square()


class Views(nn.Module):
    """Saves slices with an offset and a step, a permuted tensor, an expanded one, a transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.randn(WIDTH, 1))

    def forward(self, h_BTD: Tensor) -> Tensor:
        up_BTF = self.up(h_BTD)
        sliced_BTD = up_BTF[:, 3:, ::2].square()
        shifted_BTD = functional.pad(sliced_BTD, (0, 0, 3, 0))
        permuted_DBT = up_BTF[..., :WIDTH].permute(2, 0, 1)
        swapped_BTD = (permuted_DBT.tanh() * permuted_DBT).permute(1, 2, 0)
        wide_BTD = up_BTF.mean(-1, keepdim=True).exp().expand_as(h_BTD)
        product_BTD = wide_BTD * swapped_BTD
        scaled_BDT = self.scale.tanh().expand(WIDTH, h_BTD.shape[1]) * product_BTD.mT
        return h_BTD + 0.1 * (self.down(shifted_BTD) + scaled_BDT.mT)


class Normalised(nn.Module):
    """Batch normalisation, whose operator writes its running statistics unannounced."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, h_BTD: Tensor) -> Tensor:
        x_BDT = self.norm(self.linear(h_BTD).mT)
        return h_BTD + functional.gelu(x_BDT).mT


class Structured(nn.Module):
    """Takes and returns tuples with a tensor, None, a dict of tensors and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Gated()
        self.side = nn.Linear(WIDTH, WIDTH)

    def forward(
        self, h_BTD: Tensor, *, extra: dict[str, Tensor] | None = None
    ) -> tuple[Tensor, None, dict[str, Tensor], int]:
        side_BTD = self.side(h_BTD).tanh()
        if extra is not None:
            side_BTD = side_BTD * extra["side"]
        return self.inner(h_BTD + side_BTD), None, {"side": side_BTD}, 7


class StructuredStack(nn.Module):
    """Passes the dict of each block on to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Structured() for _ in range(NUM_BLOCKS))

    def forward(self, h_BTD: Tensor) -> Tensor:
        extra: dict[str, Tensor] | None = None
        for block in self.blocks:
            h_BTD, nothing, extra, number = block(h_BTD, extra=extra)
            assert nothing is None and number == 7
        assert extra is not None
        return h_BTD + extra["side"]


class Branched(nn.Module):
    """A block that also returns a branch, which need not get into the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Gated()
        self.side = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, h_BTD: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner(h_BTD), self.side(h_BTD).exp().square()


class BranchedStack(nn.Module):
    """Returns its output and what the side branches of its blocks add up to."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Branched() for _ in range(NUM_BLOCKS))

    def forward(self, h_BTD: Tensor) -> tuple[Tensor, Tensor]:
        total = h_BTD.new_zeros(())
        for block in self.blocks:
            h_BTD, side_BTF = block(h_BTD)
            total = total + side_BTF.mean()
        return h_BTD, total


class SharedStack(nn.Module):
    """Blocks that have one parameter in common."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Gated() for _ in range(NUM_BLOCKS))
        first: Any = self.blocks[0]
        for block in self.blocks:
            block.up = first.up

    def forward(self, h_BTD: Tensor) -> Tensor:
        for block in self.blocks:
            h_BTD = block(h_BTD)
        return h_BTD


class Repeating(nn.Module):
    """Runs its only two blocks in turn, each twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Gated() for _ in range(2))

    def forward(self, h_BTD: Tensor) -> Tensor:
        for block in (*self.blocks, *self.blocks):
            h_BTD = block(h_BTD)
        return h_BTD


class CheckpointedStack(nn.Module):
    """Checkpoints each of its blocks as a whole, behind ebbtide's back."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Gated() for _ in range(NUM_BLOCKS))

    def forward(self, h_BTD: Tensor) -> Tensor:
        result: Any = self.first(h_BTD)
        for block in self.blocks:
            result = checkpoint(block, result, use_reentrant=self.use_reentrant)
        return result


class Checkpointed(nn.Module):
    """Checkpoints a part of itself."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.first = Gated()
        self.second = Gated()

    def forward(self, h_BTD: Tensor) -> Tensor:
        h_BTD = self.first(h_BTD)
        result: Any = checkpoint(self.second, h_BTD, use_reentrant=self.use_reentrant)
        return result.sin()


class ViewSaver(torch.autograd.Function):
    """Saves its input, and its backward returns a view of it: the gradient is `x` times sums."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x)
        return 0.5 * x.square()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        return x.view_as(x)


class Custom(nn.Module):
    """A custom autograd function between two products."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.second = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, h_BTD: Tensor) -> Tensor:
        # Small: the gradient does not depend on the loss, and would overshoot.
        x_BTF: Any = ViewSaver.apply(0.01 * self.first(h_BTD))
        return h_BTD + self.second(x_BTF.sigmoid())


class Numbers(nn.Module):
    """Computes in float64 and in complex numbers for a while."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, h_BTD: Tensor) -> Tensor:
        x_BTD = self.first(h_BTD)
        exact_BTD = (x_BTD.double().sin() * x_BTD.double()).flip(1).float()
        pairs = torch.view_as_complex(exact_BTD.unflatten(-1, (-1, 2)))
        turned = (pairs * torch.polar(pairs.abs(), pairs.real)).conj() * pairs
        spectrum = torch.fft.rfft(turned.imag.contiguous(), dim=1)
        again = torch.fft.irfft(spectrum * spectrum.conj(), n=h_BTD.shape[1], dim=1)
        wide_BTD = torch.cat((torch.view_as_real(turned).flatten(-2)[..., ::2], again), dim=-1)
        return h_BTD + 0.01 * self.second(wide_BTD.tanh())


class Router(nn.Module):
    """A mixture of experts: top-2 routing, gathers, `index_add_` and `scatter`."""

    def __init__(self, num_experts: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.choose = nn.Linear(WIDTH, num_experts)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_experts))

    def forward(self, h_BTD: Tensor) -> Tensor:
        x_ND = self.norm(h_BTD).flatten(0, 1)
        scores_NE = self.choose(x_ND).softmax(-1)
        top_N2, chosen_N2 = scores_NE.topk(2, dim=-1)
        gates_NE = torch.zeros_like(scores_NE).scatter(-1, chosen_N2, top_N2)
        mixed_ND = torch.zeros_like(x_ND)
        for index, expert in enumerate(self.experts):
            rows = (chosen_N2 == index).any(-1).nonzero().flatten()
            part_ND = functional.silu(expert(x_ND[rows])) * gates_NE[rows, index, None]
            mixed_ND.index_add_(0, rows, part_ND)
        return h_BTD + mixed_ND.view_as(h_BTD)


class Writing(nn.Module):
    """Writes in place wherever autograd allows it: activations, views, zeros, masks, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.second = nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, h_BTD: Tensor) -> Tensor:
        x_BTF = self.first(h_BTD).relu_()
        filled_BTF = torch.zeros_like(x_BTF)
        filled_BTF[..., ::2] = x_BTF[..., 1::2]
        filled_BTF[..., 1::2].add_(x_BTF[..., ::2].detach())
        y_BTF = (filled_BTF + x_BTF).masked_fill_(x_BTF > 2, 0.5)
        z_BTF = (2.0 * y_BTF).sigmoid_()
        self.get_buffer("seen").add_(z_BTF.detach().mean())
        h_BTD = h_BTD + self.second(z_BTF)
        h_BTD += 1.0
        return h_BTD


class Overwriting(nn.Module):
    """Writes to an activation after it was saved; with `is_legal`, to a copy of it."""

    def __init__(self, *, is_legal: bool) -> None:
        super().__init__()
        self.is_legal = is_legal
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, h_BTD: Tensor) -> Tensor:
        x_BTD = self.first(h_BTD).tanh()
        y_BTD = self.second(x_BTD)
        if self.is_legal:
            x_BTD = x_BTD.clone()
        x_BTD[:, 2:].add_(1.0)
        return x_BTD * y_BTD


class OverwritingStack(nn.Module):
    """Writes to the output of each block and to its input; with `is_legal`, to copies of them."""

    def __init__(self, *, is_legal: bool, writes_input: bool) -> None:
        super().__init__()
        self.is_legal = is_legal
        self.writes_input = writes_input
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(NUM_BLOCKS)
        )

    def forward(self, h_BTD: Tensor) -> Tensor:
        h_BTD = h_BTD.clone()
        for block in self.blocks:
            x_BTD = block(h_BTD)
            written_BTD = h_BTD if self.writes_input else x_BTD
            if self.is_legal:
                written_BTD = written_BTD.clone()
            written_BTD.add_(1.0)
            h_BTD = x_BTD * written_BTD if self.writes_input else written_BTD.sin()
        return h_BTD


class Shifted(nn.Module):
    """A block that does not save its input: what it starts with saves nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, h_BTD: Tensor) -> Tensor:
        return self.linear((h_BTD + self.bias).tanh()).tanh()


class ResidualStack(nn.Module):
    """Adds each block's output to the residual stream in place, which `Shifted` permits."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Shifted() for _ in range(NUM_BLOCKS))

    def forward(self, h_BTD: Tensor) -> Tensor:
        h_BTD = h_BTD.clone()
        for block in self.blocks:
            h_BTD += block(h_BTD)
        return h_BTD


class Spectral(nn.Module):
    """Weights that are computed anew in each forward, from buffers that it also writes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.second = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, h_BTD: Tensor) -> Tensor:
        return h_BTD + self.second(self.first(h_BTD).tanh())


class Remembering(nn.Module):
    """Adds the mean of a buffer that each training pass moves; adding saves neither of the two.

    Args:
        num_rows: Rows of the buffer.
        is_late: Write after reading, not before.
        is_saved: Multiply by the buffer's first row, so that autograd saves it.
    """

    def __init__(self, num_rows: int, *, is_late: bool, is_saved: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.is_late = is_late
        self.is_saved = is_saved
        self.seen: Tensor
        self.register_buffer("seen", torch.randn(num_rows, WIDTH))
        self.table = torch.randn(WIDTH)

    def forward(self, h_BTD: Tensor) -> Tensor:
        if not self.is_late:
            self._move(h_BTD)
        mean_D = self.seen.mean(0)
        x_BTD = (self.linear(h_BTD) + mean_D + self.table).tanh()
        if self.is_saved:
            x_BTD = x_BTD * self.seen[0]
        if self.is_late:
            self._move(h_BTD)
        return h_BTD + x_BTD

    @torch.no_grad()
    def _move(self, h_BTD: Tensor) -> None:
        self.seen.lerp_(h_BTD.mean((0, 1)).expand_as(self.seen), 0.1)


class InPlace(nn.Module):
    """Writes to its own input, which nobody saved before."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, h_BTD: Tensor) -> Tensor:
        if h_BTD.is_leaf:
            h_BTD = h_BTD.clone()
        h_BTD = h_BTD.mul_(1.1)
        h_BTD += 0.1
        return h_BTD + self.linear(h_BTD).tanh()


class Windows(nn.Module):
    """Saves overlapping windows, complex parts with their bits, and other odd layouts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.turn = nn.Parameter(0.1 * torch.randn(WIDTH, WIDTH, dtype=torch.complex64))

    def forward(self, h_BTD: Tensor) -> Tensor:
        x_BTD = self.linear(h_BTD)
        windows_BTD = x_BTD.unfold(1, 4, 1).square().sum(-1)
        turned_BTD = torch.complex(x_BTD, h_BTD) @ self.turn
        negated_BTD = turned_BTD.conj().imag * x_BTD
        parts_BTD = torch.view_as_real(turned_BTD)[..., 1].tanh() * turned_BTD.real
        mean_B1D = windows_BTD.mean(1, keepdim=True)
        return h_BTD + 0.05 * (mean_B1D + negated_BTD + parts_BTD)


class Convolution(nn.Module):
    """Convolutions with two kinds of norms and an activation in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.norms = nn.ModuleList((nn.BatchNorm2d(8), nn.GroupNorm(2, 8)))
        self.activation = nn.ReLU(inplace=True)

    def forward(self, h_BCYX: Tensor) -> Tensor:
        x_BCYX = self.activation(self.norms[0](self.first(h_BCYX)))
        x_BCYX = self.norms[1](self.second(x_BCYX))
        x_BCYX += h_BCYX
        return self.activation(x_BCYX)


class Weighed(nn.Module):
    """Multi-head attention that returns its weights, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, NUM_HEADS, dropout=0.1, batch_first=True)

    def forward(self, h_BTD: Tensor) -> Tensor:
        x_BTD, weights_BTT = self.attention(h_BTD, h_BTD, h_BTD, need_weights=True)
        return h_BTD + x_BTD * weights_BTT.mean()


class Special(nn.Parameter):
    """A parameter of a class of one's own."""


class Subclassed(nn.Module):
    """Computes with such a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Special(0.1 * torch.randn(WIDTH, WIDTH))
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, h_BTD: Tensor) -> Tensor:
        return h_BTD + (h_BTD @ self.weight.t()).tanh() * self.scale.exp()


class Recurrent(nn.Module):
    """Recurrent networks, which on the CPU are long chains of small operators."""

    def __init__(self) -> None:
        super().__init__()
        self.long = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.gated = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, h_BTD: Tensor) -> Tensor:
        return h_BTD + self.gated(self.long(h_BTD)[0])[0]


class Failing(nn.Module):
    """Raises an `error` in the middle of its forward, if it is given the class of one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Gated()
        self.second = Gated()
        self.error: type[BaseException] | None = None

    def forward(self, h_BTD: Tensor) -> Tensor:
        h_BTD = self.first(h_BTD)
        if self.error is not None:
            raise self.error("told to fail")
        return self.second(h_BTD)
