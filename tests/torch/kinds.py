"""Blocks of the kinds that public faults of offloading were about, each with a way to train it.

Beside those of `models` and `cases`: what is here is one block for a kind, as small as can be.
"""

# B batch, T tokens, D model width, R rank of an adapter

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

from tests.torch.cases import Case, stack_of
from tests.torch.models import NUM_BLOCKS, WIDTH, Gated, Router, features
from tests.torch.training import feature_step


class Pair(nn.Module):
    """Two products, for blocks that do something odd between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)


class Squares(Pair):
    """Transposes of square matrices: shapes do not tell them apart."""

    def forward(self, h_BTD: Tensor) -> Tensor:
        x_BTT = self.first(h_BTD)[..., : h_BTD.shape[1]]
        y_BTT = (x_BTT.mT.exp().clamp(max=2.0) * x_BTT).tanh() @ x_BTT.mT.sigmoid()
        weight_DD = (self.first.weight.t() * self.second.weight).tanh()
        wide_BTD = torch.cat((y_BTT, y_BTT.mT.cos()), dim=-1)
        return h_BTD + self.second(wide_BTD) @ weight_DD


class Upcast(nn.Module):
    """A mask and a learned tensor in float32 around a block in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.learned = nn.Parameter(torch.randn(2, 16, WIDTH))
        self.norm = nn.RMSNorm(WIDTH).bfloat16()
        self.linear = nn.Linear(WIDTH, WIDTH).bfloat16()

    def forward(self, h_BTD: Tensor) -> Tensor:
        mask_BTD = torch.rand(h_BTD.shape) > 0.5
        x_BTD = h_BTD.float() * mask_BTD + (~mask_BTD).float() * self.learned
        return h_BTD + self.linear(self.norm(x_BTD.to(h_BTD.dtype)))


class LastHolder(nn.Module):
    """Saves a few columns of a wide product, and nothing else of it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 8 * WIDTH)
        self.down = nn.Linear(4, WIDTH)

    def forward(self, h_BTD: Tensor) -> Tensor:
        return h_BTD + self.down(self.up(h_BTD)[..., 100:104].exp().tanh())


class Often(Pair):
    """Saves one tensor for three operators, and two equal views of it."""

    def forward(self, h_BTD: Tensor) -> Tensor:
        x_BTD = self.first(h_BTD).exp().tanh()
        return h_BTD + self.second(x_BTD * x_BTD * x_BTD + x_BTD.view(-1).view_as(x_BTD) * x_BTD)


class Dequantized(torch.autograd.Function):
    """A product with weights of four bits, which are made wide again in backward."""

    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, codes: Tensor, scale_D1: Tensor, levels: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(codes, scale_D1)
        ctx.levels = levels
        return x_BTD @ widen(codes, scale_D1, levels).T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        codes, scale_D1 = ctx.saved_tensors
        return gradient @ widen(codes, scale_D1, ctx.levels), None, None, None


def widen(codes: Tensor, scale_D1: Tensor, levels: Tensor) -> Tensor:
    """Return weights of D x D from two codes a byte."""
    pairs = codes.to(torch.int64)[:, None] >> torch.tensor([0, 4])
    return levels[pairs & 15].view(WIDTH, WIDTH) * scale_D1


class FourBit(nn.Module):
    """An adapter beside a frozen weight of four bits."""

    def __init__(self) -> None:
        super().__init__()
        codes = torch.randint(0, 256, (WIDTH * WIDTH // 2,), dtype=torch.uint8)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.register_buffer("scale", 0.1 * torch.rand(WIDTH, 1))
        self.levels = torch.linspace(-1.0, 1.0, 16)
        self.norm = nn.LayerNorm(WIDTH)
        self.down_RD = nn.Parameter(0.1 * torch.randn(4, WIDTH))
        self.up_DR = nn.Parameter(0.1 * torch.randn(WIDTH, 4))

    def forward(self, h_BTD: Tensor) -> Tensor:
        x_BTD = self.norm(h_BTD)
        wide: Any = Dequantized.apply(x_BTD, self.codes, self.get_buffer("scale"), self.levels)
        low_BTR = functional.dropout(x_BTD, 0.1) @ self.down_RD.T
        return h_BTD + functional.silu(wide + low_BTR @ self.up_DR.T)


class SavesAs(torch.autograd.Function):
    """Saves its input in another form, and multiplies the gradient by what that becomes again."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, x: Tensor, pack: Callable[[Tensor], Tensor], unpack: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.save_for_backward(pack(x.detach()), x)
        ctx.unpack = unpack
        return 1.0 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        packed, x = ctx.saved_tensors
        return gradient * (1.0 + 0.1 * ctx.unpack(packed).tanh()) * x.cos(), None, None


