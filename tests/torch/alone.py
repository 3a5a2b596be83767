"""Attach where torch has no `torch.distributed`, as some builds for one machine have none.

Run by `test_ranks.py` in a process of its own, since it takes that out of an installed torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import torch


def take_distributed_out() -> None:
    """Leave of `torch.distributed` what a build without it has."""
    build: Any = import_module("torch._C")
    del build._c10d_init
    for name in [n for n in sys.modules if n.startswith("torch.distributed")]:
        del sys.modules[name]
    sys.modules["torch._C._distributed_c10d"] = None  # pyright: ignore[reportArgumentType]
    torch.distributed = import_module("torch.distributed")
    assert not torch.distributed.is_available()
    assert not hasattr(torch.distributed, "init_process_group")


def main() -> None:
    """Train a stack under a plan and under a budget, and say what was done."""
    take_distributed_out()
    # Only now: what is tested is that these can be imported.
    attach: Any = import_module("ebbtide.torch").attach
    functional, nn = torch.nn.functional, torch.nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.narrow = nn.Linear(32, 64), nn.Linear(64, 32)

        def forward(self, h: torch.Tensor) -> torch.Tensor:
            return h + self.narrow(functional.silu(self.wide(h)))

    def train(**arguments: Any) -> tuple[list[torch.Tensor], Any]:
        torch.manual_seed(0)
        model = nn.Sequential(*(Block() for _ in range(3)))
        tide = attach(model, blocks="*", **arguments) if arguments else None
        found = list[torch.Tensor]()
        for _ in range(4):
            model.zero_grad()
            model(torch.ones(2, 16, 32)).square().mean().backward()
            found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        return found, tide

    wanted, _ = train()
    for arguments in ({"plan": "recompute"}, {"budget": "1GiB"}):
        found, tide = train(**arguments)
        assert len(found) == 48
        assert all(map(torch.equal, found, wanted))
        print(arguments, tide.plan.name, tide.statistics().num_recomputed_ops > 0)
        tide.close()
    try:
        train(budget="1GiB", ranks="all")
    except ValueError as error:
        print(error)


if __name__ == "__main__":
    main()
