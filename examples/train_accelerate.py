"""Train a small Llama in an Accelerate loop, with ebbtide's two lines.

    python examples/train_accelerate.py
    accelerate launch examples/train_accelerate.py

Random weights and tokens, so that nothing has to be downloaded.
"""

from __future__ import annotations

import tempfile

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from ebbtide.torch import attach

NUM_STEPS = 6


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    one_text = torch.randint(0, 256, (128,))
    loader = DataLoader([one_text] * (4 * NUM_STEPS), batch_size=2)

    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    # Host memory is a CPU's own memory: there, activations go to a file.
    tier = {"disk": f"{tempfile.gettempdir()}:1GiB"} if accelerator.device.type == "cpu" else {}
    # After prepare(), when the model is on its device.
    tide = attach(accelerator.unwrap_model(model), "offload", min_bytes=1024, **tier)
    for step, ids in enumerate(loader):
        with accelerator.accumulate(model):
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if step < NUM_STEPS:
            accelerator.print(f"step {step}: loss {loss.item():.4f}")
    accelerator.print(tide.report())
    tide.close()


if __name__ == "__main__":
    main()
