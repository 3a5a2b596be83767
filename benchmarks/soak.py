"""Train for thousands of steps of random shapes, with everything that goes wrong in between.

    PYTHONPATH=src python3 benchmarks/soak.py --steps 2000 --plan balanced --out soak.json

Two models with the same weights take the same steps, one of them with ebbtide: training steps,
two forwards before two backwards, evaluation, a graph dropped without backward, and exceptions in
forward and in backward. Losses and gradients are compared bit for bit in each step. What the
process and ebbtide hold is noted every few steps, and must not grow after the warm-up.

Of memory on a CPU that is judged by the bytes in use of the C library's heap: its allocator keeps
what was freed, more or less by the order of shapes, so resident memory rises and falls without
ebbtide as well. `--control` shows by how much: both models train without it then.
"""

from __future__ import annotations

import os

# cuBLAS repeats its bits only with a workspace of its own, and reads this when it starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import argparse
import copy
import ctypes
import gc
import json
import logging
import platform
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from ebbtide.memory.ledger import Ledger
from ebbtide.torch import Tide, attach

WIDTH, NUM_BLOCKS, NUM_WORDS = 128, 6, 512
MIN_TOKENS, MAX_TOKENS, MAX_BATCH = 16, 384, 3
NOTED_EVERY = 20
EVENTS = {
    "train": 70,
    "two forwards, then two backwards": 8,
    "evaluate": 8,
    "drop the graph": 5,
    "exception in forward": 5,
    "exception in backward": 4,
}
"""What a step may be, with weights."""


class SoakError(Exception):
    """Raised on purpose, in the middle of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What the process held after a step and a garbage collection."""

    step: int
    resident_bytes: int
    heap_bytes: int
    """In use of the C library's heap, large pieces too; 0 where the library does not say."""
    num_files: int
    num_threads: int
    num_objects: int
    device_bytes: int
    device_reserved_bytes: int
    host_taken_bytes: int
    tier_bytes: int
    """In host memory and on disk together; nothing is between two steps."""
    disk_file_bytes: int
    """Length of the disk tier's file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """The most of one quantity in the second and in the last quarter of the steps."""

    name: str
    before: int
    after: int
    is_flat: bool


def make_model(device: str) -> nn.Module:
    """Return a small Llama with dropout in its attention."""
    make_config: Any = transformers.LlamaConfig
    config = make_config(
        vocab_size=NUM_WORDS,
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=NUM_BLOCKS,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_dropout=0.1,
        use_cache=False,
    )
    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(config)
    return model.to(device).train()


class Trainee:
    """One of the two models, and its optimizer."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

    def take(self, event: str, ids: list[Tensor], seed: int) -> list[Tensor]:
        """Take one step; returns its losses and gradients."""
        torch.manual_seed(seed)
        actions: dict[str, Callable[[list[Tensor]], list[Tensor]]] = {
            "train": self._train,
            "two forwards, then two backwards": self._train,
            "evaluate": self._evaluate,
            "drop the graph": self._drop,
            "exception in forward": self._fail_in_forward,
            "exception in backward": self._fail_in_backward,
        }
        return actions[event](ids)

    def _loss(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, labels=ids).loss

    def _train(self, ids: list[Tensor]) -> list[Tensor]:
        losses = [self._loss(one) for one in ids]
        for loss in losses:
            loss.backward()
        gradients = [p.grad.clone() for p in self.model.parameters() if p.grad is not None]
        self._optimizer.step()
        self._optimizer.zero_grad()
        return [*(loss.detach() for loss in losses), *gradients]

    def _evaluate(self, ids: list[Tensor]) -> list[Tensor]:
        self.model.eval()
        with torch.no_grad():
            losses = [self._loss(one) for one in ids]
        self.model.train()
        return losses

    def _drop(self, ids: list[Tensor]) -> list[Tensor]:
        return [self._loss(ids[0]).detach()]

    def _fail_in_forward(self, ids: list[Tensor]) -> list[Tensor]:
        def fail(module: nn.Module, args: Any) -> None:
            raise SoakError

        block: Any = self.model.get_submodule(f"model.layers.{NUM_BLOCKS // 2}.mlp")
        handle = block.register_forward_pre_hook(fail)
        try:
            self._loss(ids[0])
        except SoakError:
            return []
        finally:
            handle.remove()
        raise AssertionError("the forward did not fail")

    def _fail_in_backward(self, ids: list[Tensor]) -> list[Tensor]:
        def fail(gradient: Tensor) -> None:
            raise SoakError

        def watch(module: nn.Module, args: Any, output: Tensor) -> None:
            output.register_hook(fail)

        block: Any = self.model.get_submodule(f"model.layers.{NUM_BLOCKS // 2}.mlp")
        handle = block.register_forward_hook(watch)
        try:
            self._loss(ids[0]).backward()
        except SoakError:
            return []
        finally:
            handle.remove()
            self._optimizer.zero_grad()
        raise AssertionError("the backward did not fail")


