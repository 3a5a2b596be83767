"""Train a pipeline of stages, several micro-batches a step: one rank of it."""

# B batch, T tokens, D model width

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    ScheduleGPipe,
)

from tests.torch.distributed.ranks import SOME_PLANS, Case, rank_of, run_case
from tests.torch.models import NUM_TOKENS, WIDTH, Gated, Stack, features

NUM_MICRO_BATCHES = 4
BATCH = 2 * NUM_MICRO_BATCHES


class Stages(nn.Module):
    """The stages of this rank, and the schedule that runs them."""

    def __init__(self, kind: type[PipelineScheduleSingle] | type[PipelineScheduleMulti]) -> None:
        super().__init__()
        rank, num_ranks = distributed.get_rank(), distributed.get_world_size()
        is_interleaved = issubclass(kind, PipelineScheduleMulti)
        num_local = 2 if is_interleaved else 1
        torch.manual_seed(7 + rank)
        self.parts = nn.ModuleList(Stack(Gated) for _ in range(num_local))
        stages: Any = [
            PipelineStage(part, rank + i * num_ranks, num_local * num_ranks, torch.device("cpu"))
            for i, part in enumerate(self.parts)
        ]
        given: Any = stages if is_interleaved else stages[0]
        self.schedule: Any = kind(given, n_microbatches=NUM_MICRO_BATCHES, loss_fn=_loss)

    def forward(self, *_: Any) -> Tensor:
        raise AssertionError("the schedule runs the parts")


def _loss(h_BTD: Tensor, target_BTD: Tensor) -> Tensor:
    return (h_BTD - target_BTD).square().mean()


def step(model: nn.Module, index: int) -> Tensor:
    """Run one step of the schedule: all micro-batches forward and backward."""
    torch.manual_seed(1000 * index)
    assert isinstance(model, Stages)
    h_BTD, target_BTD = features(BATCH, NUM_TOKENS, WIDTH), features(BATCH, NUM_TOKENS, WIDTH)
    losses: list[Tensor] = []
    if distributed.get_rank() == 0:
        model.schedule.step(h_BTD)
        return torch.zeros(())  # the last stage has the loss
    model.schedule.step(target=target_BTD, losses=losses)
    return torch.stack(losses).mean()


def parts_of(model: nn.Module) -> tuple[nn.Module, ...]:
    """Return the stages of this rank, each to be attached on its own."""
    return tuple(model.get_submodule("parts").children())


CASES = (
    Case(
        name="1F1B", build=lambda: Stages(Schedule1F1B), step=step, inner=parts_of, has_budget=True
    ),
    Case(
        name="GPipe",
        build=lambda: Stages(ScheduleGPipe),
        step=step,
        inner=parts_of,
        plans=SOME_PLANS,
        has_budget=True,
    ),
    Case(
        name="interleaved",
        build=lambda: Stages(ScheduleInterleaved1F1B),
        step=step,
        inner=parts_of,
    ),
    Case(
        name="interleaved, both stages in one",
        build=lambda: Stages(ScheduleInterleaved1F1B),
        step=step,
        options={"blocks": ["parts.0.blocks.*", "parts.1.blocks.*"]},
        plans=SOME_PLANS,
    ),
)


if __name__ == "__main__":
    with rank_of():
        for case in CASES:
            run_case(case)
