"""The table of operators names what exists, and lists nothing that writes or draws."""

# B batch, H heads, T tokens, K head width

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from ebbtide.torch.internals import schema_of
from ebbtide.torch.ops import ATTENTIONS, CHEAP, MATMULS, NORMS, facts_of, is_random_call
from ebbtide.workload import OpKind

LISTED = sorted(CHEAP | MATMULS | NORMS | set(ATTENTIONS))

# Operators that some builds of torch leave out, since they come with a library.
OPTIONAL = {"mkldnn_linear"}


def overloads_of(name: str) -> list[Any]:
    packet = getattr(torch.ops.aten, name)
    return [getattr(packet, overload) for overload in packet.overloads()]


def does_write(func: Any) -> bool:
    arguments = schema_of(func).arguments
    return any(a.alias_info is not None and a.alias_info.is_write for a in arguments)


def test_no_operator_is_listed_under_two_kinds() -> None:
    assert len(LISTED) == len(CHEAP) + len(MATMULS) + len(NORMS) + len(ATTENTIONS)


@pytest.mark.parametrize("name", LISTED)
def test_every_listed_name_is_an_operator_with_an_overload_that_may_run_again(name: str) -> None:
    """A misspelt name would be stored for ever without a word."""
    if name in OPTIONAL and not hasattr(torch.ops.aten, name):
        pytest.skip("this build of torch has no such operator")
    facts = [facts_of(func) for func in overloads_of(name)]
    assert any(f.is_replayable for f in facts)
    assert {f.name for f in facts} == {name}


@pytest.mark.parametrize("name", LISTED)
def test_what_writes_or_draws_or_shares_memory_may_not_run_again(name: str) -> None:
    if name in OPTIONAL and not hasattr(torch.ops.aten, name):
        pytest.skip("this build of torch has no such operator")
    for func in overloads_of(name):
        facts = facts_of(func)
        if not facts.is_replayable:
            continue
        assert not does_write(func)
        assert not facts.written_positions and not facts.written_names
        assert not facts.is_view
        returns = schema_of(func).returns
        assert all(r.alias_info is None for r in returns)
        if torch.Tag.nondeterministic_seeded in func.tags:
            assert facts.kind is OpKind.ATTENTION and facts.random_argument >= 0


@pytest.mark.parametrize("name", LISTED)
def test_overloads_with_an_output_argument_or_in_place_are_known_to_write(name: str) -> None:
    if name in OPTIONAL and not hasattr(torch.ops.aten, name):
        pytest.skip("this build of torch has no such operator")
    for func in overloads_of(name):
        facts = facts_of(func)
        assert does_write(func) == bool(facts.written_positions or facts.written_names)


def test_kinds_are_those_of_the_lists() -> None:
    aten: Any = torch.ops.aten
    assert facts_of(aten.addmm.default).kind is OpKind.MATMUL
    assert facts_of(aten.bmm.default).kind is OpKind.MATMUL
    assert facts_of(aten.native_layer_norm.default).kind is OpKind.NORM
    assert facts_of(aten.silu.default).kind is OpKind.ELEMENTWISE
    flash = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert facts_of(flash).kind is OpKind.ATTENTION


def test_views_are_known_as_views() -> None:
    aten: Any = torch.ops.aten
    for func in (aten.view.default, aten.t.default, aten.split.Tensor, aten.expand.default):
        assert facts_of(func).is_view
        assert not facts_of(func).is_replayable


@pytest.mark.parametrize(
    "name",
    [
        "native_batch_norm", "cudnn_batch_norm", "_native_batch_norm_legit_functional",
        "empty", "empty_like", "empty_strided", "new_empty",
        "index_add", "scatter_add", "index_put", "cumsum", "topk", "sort", "histc",
    ],
)  # fmt: skip
def test_what_is_left_out_on_purpose_is_stored(name: str) -> None:
    for func in overloads_of(name):
        assert not facts_of(func).is_replayable


@pytest.mark.parametrize(
    "name", ["rand", "randn_like", "bernoulli", "native_dropout", "randperm", "multinomial"]
)
def test_random_operators_are_known_as_random(name: str) -> None:
    kinds = {facts_of(func).kind for func in overloads_of(name) if not does_write(func)}
    assert kinds == {OpKind.RANDOM}


def test_operators_of_other_libraries_and_unknown_callables_are_opaque() -> None:
    quantized: Any = torch.ops.quantized
    for func in (quantized.add.default, print):
        facts = facts_of(func)
        assert facts.kind is OpKind.OPAQUE and not facts.is_replayable
    assert facts_of(print).takes_tensor_lists


def test_lists_of_tensors_are_noticed() -> None:
    aten: Any = torch.ops.aten
    assert facts_of(aten.cat.default).takes_tensor_lists
    assert facts_of(aten.index.Tensor).takes_tensor_lists
    assert not facts_of(aten.mul.Tensor).takes_tensor_lists


class Calls(TorchDispatchMode):
    """Notes which calls are random, by operator."""

    def __init__(self) -> None:
        super().__init__()
        self.is_random: dict[str, bool] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        facts = facts_of(func)
        drawn = facts.kind is OpKind.RANDOM or is_random_call(facts, args, kwargs or {})
        self.is_random[facts.name] = self.is_random.get(facts.name, False) or drawn
        return func(*args, **(kwargs or {}))


