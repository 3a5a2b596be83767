"""Train a small Llama in Lightning, with ebbtide's callback.

    python examples/train_lightning.py

Random weights and tokens, so that nothing has to be downloaded.
"""

from __future__ import annotations

import tempfile

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from ebbtide.integrations.lightning import EbbtideCallback


class Language(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(
            hidden_size=64,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=256,
        )
        self.model = LlamaForCausalLM(config)

    def training_step(self, ids: Tensor, index: int) -> Tensor:
        loss = self.model(input_ids=ids, labels=ids).loss
        print(f"step {index}: loss {loss.item():.4f}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    torch.manual_seed(0)
    has_gpu = torch.cuda.is_available()
    # Host memory is a CPU's own memory: there, activations go to a file.
    tier = {} if has_gpu else {"disk": f"{tempfile.gettempdir()}:1GiB"}
    callback = EbbtideCallback("offload", min_bytes=1024, **tier)
    trainer = Trainer(
        accelerator="gpu" if has_gpu else "cpu",
        devices=1,
        max_epochs=1,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    module, one_text = Language(), torch.randint(0, 256, (128,))
    trainer.fit(module, DataLoader([one_text] * 12, batch_size=2))
    print("no training" if callback.tide is None else callback.tide.report())


if __name__ == "__main__":
    main()