DTYPES = (
    torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16, torch.bool, torch.uint8,
    torch.int8, torch.int16, torch.uint16, torch.uint32,
)  # fmt: skip


class EveryDtype(Pair):
    """Saves a tensor of each dtype."""

    def forward(self, h_BTD: Tensor) -> Tensor:
        x: Any = self.first(h_BTD)
        for dtype in DTYPES:
            x = SavesAs.apply(x, lambda t, dtype=dtype: t.to(dtype), lambda t: t.float())
        return h_BTD + self.second(x.tanh())


class Scaled(Tensor):
    """Bytes with a scale and a part that may be missing, as low-precision formats have."""

    codes: Tensor
    scale: Tensor
    extra: Tensor | None

    @staticmethod
    def __new__(cls: Any, codes: Tensor, scale: Tensor, extra: Tensor | None) -> Any:
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)  # pyright: ignore

    def __init__(self, codes: Tensor, scale: Tensor, extra: Tensor | None) -> None:
        self.codes, self.scale, self.extra = codes, scale, extra

    def widen(self) -> Tensor:
        """Return the values."""
        return (self.codes.float() - 128.0) * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            old = args[0]
            new = cls(old.codes, old.scale, old.extra)
            return return_and_correct_aliasing(func, args, kwargs or {}, new)
        raise NotImplementedError(f"{func} of a Scaled")


class Composite(Pair):
    """Saves a subclass of two parts and one that is missing."""

    def forward(self, h_BTD: Tensor) -> Tensor:
        def pack(x: Tensor) -> Tensor:
            scale = x.abs().amax() / 127.0
            return Scaled((x / scale + 128.0).to(torch.uint8), scale, None)

        x: Any = SavesAs.apply(self.first(h_BTD), pack, Scaled.widen)
        return h_BTD + self.second(x.tanh())


class Quantized(Pair):
    """Saves a tensor that torch has quantised: it has a scale beside its bytes."""

    def forward(self, h_BTD: Tensor) -> Tensor:
        def pack(x: Tensor) -> Tensor:
            return torch.quantize_per_tensor(x, 0.01, 0, torch.qint8)

        x: Any = SavesAs.apply(self.first(h_BTD), pack, torch.dequantize)
        return h_BTD + self.second(x.tanh())


class Ragged(Pair):
    """Computes with rows of several lengths, in one nested tensor."""

    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.layout = layout

    def forward(self, h_BTD: Tensor) -> Tensor:
        lengths = (5, h_BTD.shape[1])
        rows = [row[:length] for row, length in zip(self.first(h_BTD), lengths, strict=True)]
        nested = torch.nested.as_nested_tensor(rows, layout=self.layout)
        wide_BTD = torch.nested.to_padded_tensor(nested * nested, 0.0)
        return h_BTD + self.second(wide_BTD.tanh())


class RaggedStack(nn.Module):
    """Gives its blocks a nested tensor, which has no shape."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(RaggedBlock() for _ in range(NUM_BLOCKS))

    def forward(self, h_BTD: Tensor) -> Tensor:
        nested = torch.nested.as_nested_tensor(list(h_BTD.unbind(0)))
        for block in self.blocks:
            nested = block(nested)
        return torch.nested.to_padded_tensor(nested, 0.0)


class RaggedBlock(Pair):
    """Runs on each row of a nested tensor."""

    def forward(self, nested: Tensor) -> Tensor:
        rows = [self.second(self.first(row).tanh()) + row for row in nested.unbind(0)]
        return torch.nested.as_nested_tensor(rows)


class FromInference(Pair):
    """Adds a table that was made in inference mode, which counts no writes."""

    def __init__(self) -> None:
        super().__init__()
        with torch.inference_mode():
            self.table = torch.randn(WIDTH)

    def forward(self, h_BTD: Tensor) -> Tensor:
        return h_BTD + self.second((self.first(h_BTD) + self.table).tanh())


class Positions(Pair):
    """Makes its table of positions in the dtype that is the default then."""

    def __init__(self) -> None:
        super().__init__()
        self.double()

    def forward(self, h_BTD: Tensor) -> Tensor:
        num_tokens = h_BTD.shape[1]
        place_T = torch.arange(num_tokens) / 7 + torch.full((num_tokens,), 1 / 3)
        return h_BTD + self.second((self.first(h_BTD) * place_T[:, None]).tanh())


def doubled_step(model: nn.Module, index: int) -> Tensor:
    """Run forward with float64 as the default dtype, and backward without."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        loss = model(features().double()).square().mean()
    finally:
        torch.set_default_dtype(before)
    loss.backward()
    return loss


