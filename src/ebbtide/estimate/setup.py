"""What is to be estimated: a model, a machine, a batch, and how ranks share them out."""

import enum
from dataclasses import dataclass, field, fields

from ebbtide.catalog.form import Attention, Form, Implementation
from ebbtide.catalog.ops import BF16_BYTES, FP32_BYTES
from ebbtide.catalog.shapes import Family, Shape

MOST_TOKENS = 2**27
"""Of one micro-batch on one device: far above what any device holds, so a larger one is a typing
error."""

MOST_LAYERS = 1000
MOST_DEVICES = 10_000_000
MOST_MICRO_BATCHES = 1_000_000
MOST_PARAMETERS = 10**15
"""As well: a thousand times the largest published model."""


@enum.unique
class Optimizer(enum.Enum):
    """What an optimizer keeps for each parameter that is trained, beside weight and gradient."""

    NONE = "none"
    """Nothing, and it does not step: forward and backward alone."""
    SGD = "sgd"
    """Nothing."""
    ADAMW = "adamw"
    """Two moments in fp32, and the weight in fp32 where the model has it in fewer bytes."""
    ADAMW_BF16 = "adamw-bf16"
    """Two moments in bf16, as torch's AdamW keeps for a model in bf16."""
    ADAMW_8BIT = "adamw-8bit"
    """Two moments of a byte; the scales of their blocks are left out."""


