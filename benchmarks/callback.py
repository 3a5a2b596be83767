"""What `EbbtideCallback` costs a `transformers.Trainer`, against the same plan in a plain loop.

    PYTHONPATH=src:. python3 benchmarks/callback.py --out benchmarks/results/callback-cpu.json

A tiny Llama on one CPU core, float32, SGD. Three trainings take turns: the Trainer with the
callback, the Trainer with a model that `attach` was called on before, and a loop of our own.
What the callback costs is the first against the second: the same trainer and the same plan, and
nothing else. The third tells what the trainer costs, with ebbtide or without. A training is timed
in process time, from its start to its end, attach and close included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from ebbtide.integrations.transformers import EbbtideCallback
from ebbtide.torch import attach

PLAN = "recompute"
"""Moves nothing: a disk would add its own variation."""
BATCH, NUM_TOKENS = 2, 128


def make_model() -> Any:
    make_config: Any = LlamaConfig
    config = make_config(
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=6,
        num_attention_heads=4,
        vocab_size=512,
        use_cache=False,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def make_trainer(folder: str, model: Any, num_steps: int, callbacks: list[Any]) -> Any:
    torch.manual_seed(1)
    rows = torch.randint(0, 512, (64, NUM_TOKENS)).tolist()
    arguments: Any = TrainingArguments
    make: Any = Trainer
    return make(
        model=model,
        args=arguments(
            output_dir=folder,
            max_steps=num_steps,
            per_device_train_batch_size=BATCH,
            optim="sgd",
            max_grad_norm=0.0,
            logging_steps=10,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        callbacks=callbacks,
    )


def with_callback(num_steps: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(folder, make_model(), num_steps, [EbbtideCallback(PLAN)])
        return _timed(trainer.train)


def attached_before(num_steps: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        model = make_model()
        trainer = make_trainer(folder, model, num_steps, [])

        def train() -> None:
            with attach(model, PLAN):
                trainer.train()

        return _timed(train)


def plain_loop(num_steps: int) -> float:
    model = make_model()
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-5)
    torch.manual_seed(1)
    rows = torch.randint(0, 512, (64, NUM_TOKENS))

    def train() -> None:
        with attach(model, PLAN):
            for step in range(num_steps):
                ids = rows[torch.arange(BATCH * step, BATCH * (step + 1)) % len(rows)]
                model(input_ids=ids, labels=ids).loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    return _timed(train)


def _timed(train: Callable[[], Any]) -> float:
    start = time.process_time()
    train()
    return time.process_time() - start


WAYS: dict[str, Callable[[int], float]] = {
    "callback": with_callback,
    "attached before": attached_before,
    "plain loop": plain_loop,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for train in WAYS.values():
        train(3)
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    for number in range(options.rounds):
        # Each round starts with another one, so that none profits from its place.
        names = list(WAYS)
        for name in names[number % 3 :] + names[: number % 3]:
            seconds[name].append(WAYS[name](options.steps))
    ratios = {
        name: [a / b for a, b in zip(seconds["callback"], seconds[name], strict=True)]
        for name in ("attached before", "plain loop")
    }
    result = {
        "facts": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": sys.version.split()[0],
            "date": time.strftime("%Y-%m-%d"),
            "plan": PLAN,
            "steps": options.steps,
            "rounds": options.rounds,
            "command": "PYTHONPATH=src:. python3 benchmarks/callback.py --steps "
            f"{options.steps} --rounds {options.rounds} "
            "--out benchmarks/results/callback-cpu.json",
        },
        "median_s": {name: statistics.median(times) for name, times in seconds.items()},
        "all_s": seconds,
        "callback_over": {name: statistics.median(found) for name, found in ratios.items()},
        "callback_over_all": ratios,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    for name, found in ratios.items():
        print(
            f"callback / {name}: {statistics.median(found):.4f} "
            f"({min(found):.4f} to {max(found):.4f} in {len(found)} rounds)"
        )


if __name__ == "__main__":
    main()
