"""Train models on engines of DeepSpeed: one rank of it."""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.multiprocessing.reductions import StorageWeakRef as StorageRef

from tests.torch.distributed.ranks import SOME_PLANS, rank_of, say
from tests.torch.models import llama, tokens
from tests.torch.training import NUM_STEPS, Trace, attach_here, differences, learn_at_once, seeded

os.environ["DS_ACCELERATOR"] = "cpu"
os.environ.setdefault("LOCAL_RANK", sys.argv[1])

STAGES: dict[str, dict[str, Any]] = {
    "stage 2": {"stage": 2},
    "stage 3": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        # By default a model as small as this one stays gathered.
        "stage3_max_live_parameters": 0,
        "stage3_max_reuse_distance": 0,
        "stage3_prefetch_bucket_size": 0,
    },
    "stage 3, gathered ahead": {"stage": 3},
}


def num_collectives() -> int:
    """Return how many collectives this rank has started, in all groups."""
    torch_distributed: Any = import_module("torch.distributed.distributed_c10d")
    groups = torch_distributed._world.pg_map
    return sum(group._get_sequence_number_for_group() for group in groups)


class Gathered:
    """Weights that are gathered as a model runs, and whether they are still there."""

    def __init__(self, model: nn.Module) -> None:
        self._found: list[StorageRef] = []
        for name, module in model.named_modules():
            if name.endswith("gate_proj"):
                module.register_forward_hook(self._note)

    def _note(self, module: nn.Module, *_: Any) -> None:
        storage = module.get_parameter("weight").untyped_storage()
        assert storage.nbytes() > 0
        self._found.append(StorageRef(storage))

    def count_left(self) -> int:
        """Return how many are left of those since the last call."""
        left = sum(not found.expired() for found in self._found)
        self._found.clear()
        return left


def train(stage: dict[str, Any], plan: str | None) -> tuple[Trace, list[int], list[int], Any]:
    """Train on an engine; returns gradients, collectives, gathered weights left, and a tide."""
    deepspeed: Any = import_module("deepspeed")
    model = seeded(llama)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": stage,
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    engine: Any = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    gathered, trace = Gathered(engine.module), Trace()
    collectives, left = list[int](), list[int]()
    with tempfile.TemporaryDirectory() as folder, learn_at_once():
        tide = None if plan is None else attach_here(engine.module, plan, folder)
        for index in range(NUM_STEPS):
            if tide is not None and index == NUM_STEPS - 1:
                tide.reset_statistics()
            torch.manual_seed(1000 * index + distributed.get_rank())
            ids = tokens()
            before = num_collectives()
            loss: Tensor = engine(input_ids=ids, labels=ids).loss
            left.append(gathered.count_left())
            engine.backward(loss)
            collectives.append(num_collectives() - before)
            trace.add(f"{index}: loss", loss)
            for name, parameter in engine.module.named_parameters():
                # Of a replica whose gradients are spread, a rank has some alone.
                gradient = deepspeed.utils.safe_get_full_grad(parameter)
                if gradient is not None:
                    trace.add(f"{index}: gradient of {name}", gradient)
            engine.step()
        if tide is not None:
            tide.close()
    engine.destroy()
    return trace, collectives, left, tide


def main() -> None:
    """Run all stages, plain and under each plan."""
    for name, stage in STAGES.items():
        wanted, wanted_collectives, wanted_left, _ = train(stage, None)
        for plan in SOME_PLANS:
            trace, collectives, left, tide = train(stage, plan)
            counts = tide.statistics()
            say(
                case=name,
                plan=plan,
                different=differences(trace, wanted),
                num_compared=len(wanted.tensors),
                collectives=collectives,
                wanted_collectives=wanted_collectives,
                left=left,
                wanted_left=wanted_left,
                planned_bytes=tide.plan.disk_bytes,
                moved_out_bytes=counts.moved_out_bytes,
                moved_in_bytes=counts.moved_in_bytes,
                num_recomputed_ops=counts.num_recomputed_ops,
                not_understood=[reason for reason, _ in counts.num_kept_not_understood],
            )


if __name__ == "__main__":
    with rank_of(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DeepSpeed calls what torch deprecates
        import_module("deepspeed").init_distributed("gloo")
        main()
