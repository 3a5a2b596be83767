"""What the runtime may assume about an ATen operator.

Only operators named here are ever run a second time. Everything else (random operators,
uninitialised memory, collectives, operators of other libraries, operators that change their
inputs without declaring it, such as batch normalisation in training) is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from ebbtide.torch.internals import gelu, is_operator, schema_of, silu
from ebbtide.workload import OpKind

MATMULS: Final = frozenset(
    {"mm", "bmm", "addmm", "baddbmm", "linear", "matmul", "mv", "addmv", "dot", "_scaled_mm"}
    | {"convolution", "_addmm_activation", "mkldnn_linear", "_convolution"}
)
"""Products: dear to run again. Deterministic for one layout, stream and library version."""

ATTENTIONS: Final = {
    "_scaled_dot_product_flash_attention": "dropout_p",
    "_scaled_dot_product_efficient_attention": "dropout_p",
    "_scaled_dot_product_cudnn_attention": "dropout_p",
    "_scaled_dot_product_flash_attention_for_cpu": "dropout_p",
    "_scaled_dot_product_fused_attention_overrideable": "dropout_p",
    "_flash_attention_forward": "dropout_p",
    "_efficient_attention_forward": "dropout_p",
}
"""Fused attention kernels, and the argument that makes them random."""

NORMS: Final = frozenset({"native_layer_norm", "native_group_norm", "_fused_rms_norm"})
"""Fused norms with no running statistics."""

CHEAP: Final = frozenset(
    """
    abs acos acosh add addcdiv addcmul all amax amin aminmax any arange argmax argmin asin asinh
    atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift
    bitwise_xor cat ceil celu clamp clamp_max clamp_min clone complex constant_pad_nd copysign cos
    cosh diag_embed div elu embedding eq erf erfc erfinv exp exp2 expm1 eye fill flip floor
    floor_divide fmod full full_like gather ge gelu glu gt hardsigmoid hardswish hardtanh
    heaviside hypot index index_fill index_select isinf isnan lcm le leaky_relu lerp lgamma
    linalg_vector_norm log log10 log1p log2 log_sigmoid_forward log_softmax logaddexp logical_and
    logical_not logical_or logical_xor logit logsumexp lt masked_fill max maximum mean min minimum
    mish mul nan_to_num ne neg new_full new_ones new_zeros norm ones ones_like polar pow prod
    reciprocal reflection_pad1d relu relu6 remainder repeat repeat_interleave roll round rsqrt
    rsub scalar_tensor sgn sigmoid sign silu sin sinc sinh softmax softplus softshrink
    split_with_sizes_copy sqrt square stack std sub sum tan tanh threshold tril triu trunc
    upsample_nearest1d upsample_nearest2d var var_mean where xlogy zeros zeros_like _log_softmax
    _safe_softmax _softmax _to_copy
    """.split()  # noqa: SIM905
)
"""Elementwise chains, reductions, gathers and copies: pure, and nearly free to run again.

Left out on purpose: sums by atomic additions (`index_add`, `scatter_add`, `index_put`, `cumsum` on
CUDA), whose order and so whose bits vary, and selections that break ties freely (`topk`, `sort`).
"""

TENSOR_LISTS: Final = frozenset({"List[Tensor]", "List[Optional[Tensor]]"})


@dataclass(frozen=True, slots=True, kw_only=True)
class OpFacts:
    """What is known of one operator overload."""

    name: str
    """The operator's name without namespace and overload, such as `mm`."""
    kind: OpKind
    is_view: bool
    """Its outputs share the storage of an input: it is never recorded."""
    is_replayable: bool
    """It may be run again and gives the same bits (see also `random_argument`)."""
    random_argument: int
    """Position of the argument that makes it random when it is not 0; -1 when there is none."""
    written_positions: tuple[int, ...]
    """Positions of the arguments that it writes to."""
    written_names: tuple[str, ...]
    """Keyword arguments that it writes to."""
    takes_tensor_lists: bool
    """Some argument may be a list of tensors."""
    direct: Callable[..., Any]
    """Calls the same operator in less time, where its first argument is a tensor; the overload
    itself where no such way is known."""


_ATEN: Final = torch.ops.aten

