"""Train replicas of a small Llama with DistributedDataParallel, under one plan for all ranks.

    torchrun --nproc-per-node 2 examples/train_ddp.py

Random weights and tokens, so that nothing has to be downloaded.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from ebbtide.torch import attach


def main() -> None:
    parser = argparse.ArgumentParser()
    has_gpu = torch.cuda.is_available()
    # A GPU's matrix library alone takes more than this model needs on a CPU.
    parser.add_argument("--budget", default="50%" if has_gpu else "5 MiB")
    parser.add_argument("--steps", type=int, default=6)
    arguments = parser.parse_args()
    distributed.init_process_group("nccl" if has_gpu else "gloo")
    rank = distributed.get_rank()
    device = torch.device("cpu")
    if has_gpu:
        device = torch.device("cuda", distributed.get_node_local_rank())
        torch.cuda.set_device(device)
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
    model = DistributedDataParallel(LlamaForCausalLM(config).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + rank)
    ids = torch.randint(0, 256, (2, 128), device=device)

    # The ranks of this group run the same blocks, and get one plan for the worst of them.
    group = distributed.group.WORLD
    # Host memory is a CPU's own memory: there, activations go to a file. Ranks share its size.
    tier = {} if has_gpu else {"disk": f"{tempfile.gettempdir()}:1GiB"}
    tide = attach(model.module, budget=arguments.budget, ranks=group, min_bytes=1024, **tier)
    for step in range(arguments.steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        shown = loss.detach().clone()
        distributed.all_reduce(shown)
        if rank == 0:
            print(f"step {step}: loss {shown.item() / distributed.get_world_size():.6f}")
    if rank == 0:
        print(tide.report())
    tide.close()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