class MallocInfo(ctypes.Structure):
    """What glibc's `mallinfo2` returns."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def heap_bytes() -> int:
    """Return the bytes in use of the C library's heap; 0 where it has no such counts."""
    ask = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if ask is None:
        return 0
    ask.restype = MallocInfo
    found = ask()
    return int(found.uordblks) + int(found.hblkhd)


def note(step: int, tide: Tide | None, device: str, folder: str) -> Held:
    """Return what is held now."""
    gc.collect()
    is_cuda = device == "cuda"
    if is_cuda:
        torch.cuda.synchronize()
    tier_bytes = host_taken_bytes = 0
    if tide is not None:
        counts, host_taken_bytes = tide.statistics(), tide.host_taken_bytes
        tier_bytes = counts.host.held_bytes + counts.disk.held_bytes + counts.held_device_bytes
    with open("/proc/self/statm", encoding="ascii") as file:
        resident_bytes = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return Held(
        step=step,
        resident_bytes=resident_bytes,
        heap_bytes=heap_bytes(),
        num_files=len(os.listdir("/proc/self/fd")),
        num_threads=threading.active_count(),
        num_objects=len(gc.get_objects()),
        device_bytes=torch.cuda.memory_allocated() if is_cuda else 0,
        device_reserved_bytes=torch.cuda.memory_reserved() if is_cuda else 0,
        host_taken_bytes=host_taken_bytes,
        tier_bytes=tier_bytes,
        disk_file_bytes=measure_files(folder),
    )


def measure_files(folder: str) -> int:
    """Return how long the files are together that this process has open in a folder."""
    num_bytes = 0
    for name in os.listdir("/proc/self/fd"):
        link = f"/proc/self/fd/{name}"
        # Listing opens a descriptor that is gone by now.
        if os.path.lexists(link) and os.readlink(link).startswith(f"{folder}/"):
            num_bytes += os.stat(link).st_size
    return num_bytes


def find_growth(notes: list[Held]) -> list[Growth]:
    """Compare the second quarter with the last one."""
    quarter = len(notes) // 4
    first, last = notes[quarter : 2 * quarter], notes[-quarter:]
    # Fraction and bytes or number that is no growth: allocators keep pages for a while.
    allowed = {
        **{"heap_bytes": (0.01, 2 << 20), "device_reserved_bytes": (0.03, 2 << 20)},
        **{"num_objects": (0.01, 200), "num_files": (0.0, 0), "num_threads": (0.0, 4)},
        **{"device_bytes": (0.0, 0), "host_taken_bytes": (0.0, 0), "tier_bytes": (0.0, 0)},
        # What a longer batch than any before did not fit into is added once.
        "disk_file_bytes": (0.0, 0),
    }
    found: list[Growth] = []
    for name, (fraction, number) in allowed.items():
        before = max(asdict(held)[name] for held in first)
        after = max(asdict(held)[name] for held in last)
        is_flat = after <= before * (1 + fraction) + number
        found.append(Growth(name=name, before=before, after=after, is_flat=is_flat))
    return found


