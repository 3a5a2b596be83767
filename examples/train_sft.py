"""Fine-tune a small Llama with LoRA in TRL's SFTTrainer, with ebbtide's callback.

    python examples/train_sft.py

Random weights and tokens, so that nothing has to be downloaded.
"""

from __future__ import annotations

import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from ebbtide.integrations.transformers import EbbtideCallback


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
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(256)}, unk_token="w0"))
    one_text = torch.randint(3, 256, (128,)).tolist()
    has_gpu = torch.cuda.is_available()
    # Host memory is a CPU's own memory: there, activations go to a file.
    tier = {} if has_gpu else {"disk": f"{tempfile.gettempdir()}:1GiB"}
    callback = EbbtideCallback("offload", min_bytes=1024, **tier)
    with tempfile.TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            model=LlamaForCausalLM(config),
            args=SFTConfig(
                output_dir=folder,
                max_steps=6,
                per_device_train_batch_size=2,
                learning_rate=1e-2,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                use_cpu=not has_gpu,
                # On by default in TRL: ebbtide decides what is recomputed.
                gradient_checkpointing=False,
                dataset_kwargs={"skip_prepare_dataset": True},
                max_length=128,
            ),
            train_dataset=Dataset.from_dict({"input_ids": [one_text] * 16}),
            processing_class=PreTrainedTokenizerFast(
                tokenizer_object=words, bos_token="w0", eos_token="w1", pad_token="w2"
            ),
            peft_config=LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
            callbacks=[callback],
        )
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    for step, loss in enumerate(losses):
        print(f"step {step}: loss {loss:.4f}")
    print("no training" if callback.tide is None else callback.tide.report())


if __name__ == "__main__":
    main()
