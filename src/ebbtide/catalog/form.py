"""How a layer is run on one device: by whom, at which width, beside how many other ranks."""

import enum
from dataclasses import dataclass

from ebbtide.catalog.ops import BF16_BYTES


@enum.unique
class Implementation(enum.Enum):
    """Who runs a layer."""

    FUSED = "fused"
    """Fused kernels, as formulas count."""
    EAGER = "eager"
    """Hugging Face's modules, op by op."""
    COMPILED = "compiled"
    """The same modules, each block compiled."""


@enum.unique
class Attention(enum.Enum):
    """How attention is computed."""

    FLASH = "flash"
    """Fused; no scores are kept."""
    MATRIX = "matrix"
    """Scores and softmax in full, with no share of them left out by the mask."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How a layer is run on one device."""

    tokens: int
    """Of one micro-batch on this device."""
    context: int
    """Tokens of a sequence, on however many devices it is."""
    implementation: Implementation = Implementation.FUSED
    """Who runs it."""
    attention: Attention = Attention.FLASH
    """How."""
    width_bytes: int = BF16_BYTES
    """Of an activation's element."""
    tensor_parallel: int = 1
    """Ranks that split matrices and heads."""
    is_sequence_parallel: bool = False
    """Those ranks also split the tokens of what they would all hold."""
    context_parallel: int = 1
    """Ranks that split the tokens of a sequence."""
    expert_parallel: int = 1
    """Ranks that share out the routed experts."""
    lora_rank: int = 0
    """Of adapters on all linear layers but routers and routed experts; 0: all is trained."""
    is_rerun: bool = False
    """Random ops and routing may be run again: what runs them restores the random state, as
    `torch.utils.checkpoint` and `jax.checkpoint` do. ebbtide itself never does."""

    @property
    def shared_tokens(self) -> int:
        """Tokens of what tensor-parallel ranks do not split by heads or width."""
        return self.tokens // (self.tensor_parallel if self.is_sequence_parallel else 1)
