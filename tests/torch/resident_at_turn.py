"""A program: what a process holds where the turn of a step begins, with and without giving back.

    python3 tests/torch/resident_at_turn.py FOLDER

Prints the bytes of its resident set there, without and with, each above what it was before the
training, the bytes that a step evicted, and whether all gradients have the bits of plain training.
"""

from __future__ import annotations

import gc
import json
import os
import sys

import torch
from torch import Tensor, nn

from ebbtide.torch import attach, maker

NUM_TOKENS, WIDTH, NUM_BLOCKS = 8192, 128, 8  # an activation is 4 MiB, of the heap
DISK = f"{sys.argv[1]}:1GiB"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, h_TD: Tensor) -> Tensor:
        return h_TD + self.second(self.first(h_TD).tanh())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.at_turn_bytes = 0

    def forward(self, h_TD: Tensor) -> Tensor:
        for block in self.blocks:
            h_TD = block(h_TD)
        self.at_turn_bytes = resident_bytes()
        return h_TD.square().mean()


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def gradients(model: Model, features_TD: Tensor) -> list[Tensor]:
    model.zero_grad(set_to_none=False)
    model(features_TD).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, features_TD = Model(), torch.randn(NUM_TOKENS, WIDTH)
    wanted = gradients(model, features_TD)
    found: list[int] = []
    is_equal, evicted_bytes = True, 0
    give_back = maker.find_trim
    for is_given_back in (False, True):
        maker.find_trim = give_back if is_given_back else lambda: None
        trim = give_back()
        assert trim is not None
        gc.collect()
        trim()  # both start from the same heap
        before_bytes = resident_bytes()
        with attach(model, "offload", disk=DISK) as tide:
            for _ in range(4):
                tide.reset_statistics()
                got = gradients(model, features_TD)
                is_equal = is_equal and all(map(torch.equal, got, wanted))
            evicted_bytes = tide.statistics().disk.moved_out_bytes
        found.append(model.at_turn_bytes - before_bytes)
    print(json.dumps([*found, evicted_bytes, is_equal]))


if __name__ == "__main__":
    main()
