"""Train a small Llama on an engine of DeepSpeed, under the plan that its configuration asks for.

    torchrun --nproc-per-node 2 examples/train_deepspeed.py --stage 3

Random weights and tokens, so that nothing has to be downloaded.
"""

from __future__ import annotations

import argparse
import tempfile

import deepspeed
import torch
from torch import distributed
from transformers import LlamaConfig, LlamaForCausalLM

from ebbtide.integrations.deepspeed import attach_arguments
from ebbtide.torch import attach


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=3)
    parser.add_argument("--steps", type=int, default=6)
    arguments = parser.parse_args()
    deepspeed.init_distributed()
    rank = distributed.get_rank()
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        # A model that is smaller than what stage 3 keeps gathered by default.
        "zero_optimization": {
            "stage": arguments.stage,
            "stage3_param_persistence_threshold": 1000,
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
        },
        "zero_allow_untested_optimizer": True,
        # Not calls of DeepSpeed's checkpoint function, but ebbtide does what this asks for.
        "activation_checkpointing": {"cpu_checkpointing": True},
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    torch.manual_seed(1 + rank)
    ids = torch.randint(0, 256, (2, 128), device=engine.device)

    # Host memory is a CPU's own memory: there, activations go to a file. Ranks share its size.
    has_gpu = engine.device.type == "cuda"
    tier = {} if has_gpu else {"disk": f"{tempfile.gettempdir()}:1GiB"}
    tide = attach(engine.module, **attach_arguments(settings, min_bytes=1024, **tier))
    for step in range(arguments.steps):
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        shown = loss.detach().clone()
        distributed.all_reduce(shown)
        if rank == 0:
            print(f"step {step}: loss {shown.item() / distributed.get_world_size():.6f}")
    if rank == 0:
        print(tide.report())
    tide.close()
    engine.destroy()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