class Convolved(Pair):
    """Computes by the libraries that settings of torch choose and tune."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, h_BTD: Tensor) -> Tensor:
        x_BTD = self.mix(self.first(h_BTD).mT).tanh().mT
        mean_B11 = x_BTD.mean(dim=(1, 2), keepdim=True)
        return h_BTD + self.second(x_BTD * mean_B11.exp())


def tuned_step(model: nn.Module, index: int) -> Tensor:
    """Run forward without oneDNN's convolutions and with float32 products that may be cut short."""
    backends: Any = torch.backends
    with backends.mkldnn.flags(enabled=False, allow_tf32=None, fp32_precision=None):
        precision = backends.mkldnn.matmul.fp32_precision
        backends.mkldnn.matmul.fp32_precision = "bf16"
        try:
            loss = model(features()).square().mean()
        finally:
            backends.mkldnn.matmul.fp32_precision = precision
    loss.backward()
    return loss


class Forces(Pair):
    """Takes a gradient in its forward, as models of energies and forces do."""

    def __init__(self, *, is_differentiable: bool) -> None:
        super().__init__()
        self.is_differentiable = is_differentiable

    def forward(self, h_BTD: Tensor) -> Tensor:
        x_BTD = h_BTD if self.is_differentiable else h_BTD.detach()
        if not x_BTD.requires_grad:
            x_BTD.requires_grad_()
        y_BTD = self.first(x_BTD).tanh()
        energy = ((y_BTD.exp() + 1.0).log() * y_BTD).square().sum()
        (force_BTD,) = torch.autograd.grad(energy, x_BTD, create_graph=self.is_differentiable)
        return h_BTD + self.second(self.first(h_BTD).sigmoid() * (0.1 * force_BTD).tanh())


class Halving(TorchDispatchMode):
    """Changes what an operator returns, as modes do that try out other numbers."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 0.5 if func is torch.ops.aten.tanh.default else result


def halved_step(model: nn.Module, index: int) -> Tensor:
    """Run forward under a dispatch mode of the program's, and backward without."""
    with Halving():
        loss = model(features()).square().mean()
    loss.backward()
    return loss


def halved_backward_step(model: nn.Module, index: int) -> Tensor:
    """Run backward under a dispatch mode of the program's, and forward without."""
    loss = model(features()).square().mean()
    with Halving():
        loss.backward()
    return loss


class Updated(Pair):
    """Writes to a buffer through `.data`, as code for moving averages does: no version moves."""

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.seen: Tensor
        self.register_buffer("seen", torch.randn(num_rows, WIDTH))

    def forward(self, h_BTD: Tensor) -> Tensor:
        self.seen.data.lerp_(h_BTD.detach().mean((0, 1)).expand_as(self.seen), 0.5)
        return h_BTD + self.second((self.first(h_BTD) + self.seen[:1]).tanh())


