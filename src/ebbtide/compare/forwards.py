"""Put something around the forward of each block, and take it off again."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

from torch import nn

Forward = Callable[..., Any]


@contextmanager
def wrapped_forwards(
    blocks: Iterable[nn.Module], wrap: Callable[[Forward], Forward]
) -> Generator[None]:
    """Replace each block's `forward` with `wrap(forward)` inside the context.

    A module around the block would give its parameters other names; compiling a block takes its
    new forward in. Hooks on the blocks run outside of it, once.
    """
    wrapped = list(blocks)
    for block in wrapped:
        block.forward = wrap(block.forward)
    try:
        yield
    finally:
        for block in wrapped:
            del block.__dict__["forward"]
