"""Options that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

MODELS_HELP = (
    "smollm2 (pre-trained SmolLM2-135M), gpt2, llama-8b-shape, qwen3-14b-shape, moe-shape, or a "
    "folder or hub name that transformers can read."
)
ModelOption = Annotated[str, typer.Option(help=MODELS_HELP)]
LayersOption = Annotated[
    int | None, typer.Option(help="Blocks of one of the shapes. Default: 8, of the tiny ones less.")
]
ContextOption = Annotated[
    int | None,
    typer.Option(help="Tokens in a sequence. Default: 8192 on a GPU, 512 on a CPU (jax: 128)."),
]
BatchOption = Annotated[int, typer.Option(help="Sequences in a step.")]
TextOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="UTF-8 text to train on. Default: the King James Bible."),
]
DeviceOption = Annotated[
    str | None, typer.Option(help="cpu, cuda or cuda:N. Default: cuda if there is one.")
]
HostOption = Annotated[
    str | None,
    typer.Option(help="Most pinned host memory for ebbtide's plans, such as 64GiB."),
]
DiskOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATH:CAP",
        help="Folder for ebbtide's plans and the most to hold there; may be repeated, for "
        "several disks. Default: none on a GPU, a temporary folder on a CPU.",
    ),
]
SeedOption = Annotated[int, typer.Option(help="Seed of random weights and of dropout.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