class UpdatedTable(nn.Module):
    """Writes to a table through `.data` after each block that reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Adding() for _ in range(NUM_BLOCKS))
        self.table_D = torch.randn(WIDTH)

    def forward(self, h_BTD: Tensor) -> Tensor:
        for block in self.blocks:
            h_BTD = block(h_BTD, self.table_D)
            self.table_D.data.mul_(-1.3 if self.table_D.abs().max() < 3 else 0.5)
        return h_BTD


class Adding(Pair):
    """Adds what it is given."""

    def forward(self, h_BTD: Tensor, other_D: Tensor) -> Tensor:
        return h_BTD + self.second((self.first(h_BTD) + other_D).tanh())


class Scratch(nn.Module):
    """Blocks that compute into one buffer of the model, by `out=`; no operator saves it."""

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scratching() for _ in range(NUM_BLOCKS))
        self.scratch = torch.zeros(num_rows, WIDTH)

    def forward(self, h_BTD: Tensor) -> Tensor:
        for block in self.blocks:
            h_BTD = block(h_BTD, self.scratch)
        return h_BTD


class Scratching(Pair):
    """Writes to what it is given, and adds it."""

    def forward(self, h_BTD: Tensor, scratch: Tensor) -> Tensor:
        torch.mul(torch.ones_like(scratch), h_BTD.detach().mean(), out=scratch)
        return h_BTD + self.second((self.first(h_BTD) + scratch[:1]).tanh())


class Unseen(Pair):
    """Overwrites a product behind the dispatcher's back after its last use but one.

    Autograd does not save the product, so torch allows it. With `is_read_again` it reads what it
    wrote.
    """

    def __init__(self, *, is_read_again: bool) -> None:
        super().__init__()
        self.is_read_again = is_read_again

    def forward(self, h_BTD: Tensor) -> Tensor:
        x_BTD = self.first(h_BTD)
        y_BTD = (x_BTD + 1.0).tanh()
        array: Any = x_BTD.detach().numpy()
        array *= 0.5
        if self.is_read_again:
            y_BTD = 2.0 * y_BTD + (x_BTD + 0.1).sigmoid()
        return h_BTD + self.second(y_BTD)


class Recursive(Pair):
    """Calls itself, hooks and all."""

    def forward(self, h_BTD: Tensor, depth: int = 2) -> Tensor:
        x_BTD = self.first(h_BTD).tanh()
        if depth:
            x_BTD = self(x_BTD, depth - 1)
        return h_BTD + self.second(x_BTD).sigmoid() * x_BTD


class Failing(Pair):
    """Leaves a product behind and raises."""

    def forward(self, h_BTD: Tensor) -> Tensor:
        self.left_BTD: Tensor | None = self.first(h_BTD).tanh() * h_BTD
        raise ValueError


class Forgiving(nn.Module):
    """Goes on with what a block left behind when it raised."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Failing() for _ in range(NUM_BLOCKS))

    def forward(self, h_BTD: Tensor) -> Tensor:
        for block in self.blocks:
            found: Any = block
            try:
                block(h_BTD)
            except ValueError:
                h_BTD = h_BTD + found.second(found.left_BTD.sin())
            found.left_BTD = None
        return h_BTD


class Leaking(Pair):
    """Leaves two activations behind as attributes."""

    def forward(self, h_BTD: Tensor) -> Tensor:
        sum_BTD = self.first(h_BTD)
        mid_BTD = sum_BTD.tanh()
        self.left: tuple[Tensor, Tensor] | None = (sum_BTD, mid_BTD)
        return h_BTD + self.second(mid_BTD)


class Collecting(nn.Module):
    """Computes with what its blocks left behind, outside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Leaking() for _ in range(NUM_BLOCKS))

    def forward(self, h_BTD: Tensor) -> Tensor:
        for block in self.blocks:
            h_BTD = block(h_BTD)
        for block in self.blocks:
            found: Any = block
            sum_BTD, mid_BTD = found.left
            found.left = None
            h_BTD = h_BTD + mid_BTD.sin() + sum_BTD.exp().sigmoid()
        return h_BTD


class Starved(Router):
    """A mixture of experts of which one gets no tokens."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.choose.bias[3] = -100.0


class Seeing(Pair):
    """Has a branch that runs for some batches only."""

    def forward(self, h_BTD: Tensor, image_BTD: Tensor | None) -> Tensor:
        if image_BTD is None:
            return h_BTD + self.first(h_BTD).sin()
        return h_BTD + self.second((self.first(h_BTD) * image_BTD).tanh())