def attention_calls(q_BHTK: Tensor, dropout: float) -> dict[str, bool]:
    with Calls() as calls:
        functional.scaled_dot_product_attention(q_BHTK, q_BHTK, q_BHTK, dropout_p=dropout)
    return calls.is_random


def test_attention_is_random_only_with_dropout() -> None:
    q_BHTK = torch.randn(2, 4, 8, 16)
    without, with_dropout = attention_calls(q_BHTK, 0.0), attention_calls(q_BHTK, 0.3)
    assert without and not any(without.values())
    assert any(with_dropout.values())


@pytest.mark.parametrize("name", sorted(ATTENTIONS))
def test_the_dropout_of_every_fused_attention_is_found_by_position_and_by_name(name: str) -> None:
    (func,) = [f for f in overloads_of(name) if f._overloadname == "default"]
    facts = facts_of(func)
    names = [a.name for a in schema_of(func).arguments]
    assert names[facts.random_argument] == ATTENTIONS[name] == "dropout_p"
    arguments = [None] * facts.random_argument
    assert is_random_call(facts, (*arguments, 0.1), {})
    assert not is_random_call(facts, (*arguments, 0.0), {})
    assert is_random_call(facts, tuple(arguments), {"dropout_p": 0.1})
    assert not is_random_call(facts, tuple(arguments), {"dropout_p": 0.0})
    assert not is_random_call(facts, tuple(arguments), {})


def test_arguments_that_are_written_are_found_by_position_and_by_name() -> None:
    aten: Any = torch.ops.aten
    assert facts_of(aten.add_.Tensor).written_positions == (0,)
    assert facts_of(aten.add.out).written_names == ("out",)
    assert facts_of(aten.add.out).written_positions == ()
    assert facts_of(aten.copy_.default).written_positions == (0,)
    assert facts_of(aten.relu_.default).written_positions == (0,)


ROW = torch.linspace(0.1, 1.2, 12)
SQUARE = ROW[:9].reshape(3, 3)
STACK = ROW.reshape(2, 2, 3)
ATEN = torch.ops.aten

DIRECT_CALLS: tuple[tuple[Any, tuple[Any, ...], dict[str, Any]], ...] = (
    (ATEN.view.default, (ROW, [3, 4]), {}),
    (ATEN.transpose.int, (STACK, 0, 2), {}),
    (ATEN.permute.default, (STACK, [2, 0, 1]), {}),
    (ATEN.t.default, (SQUARE,), {}),
    (ATEN.unsqueeze.default, (ROW, -1), {}),
    (ATEN.expand.default, (ROW[:1], [4, 5]), {}),
    (ATEN.select.int, (STACK, 1, 0), {}),
    (ATEN.detach.default, (ROW,), {}),
    (ATEN.addmm.default, (ROW[:3], SQUARE, SQUARE), {"beta": 0.5, "alpha": 2}),
    (ATEN.mm.default, (SQUARE, SQUARE), {}),
    (ATEN.bmm.default, (STACK, STACK.transpose(1, 2)), {}),
    (ATEN.native_layer_norm.default, (SQUARE, [3], ROW[:3], None, 1e-5), {}),
    (ATEN.add.Tensor, (ROW, 2.5), {"alpha": 3}),
    (ATEN.sub.Tensor, (ROW, ROW), {"alpha": 3}),
    (ATEN.mul.Tensor, (ROW, 0.5), {}),
    (ATEN.div.Tensor, (ROW, torch.tensor(3)), {}),
    (ATEN.neg.default, (ROW,), {}),
    (ATEN.pow.Tensor_Scalar, (ROW, 3), {}),
    (ATEN.rsqrt.default, (ROW,), {}),
    (ATEN.exp.default, (ROW,), {}),
    (ATEN.tanh.default, (ROW,), {}),
    (ATEN.sigmoid.default, (ROW,), {}),
    (ATEN.silu.default, (ROW,), {}),
    (ATEN.gelu.default, (ROW,), {"approximate": "tanh"}),
    (ATEN.mean.dim, (STACK, [-1], True), {"dtype": torch.float64}),
    (ATEN.clone.default, (ROW,), {"memory_format": torch.contiguous_format}),
)


class Noting(TorchDispatchMode):
    """Notes the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.seen.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("func,args,kwargs", DIRECT_CALLS, ids=lambda value: str(value)[:20])
def test_a_direct_call_runs_its_operator_with_the_same_arguments(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    direct = facts_of(func).direct
    assert direct is not func
    with torch.no_grad(), Noting() as mode:
        got = direct(*args, **kwargs)
    ((seen, seen_args, seen_kwargs),) = mode.seen
    assert seen is func
    assert len(seen_args) == len(args)
    assert all(g is a or g == a for g, a in zip(seen_args, args, strict=True))
    assert seen_kwargs == kwargs
    with torch.no_grad():
        wanted = func(*args, **kwargs)
    for left, right in zip(
        *(r if isinstance(r, tuple) else (r,) for r in (got, wanted)), strict=True
    ):
        assert torch.equal(left, right) and left.stride() == right.stride()


def test_every_direct_call_was_tried() -> None:
    tried = {func for func, _, _ in DIRECT_CALLS}
    names = {func.overloadpacket.__name__ for func in tried}
    for name in sorted(CHEAP | MATMULS | NORMS | names):
        for func in overloads_of(name) if hasattr(torch.ops.aten, name) else ():
            assert func in tried or facts_of(func).direct is func