_DIRECT: Final[tuple[tuple[Any, Any], ...]] = (
    (_ATEN.view.default, Tensor.view),
    (_ATEN.transpose.int, torch.transpose),
    (_ATEN.permute.default, torch.permute),
    (_ATEN.t.default, torch.t),
    (_ATEN.unsqueeze.default, torch.unsqueeze),
    (_ATEN.expand.default, Tensor.expand),
    (_ATEN.select.int, torch.select),
    (_ATEN.detach.default, torch.detach),
    (_ATEN.addmm.default, torch.addmm),
    (_ATEN.mm.default, torch.mm),
    (_ATEN.bmm.default, torch.bmm),
    (_ATEN.native_layer_norm.default, torch.native_layer_norm),
    (_ATEN.add.Tensor, torch.add),
    (_ATEN.sub.Tensor, torch.sub),
    (_ATEN.mul.Tensor, torch.mul),
    (_ATEN.div.Tensor, torch.div),
    (_ATEN.neg.default, torch.neg),
    (_ATEN.pow.Tensor_Scalar, torch.pow),
    (_ATEN.rsqrt.default, torch.rsqrt),
    (_ATEN.exp.default, torch.exp),
    (_ATEN.tanh.default, torch.tanh),
    (_ATEN.sigmoid.default, torch.sigmoid),
    (_ATEN.silu.default, silu),
    (_ATEN.gelu.default, gelu),
    (_ATEN.mean.dim, torch.mean),
    (_ATEN.clone.default, torch.clone),
)
"""Overloads, and functions of torch that call them and nothing else, but sooner: a view in 1.0 us
in place of 2.8, a sum in 1.4 in place of 2.6 (torch 2.13, on a CPU that others used as well)."""

_direct: Final[dict[int, Any]] = {id(func): call for func, call in _DIRECT}

_known: dict[int, tuple[Any, OpFacts]] = {}


def facts_of(func: Any) -> OpFacts:
    """Return what is known of `func`, an operator overload or a higher-order operator."""
    # By address, since torch hashes operators in Python; the operator is held, so that it stays.
    known = _known.get(id(func))
    if known is None:
        known = _known[id(func)] = func, _find_facts(func)
    return known[1]


def _find_facts(func: Any) -> OpFacts:
    if not is_operator(func):
        return _opaque(func)
    schema = schema_of(func)
    name = schema.name.split("::")[1]
    written = [
        (i, a) for i, a in enumerate(schema.arguments) if a.alias_info and a.alias_info.is_write
    ]
    is_view = not written and any(r.alias_info is not None for r in schema.returns)
    kind, is_replayable, random_argument = OpKind.OPAQUE, False, -1
    if torch.Tag.nondeterministic_seeded in func.tags and name not in ATTENTIONS:
        kind = OpKind.RANDOM
    elif func.namespace != "aten" or written:
        pass
    elif name in MATMULS:
        kind, is_replayable = OpKind.MATMUL, True
    elif name in ATTENTIONS:
        kind, is_replayable = OpKind.ATTENTION, True
        random_argument = [a.name for a in schema.arguments].index(ATTENTIONS[name])
    elif name in NORMS:
        kind, is_replayable = OpKind.NORM, True
    elif name in CHEAP:
        kind, is_replayable = OpKind.ELEMENTWISE, True
    return OpFacts(
        name=name,
        kind=kind,
        is_view=is_view,
        is_replayable=is_replayable,
        random_argument=random_argument,
        written_positions=tuple(i for i, a in written if not a.kwarg_only),
        written_names=tuple(a.name for _, a in written),
        takes_tensor_lists=any(str(a.type) in TENSOR_LISTS for a in schema.arguments),
        direct=_direct.get(id(func), func),
    )


def _opaque(func: Any) -> OpFacts:
    return OpFacts(
        name=str(func),
        kind=OpKind.OPAQUE,
        is_view=False,
        is_replayable=False,
        random_argument=-1,
        written_positions=(),
        written_names=(),
        takes_tensor_lists=True,
        direct=func,
    )


def is_random_call(facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether this call of an otherwise pure operator draws random numbers."""
    if facts.random_argument < 0:
        return False
    if facts.random_argument < len(args):
        return args[facts.random_argument] != 0
    return kwargs.get("dropout_p", 0.0) != 0