@enum.unique
class Dtype(enum.Enum):
    """In what a model computes."""

    BF16 = "bf16"
    """Everything in bf16, or fp16, which is as wide."""
    FP8 = "fp8"
    """Matrix products at the rate of fp8; weights, gradients and activations stay in bf16."""
    FP32 = "fp32"
    """Everything in fp32, with products as TF32."""

    @property
    def width_bytes(self) -> int:
        """Of an activation, a weight and a gradient."""
        return FP32_BYTES if self is Dtype.FP32 else BF16_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """How many ways each kind of parallelism splits a model and its batch."""

    dp: int = 1
    """Copies of the model, each with its own batch."""
    fsdp: int = 1
    """Ranks with a batch each that share out weights, gradients and optimizer state (ZeRO-3)."""
    tp: int = 1
    """Ranks that split matrices and heads of one batch."""
    cp: int = 1
    """Ranks that split the tokens of each sequence."""
    ep: int = 1
    """Ranks with a batch each that share out the routed experts; with FSDP also all else."""
    pp: int = 1
    """Stages that share out the layers, one micro-batch after the other (1F1B)."""
    sp: bool = False
    """Tensor-parallel ranks split the tokens of what each of them would hold (sequence
    parallelism)."""

    @property
    def num_devices(self) -> int:
        """Of them together."""
        return self.dp * self.fsdp * self.tp * self.cp * self.ep * self.pp

    @property
    def num_batches(self) -> int:
        """Micro-batches that are trained on at once."""
        return self.dp * self.fsdp * self.ep

    @property
    def num_shards(self) -> int:
        """Ranks that share out what is not a routed expert."""
        return self.fsdp * self.ep if self.fsdp > 1 else 1

    @property
    def num_expert_shards(self) -> int:
        """Ranks that share out the routed experts."""
        return self.fsdp * self.ep


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A question.

    Raises:
        ValueError: A number is not 1 or more, a degree does not divide what it splits, or the
            implementation is not worked out for the model.
    """

    shape: Shape
    """Of the model."""
    context: int
    """Tokens of a sequence."""
    batch: int
    """Sequences in a micro-batch."""
    degrees: Degrees = field(default_factory=Degrees)
    """Of parallelism."""
    accumulate: int = 1
    """Micro-batches in a step."""
    optimizer: Optimizer = Optimizer.ADAMW
    """What it keeps."""
    dtype: Dtype = Dtype.BF16
    """In what it computes."""
    lora_rank: int = 0
    """0: all parameters are trained."""
    implementation: Implementation = Implementation.FUSED
    """Who runs a layer."""
    attention: Attention = Attention.FLASH
    """How."""
    loss_chunk: int = 0
    """Most tokens whose logits are there at once; 0: all."""

    def __post_init__(self) -> None:
        for name in ("context", "batch", "accumulate"):
            _refuse_below_one(name, getattr(self, name))
        for degree in fields(self.degrees):
            if degree.name != "sp":
                _refuse_below_one(degree.name, getattr(self.degrees, degree.name))
        if self.lora_rank < 0 or self.loss_chunk < 0:
            raise ValueError(
                f"--lora {self.lora_rank}, --loss-chunk {self.loss_chunk}: neither is below 0; "
                "leave out what is not wanted"
            )
        if self.lora_rank > self.shape.hidden:
            raise ValueError(
                f"--lora {self.lora_rank}: an adapter's rank is below the width of the model, "
                f"{self.shape.hidden}; give for example 16"
            )
        if self.context * self.batch // self.degrees.cp > MOST_TOKENS:
            raise ValueError(
                f"--context {self.context} by --batch {self.batch} is "
                f"{self.context * self.batch // self.degrees.cp} tokens a device; more than "
                f"{MOST_TOKENS} are taken for a typing error"
            )
        for what, number, most in (
            (f"{self.shape.name} has %d layers", self.shape.num_layers, MOST_LAYERS),
            ("the degrees make %d devices", self.degrees.num_devices, MOST_DEVICES),
            ("--accumulate makes %d micro-batches", self.accumulate, MOST_MICRO_BATCHES),
            ("--loss-chunk gives %d tokens", self.loss_chunk, MOST_TOKENS),
            # Counted last: a shape with too many layers takes long to count.
            (f"{self.shape.name} has %d parameters", self._num_parameters(), MOST_PARAMETERS),
        ):
            if number > most:
                raise ValueError(f"{what % number}; more than {most} are taken for a typing error")
        self._check_degrees()
        self._check_implementation()

    def _num_parameters(self) -> int:
        if self.shape.num_layers > MOST_LAYERS:
            return 0  # Refused for its layers.
        return self.shape.num_parameters

    def _check_degrees(self) -> None:
        shape, degrees = self.shape, self.degrees
        splits = [("tp", degrees.tp, "heads", shape.heads), ("tp", degrees.tp, "ffn", shape.ffn),
                  ("pp", degrees.pp, "layers", shape.num_layers),
                  ("cp", degrees.cp, "context", self.context)]  # fmt: skip
        if shape.family is Family.LLAMA:
            splits.append(("tp", degrees.tp, "kv_heads", shape.kv_heads))
        if shape.experts is not None:
            splits += [("ep", degrees.ep, "experts", shape.experts.num_experts),
                       ("tp", degrees.tp, "expert_ffn", shape.experts.ffn)]  # fmt: skip
            if shape.experts.shared_ffn:
                splits.append(("tp", degrees.tp, "shared_ffn", shape.experts.shared_ffn))
        elif degrees.ep > 1:
            raise ValueError(
                f"--ep {degrees.ep}: {shape.name} has no experts to share out; leave --ep out"
            )
        if degrees.sp:
            splits.append(("tp", degrees.tp, "tokens of a device", self.tokens))
        for name, degree, what, number in splits:
            if number % degree:
                most = min(number, 2 * degree, MOST_LAYERS)
                near = [d for d in range(1, most + 1) if not number % d]
                raise ValueError(
                    f"--{name} {degree} does not divide the {number} {what} of {shape.name}; "
                    f"degrees that do: {', '.join(map(str, near[-6:]))}"
                )
        if degrees.sp and degrees.tp == 1:
            raise ValueError(
                "--sp without --tp: tensor-parallel ranks split the tokens; give --tp too"
            )

    def _check_implementation(self) -> None:
        shape, implementation = self.shape, self.implementation
        if implementation is Implementation.FUSED:
            if self.attention is Attention.MATRIX and shape.family is Family.DEEPSEEK:
                raise ValueError(
                    f"--attention matrix is not worked out for {shape.name}; leave it out"
                )
            return
        if self.attention is Attention.MATRIX:
            raise ValueError(
                f"--attention matrix is worked out for --implementation fused alone, not for "
                f"{implementation.value}; leave one of them out"
            )
        if shape.family is Family.DEEPSEEK or shape.experts is not None:
            raise ValueError(
                f"--implementation {implementation.value} is not worked out for {shape.name}, "
                "which has experts; give --implementation fused"
            )
        if implementation is Implementation.COMPILED and shape.family is Family.GPT2:
            raise ValueError(
                f"--implementation compiled is not worked out for {shape.name}; give "
                "--implementation eager or fused"
            )

    @property
    def tokens(self) -> int:
        """Of one micro-batch on one device."""
        return self.batch * self.context // self.degrees.cp

    def form(self, *, is_rerun: bool) -> Form:
        """Return how one device runs a layer.

        Args:
            is_rerun: Random ops and routing may be run again.
        """
        return Form(
            tokens=self.tokens,
            context=self.context,
            implementation=self.implementation,
            attention=self.attention,
            width_bytes=self.dtype.width_bytes,
            tensor_parallel=self.degrees.tp,
            is_sequence_parallel=self.degrees.sp,
            context_parallel=self.degrees.cp,
            expert_parallel=self.degrees.ep,
            lora_rank=self.lora_rank,
            is_rerun=is_rerun,
        )


def _refuse_below_one(name: str, number: int) -> None:
    if number < 1:
        raise ValueError(f"--{name} {number}: it must be 1 or more")