def soak(
    tide: Tide | None, ours: Trainee, plain: Trainee, options: argparse.Namespace, folder: str
) -> dict[str, Any]:
    """Take the steps; returns what was seen."""
    draw = random.Random(options.seed)
    num_events: Counter[str] = Counter()
    num_compared = num_unequal = 0
    first_unequal: int | None = None
    losses: list[float] = []
    notes: list[Held] = []
    start = time.monotonic()
    for step in range(options.steps):
        event = draw.choices(list(EVENTS), list(EVENTS.values()))[0] if step >= 4 else "train"
        num_events[event] += 1
        num_batches = 2 if event.startswith("two") else 1
        shapes = [
            (draw.randint(1, MAX_BATCH), draw.randint(MIN_TOKENS, MAX_TOKENS))
            for _ in range(num_batches)
        ]
        generator = torch.Generator().manual_seed(options.seed * 1_000_003 + step)
        ids = [
            torch.randint(NUM_WORDS, shape, generator=generator).to(options.device)
            for shape in shapes
        ]
        wanted, got = (t.take(event, ids, seed=step) for t in (plain, ours))
        num_compared += len(wanted)
        num_wrong = sum(not torch.equal(a, b) for a, b in zip(wanted, got, strict=True))
        num_unequal += num_wrong
        if num_wrong and first_unequal is None:
            first_unequal = step
        if event == "train":
            losses.append(float(got[0]))
        del wanted, got, ids
        if step % NOTED_EVERY == NOTED_EVERY - 1:
            notes.append(note(step, tide, options.device, folder))
    growth = find_growth(notes)
    counts = Ledger().snapshot() if tide is None else tide.statistics()
    return {
        "num_events": dict(num_events),
        "num_compared": num_compared,
        "num_unequal": num_unequal,
        "first_unequal_step": first_unequal,
        "first_losses": losses[:20],
        "last_losses": losses[-20:],
        "moved_out_bytes": counts.moved_out_bytes,
        "moved_in_bytes": counts.moved_in_bytes,
        "num_recomputed_ops": counts.num_recomputed_ops,
        "not_understood": dict(counts.num_kept_not_understood),
        "seconds": round(time.monotonic() - start, 1),
        "growth": [asdict(one) for one in growth],
        "is_flat": all(one.is_flat for one in growth),
        "notes": [asdict(held) for held in notes],
    }


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--plan", default="balanced")
    parser.add_argument("--budget", help="instead of --plan")
    parser.add_argument("--control", action="store_true", help="train both without ebbtide")
    parser.add_argument("--out", type=Path, help="a JSON file for what was seen")
    options = parser.parse_args(arguments)
    if options.steps < 8 * NOTED_EVERY:
        parser.error(f"--steps is {options.steps}; give {8 * NOTED_EVERY} or more")
    return options


def main(arguments: list[str]) -> int:
    """Soak, print what was seen, and return 1 if something grew or differed."""
    options = parse(arguments)
    # Its warnings about this run's failing steps would fill the screen.
    logging.getLogger("ebbtide").setLevel(logging.ERROR)
    torch.use_deterministic_algorithms(True)
    if options.device == "cpu":
        torch.set_num_threads(1)
    model = make_model(options.device)
    plain, ours = Trainee(copy.deepcopy(model)), Trainee(model)
    with tempfile.TemporaryDirectory() as folder:
        asked = {"budget": options.budget} if options.budget else {"plan": options.plan}
        disk = f"{folder}:4GiB" if options.device == "cpu" else None
        attached = nullcontext() if options.control else attach(model, **asked, disk=disk)
        with attached as tide:
            seen = soak(tide, ours, plain, options, folder)
    facts = {
        "command": " ".join(["PYTHONPATH=src python3 benchmarks/soak.py", *arguments]),
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "CPU",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }
    if options.out is not None:
        options.out.write_text(json.dumps({"facts": facts, **seen}, indent=1) + "\n")
    print(f"{options.steps} steps in {seen['seconds']} s: {seen['num_events']}")
    print(f"{seen['num_compared']} values compared, {seen['num_unequal']} differ")
    resident = [held["resident_bytes"] for held in seen["notes"]]
    print(f"resident memory {min(resident)} to {max(resident)}, not judged")
    print(f"moved out {seen['moved_out_bytes']}, operators run again {seen['num_recomputed_ops']}")
    for one in seen["growth"]:
        print(f"{one['name']:24} {one['before']:>14} {one['after']:>14} "
              f"{'flat' if one['is_flat'] else 'GREW'}")  # fmt: skip
    return 0 if seen["is_flat"] and not seen["num_unequal"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