class SeeingStack(nn.Module):
    """Gets an image in every second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Seeing() for _ in range(NUM_BLOCKS))
        self.num_batches = 0

    def forward(self, h_BTD: Tensor) -> Tensor:
        self.num_batches += 1
        image_BTD = h_BTD.cos() if self.num_batches % 2 else None
        for block in self.blocks:
            h_BTD = block(h_BTD, image_BTD)
        return h_BTD


LENGTHS = (64, 8192, 300, 65)


def lengths_step(model: nn.Module, index: int) -> Tensor:
    """Train on a batch of another length in each step."""
    loss = model(features(1, LENGTHS[index % len(LENGTHS)], WIDTH)).square().mean()
    loss.backward()
    return loss


def half_step(model: nn.Module, index: int) -> Tensor:
    """Train on features in bfloat16."""
    loss = model(features().bfloat16().requires_grad_()).float().square().mean()
    loss.backward()
    return loss


def watched_step(model: nn.Module, index: int) -> Tensor:
    """Let torch look for operators whose gradients are NaN."""
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        return feature_step(model, index)


def two_forwards_step(model: nn.Module, index: int) -> Tensor:
    """Run two forwards before their backwards."""
    losses = [model(features()).square().mean() for _ in range(2)]
    for loss in losses:
        loss.backward()
    return losses[0] + losses[1]


def four_batches_step(model: nn.Module, index: int) -> Tensor:
    """Add up the gradients of four micro-batches."""
    return torch.stack([feature_step(model, index).detach() for _ in range(4)]).sum()


def swapped_step(model: nn.Module, index: int) -> Tensor:
    """Give every parameter another storage between forward and backward."""
    loss = model(features()).square().mean()
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    loss.backward()
    return loss


def _stacked(blocks: Iterable[type[nn.Module]]) -> dict[str, Case]:
    return {
        (block.__doc__ or "").splitlines()[0].rstrip("."): Case(build=stack_of(block))
        for block in blocks
    }


KINDS = {
    **_stacked(
        (
            Squares,
            LastHolder,
            Often,
            FourBit,
            EveryDtype,
            Quantized,
            FromInference,
            Recursive,
            Starved,
        )
    ),
    "a mask and a learned tensor in float32": Case(build=stack_of(Upcast), step=half_step),
    "a subclass of several parts": Case(
        build=stack_of(Composite), step=four_batches_step, num_forwards=4, num_backwards=4
    ),
    "nested tensors": Case(build=stack_of(Ragged, layout=torch.strided)),
    "jagged tensors": Case(build=stack_of(Ragged, layout=torch.jagged)),
    "blocks that get a nested tensor": Case(build=RaggedStack),
    "another default dtype in forward": Case(build=stack_of(Positions), step=doubled_step),
    "other settings of libraries in forward": Case(build=stack_of(Convolved), step=tuned_step),
    "a gradient in forward": Case(build=stack_of(Forces, is_differentiable=False)),
    "a gradient in forward that is differentiated": Case(
        build=stack_of(Forces, is_differentiable=True)
    ),
    "a mode of the program's around forward": Case(build=stack_of(Squares), step=halved_step),
    "a mode of the program's around backward": Case(
        build=stack_of(Squares), step=halved_backward_step
    ),
    "a small buffer written through .data": Case(
        build=stack_of(Updated, num_rows=1), step=two_forwards_step
    ),
    "a large buffer written through .data": Case(
        build=stack_of(Updated, num_rows=1024), step=two_forwards_step
    ),
    "a table written through .data between blocks": Case(build=UpdatedTable),
    "one small buffer for results of all blocks": Case(build=lambda: Scratch(1)),
    "one large buffer for results of all blocks": Case(build=lambda: Scratch(1024)),
    "an unseen write to what recipes start from": Case(build=stack_of(Unseen, is_read_again=False)),
    "an unseen write that is read": Case(build=stack_of(Unseen, is_read_again=True)),
    "a block that raises and is forgiven": Case(build=Forgiving),
    "activations that leave their block": Case(build=Collecting),
    "a branch for some batches": Case(build=SeeingStack),
    "lengths from 64 to 8192": Case(build=stack_of(Gated), step=lengths_step),
    "torch's own search for NaNs": Case(build=stack_of(Gated), step=watched_step),
    "parameters swapped before backward": Case(build=stack_of(Gated), step=swapped_step),
}
"""By what is odd about them."""
