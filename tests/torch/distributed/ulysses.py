"""Train models whose tokens are spread over the ranks, with collectives inside each block."""

# B batch, T tokens of this rank, A tokens of all ranks, D model width, H heads, G heads of this
# rank, K head width, R ranks

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed.nn
from torch import Tensor, distributed, nn
from torch.distributed import _functional_collectives as functional_collectives
from torch.nn import functional

from tests.torch.distributed.ranks import SOME_PLANS, Case, rank_of, run_case
from tests.torch.models import NUM_HEADS, WIDTH, Stack, features


def exchange_in_place(parts: Tensor) -> Tensor:
    """Send each rank its part, by the collective that autograd knows as a function of its own."""
    received: Any = torch.distributed.nn.functional.all_to_all_single(
        torch.empty_like(parts), parts
    )
    return received


def exchange(parts: Tensor) -> Tensor:
    """Send each rank its part, by a functional collective, which is an operator of torch."""
    world: Any = distributed.group.WORLD
    return functional_collectives.all_to_all_single_autograd(parts, None, None, world)


class Ulysses(nn.Module):
    """Attention over all tokens: each rank has its tokens of all heads, then its heads of all.

    Both ways tensors are exchanged between all ranks, in forward and in backward.
    """

    def __init__(self, by_function: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.exchange = exchange if by_function else exchange_in_place

    def to_heads(self, x_BTHK: Tensor) -> Tensor:
        """From tokens of this rank to heads of this rank."""
        num_ranks = distributed.get_world_size()
        x_RBTGK = torch.stack(x_BTHK.chunk(num_ranks, dim=2))
        return torch.cat(list(self.exchange(x_RBTGK)), dim=1).transpose(1, 2)

    def to_tokens(self, x_BGAK: Tensor) -> Tensor:
        """The way back."""
        num_ranks = distributed.get_world_size()
        x_RBTGK = torch.stack(x_BGAK.transpose(1, 2).chunk(num_ranks, dim=1))
        return torch.cat(list(self.exchange(x_RBTGK)), dim=2)

    def forward(self, h_BTD: Tensor) -> Tensor:
        batch, num_tokens, _ = h_BTD.shape
        shape = (batch, num_tokens, NUM_HEADS, WIDTH // NUM_HEADS)
        q, k, v = (x.reshape(shape) for x in self.qkv(self.norm(h_BTD)).chunk(3, dim=-1))
        o_BGAK = functional.scaled_dot_product_attention(
            self.to_heads(q), self.to_heads(k), self.to_heads(v), is_causal=True
        )
        return h_BTD + self.out(self.to_tokens(o_BGAK).reshape(h_BTD.shape))


def step(model: nn.Module, index: int) -> Tensor:
    """Train towards small outputs, each rank on tokens of its own."""
    torch.manual_seed(1000 * index + distributed.get_rank())
    loss = model(features()).square().mean()
    loss.backward()
    return loss


def main() -> None:
    """Run all cases."""
    run_case(
        Case(
            name="functional collectives",
            build=lambda: Stack(lambda: Ulysses(by_function=True), num_blocks=4),
            step=step,
            has_budget=True,
        )
    )
    run_case(
        Case(
            name="collectives of torch.distributed.nn",
            build=lambda: Stack(lambda: Ulysses(by_function=False), num_blocks=4),
            step=step,
            plans=SOME_PLANS,
        )
    )


if __name__ == "__main__":
    with rank_of(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        main()
