"""Train GPT-2 on a text of your own, with ebbtide's two lines in an ordinary loop.

    python examples/train_gpt2.py --tiny --budget 8MiB    # a small model, seconds on a CPU
    python examples/train_gpt2.py --budget 8GiB           # 124M parameters, 8192 tokens, a GPU

Random weights, and bytes as tokens, so that nothing has to be downloaded.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from ebbtide.torch import attach


def main() -> None:
    parser = argparse.ArgumentParser(description="Train GPT-2 with ebbtide.")
    parser.add_argument("--tiny", action="store_true", help="4 layers, width 64, 256 tokens")
    parser.add_argument("--text", type=Path, default=Path(__file__), help="default: this file")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--budget", default="40GiB", help="most device memory of a step")
    options = parser.parse_args()
    shape = {"n_embd": 64, "n_layer": 4, "n_head": 4} if options.tiny else {}
    num_tokens = 256 if options.tiny else 8192
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # Host memory is a CPU's own memory: there, activations go to a file.
    disk = f"{tempfile.gettempdir()}:8GiB" if device == "cpu" else None

    torch.manual_seed(0)
    config = GPT2Config(
        **shape, n_positions=num_tokens, vocab_size=256, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = torch.frombuffer(bytearray(options.text.read_bytes()), dtype=torch.uint8).long()

    tide = attach(model, budget=options.budget, disk=disk)
    for step in range(options.steps):
        start = torch.randint(0, max(1, len(text) - num_tokens), ())
        ids = text[start : start + num_tokens].unsqueeze(0).to(device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")
    print(tide.report())
    tide.close()


if __name__ == "__main__":
    main()
