"""Every name of torch that is not public and that ebbtide needs, in one place.

All of them exist in torch 2.11 to 2.13; a version that drops one fails here at import or in the
tests of this module, not in the middle of somebody's run.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from operator import attrgetter
from types import FrameType, FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._C._profiler import _RecordFunctionFast
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

if TYPE_CHECKING or torch.distributed.is_available():
    from torch.distributed.tensor import DTensor
else:

    class DTensor(Tensor):
        """A class without tensors, where torch was built without `torch.distributed`."""


_VERSIONS = torch._C.DispatchKey.ADInplaceOrView


def pause_dispatch() -> AbstractContextManager[Any]:
    """Return a guard under which no dispatch mode sees the calls of this thread."""
    return torch._C._DisableTorchDispatch()


def pause_autocast() -> AbstractContextManager[Any]:
    """Return a guard under which autocast casts nothing, on any device."""
    return torch._C._DisableAutocast()


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of torch on which the bits of a result depend."""

    name: str
    get: Callable[[], Any]
    set: Callable[[Any], None]


def _precision(backend: str, op: str) -> Setting:
    """Return how float32 products of a kind are computed, such as in TF32."""

    def get() -> Any:
        return torch._C._get_fp32_precision_getter(backend, op)

    def set_to(value: Any) -> None:
        # What is inherited is put back as inherited: only what comes out can be asked for.
        torch._C._set_fp32_precision_setter(backend, op, "none")
        if get() != value:
            chosen = "ieee" if value == "none" else value  # nothing was asked for anywhere
            torch._C._set_fp32_precision_setter(backend, op, chosen)

    return Setting(f"float32 precision of {backend} {op}", get, set_to)


def _set_determinism(value: bool) -> None:
    warn_only = torch._C._get_deterministic_algorithms_warn_only()
    torch._C._set_deterministic_algorithms(value, warn_only=warn_only)


_EVERYWHERE = (
    Setting("default dtype", torch.get_default_dtype, torch.set_default_dtype),
    Setting("deterministic algorithms", torch._C._get_deterministic_algorithms, _set_determinism),
)

SETTINGS = {
    "cuda": (
        *_EVERYWHERE,
        _precision("cuda", "matmul"),
        _precision("cuda", "conv"),
        Setting("cudnn", torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
        Setting("cudnn benchmark", torch._C._get_cudnn_benchmark, torch._C._set_cudnn_benchmark),
        Setting(
            "cudnn deterministic",
            torch._C._get_cudnn_deterministic,
            torch._C._set_cudnn_deterministic,
        ),
        Setting(
            "float16 reductions of cuBLAS",
            torch._C._get_cublas_allow_fp16_reduced_precision_reduction,
            lambda value: torch._C._set_cublas_allow_fp16_reduced_precision_reduction(*value),
        ),
        Setting(
            "bfloat16 reductions of cuBLAS",
            torch._C._get_cublas_allow_bf16_reduced_precision_reduction,
            lambda value: torch._C._set_cublas_allow_bf16_reduced_precision_reduction(*value),
        ),
        Setting(
            "float16 accumulation of cuBLAS",
            torch._C._get_cublas_allow_fp16_accumulation,
            torch._C._set_cublas_allow_fp16_accumulation,
        ),
        Setting(
            "BLAS library",
            torch._C._get_blas_preferred_backend,
            torch._C._set_blas_preferred_backend,
        ),
    ),
    "cpu": (
        *_EVERYWHERE,
        _precision("mkldnn", "matmul"),
        _precision("mkldnn", "conv"),
        Setting("mkldnn", torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
        Setting(
            "mkldnn deterministic",
            torch._C._get_mkldnn_deterministic,
            torch._C._set_mkldnn_deterministic,
        ),
        Setting("threads", torch.get_num_threads, torch.set_num_threads),
    ),
}
"""By the device's type: what decides, beside its inputs, which bits an operator returns."""


def never_compile(function: FunctionType) -> None:
    """Let `torch.compile` leave a function alone, and all that it calls.

    As `torch.compiler.disable` does, but at no cost in each call: that turns the compiler off and
    on again around it.
    """
    native: Any = torch._C  # torch declares no type for its `_dynamo`
    frames = native._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))


def is_top_mode(mode: TorchDispatchMode) -> bool:
    """Return whether `mode` is the dispatch mode that was entered last in this thread."""
    return _get_current_dispatch_mode() is mode


def is_active_mode(mode: TorchDispatchMode) -> bool:
    """Return whether `mode` sees the calls of this thread, whatever was entered since."""
    return any(entered is mode for entered in _get_current_dispatch_mode_stack())


def active_modes() -> tuple[TorchDispatchMode, ...]:
    """Return the dispatch modes that see the calls of this thread, in the order of entry."""
    if not torch._C._len_torch_dispatch_stack():
        return ()
    return tuple(_get_current_dispatch_mode_stack())


@contextmanager
def under_modes(modes: Sequence[TorchDispatchMode]) -> Generator[None]:
    """Let these dispatch modes alone see the calls of this thread; none is entered anew."""
    with _disable_current_modes():
        for mode in modes:
            _push_mode(mode)
        try:
            yield
        finally:
            for _ in modes:
                _pop_mode()


def pop_pack_hook(pack: Callable[[Tensor], Any]) -> None:
    """Leave the saved-tensor hooks of `pack`, if they were entered last in this thread."""
    native: Any = torch._C  # torch declares no type for its `_autograd`
    hooks = native._autograd._top_saved_tensors_default_hooks(True)
    if hooks is not None and hooks[0] == pack:
        native._autograd._pop_saved_tensors_default_hooks()


def frame_of_module_call() -> FrameType | None:
    """Return the frame in which torch runs the module of the hook that calls this, or None.

    It ends with the module's forward, whatever ended that.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") != nn.Module.__module__:
        frame = frame.f_back
    return frame


def has_ended(frame: FrameType) -> bool:
    """Return whether a frame has ended, on whichever thread; its variables are dropped then."""
    try:
        frame.clear()
    except RuntimeError:  # it cannot be cleared while it runs
        return False
    return True


def post_accumulate_hooks_of(parameter: Tensor) -> Any:
    """Return the hooks that run once a parameter's gradient is there; empty or None without any."""
    return parameter._post_accumulate_grad_hooks  # pyright: ignore[reportPrivateUsage]


def alias_of(tensor: Tensor) -> Tensor:
    """Return `tensor` detached, with the same version counter, also below autograd.

    A plain `detach()` inside a dispatch mode gets a version counter of its own, so that later
    writes to the original would go unseen.
    """
    if not torch._C._dispatch_tls_is_dispatch_key_excluded(_VERSIONS):
        return tensor.detach()
    torch._C._dispatch_tls_set_dispatch_key_excluded(_VERSIONS, False)
    try:
        return tensor.detach()
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(_VERSIONS, True)


def local_part_of(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor itself, not a view of it that autograd knows."""
    dtensor: Any = tensor
    return dtensor._local_tensor


def spec_of(tensor: Tensor) -> Any:
    """Return how a DTensor lies over the ranks."""
    dtensor: Any = tensor
    return dtensor._spec


def dtensor_of(local: Tensor, spec: Any) -> Tensor:
    """Return a DTensor over a local part, which autograd knows nothing of."""
    make: Any = DTensor  # its stub has the arguments of its `__init__`
    return make(local, spec, requires_grad=False)


def store_of(group: ProcessGroup) -> Any:
    """Return the key-value store through which the ranks of a group found each other."""
    return group.get_group_store()


def tensor_tables(module: nn.Module) -> tuple[Mapping[str, Tensor | None], ...]:
    """Return a module's own parameters and buffers; torch's generators take ten times as long."""
    return module._parameters, module._buffers


def has_gradient_hook(parameter: Tensor) -> bool:
    """Return whether something runs once a parameter has got its gradient."""
    return bool(parameter._post_accumulate_grad_hooks)


def pre_hooks_of(module: nn.Module) -> tuple[Callable[..., Any], ...]:
    """Return what runs before a module's forward."""
    return tuple(module._forward_pre_hooks.values())


storage_address: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
"""Returns the address of a storage object, unique among those alive or weakly held."""


def conj_view(tensor: Tensor) -> Tensor:
    """Return `tensor` with its conjugate bit turned."""
    return torch._conj(tensor)


def neg_view(tensor: Tensor) -> Tensor:
    """Return `tensor` with its negative bit turned."""
    return torch._neg_view(tensor)


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is strided bytes in memory, and counts the writes to them.

    Sparse and zero tensors have no such bytes, nested ones no strides, and quantised ones more than
    their bytes. What was made in inference mode counts no writes.
    """
    return tensor.layout is torch.strided and not (
        tensor._is_zerotensor() or tensor.is_nested or tensor.is_quantized or tensor.is_inference()
    )


def size_of(tensor: Tensor) -> torch.Size:
    """Return the shape of a tensor; of a nested one, which has none, the number of its elements."""
    return torch.Size((tensor.numel(),)) if tensor.is_nested else tensor.shape


def is_in_backward() -> bool:
    """Return whether this thread runs autograd's backward pass now."""
    return torch._C._current_graph_task_id() != -1


def current_autograd_node() -> int:
    """Return the number of the autograd node that runs now in this thread; -1 outside of any."""
    node: Any = torch._C._current_autograd_node()
    return -1 if node is None else node._sequence_nr()


def is_in_custom_backward() -> bool:
    """Return whether the backward of a custom `autograd.Function` runs in this thread."""
    return isinstance(torch._C._current_autograd_node(), torch.autograd.function.FunctionCtx)


class SameHook:
    """A hook as a key: equal to itself alone, whatever its class says."""

    __slots__ = ("_hook",)

    def __init__(self, hook: Any) -> None:
        self._hook = hook

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SameHook) and other._hook is self._hook

    def __hash__(self) -> int:
        return id(self._hook)


def hooks_in(block: nn.Module) -> tuple[tuple[str, str, SameHook], ...]:
    """Return every hook of a module and of those in it, by module path and table."""
    return tuple(
        (path, table, SameHook(hook))
        for path, module in block.named_modules()
        for table in _HOOK_TABLES
        for hook in module.__dict__[table].values()
    )


_HOOK_TABLES = (
    "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks",
)  # fmt: skip


def call_after_backward(callback: Callable[[], None]) -> None:
    """Call `callback` when the backward pass that runs now has ended."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


_native: Any = torch._C  # torch declares no type for its `_nn`
silu: Callable[..., Tensor] = _native._nn.silu
gelu: Callable[..., Tensor] = _native._nn.gelu
"""As torch calls them; the functions in `torch.nn.functional` look for other tensor types first."""


def is_operator(func: Any) -> bool:
    """Return whether `func` is an operator overload with a schema."""
    return isinstance(func, torch._ops.OpOverload)


def schema_of(func: Any) -> Any:
    """Return the schema of an operator overload."""
    return func._schema


def is_compiled(module: nn.Module) -> bool:
    """Return whether calling `module` runs code of `torch.compile`."""
    return module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"


def mark_range(name: str) -> AbstractContextManager[Any]:
    """Return a range that profilers record; without one it takes a microsecond.

    `torch.profiler.record_function` would call operators, which dispatch modes see and record.
    """
    return _RecordFunctionFast(name)


def compiled_call_of(module: nn.Module) -> Callable[..., Any] | None:
    """Return what `module.compile()` put in place of the module's call; None without it."""
    return module._compiled_call_impl


def set_compiled_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Let torch run `call` where `module` is called; None: the module's hooks and forward."""
    module._compiled_call_impl = call


def new_block_call(name: str) -> Callable[..., Any]:
    """Return a function of a module and its arguments that runs the module's hooks and forward.

    Each has a code object of its own, by which dynamo keeps what it compiled. A lambda, since
    dynamo would trace into whatever checks types are put around a function that has a name.
    """
    call: Any = lambda module, args, kwargs: module._call_impl(*args, **kwargs)  # noqa: E731
    return FunctionType(call.__code__.replace(co_name=name), {"__builtins__": __builtins__}, name)


def partition_by_min_cut(joint: Any, inputs: Any, **options: Any) -> tuple[Any, Any]:
    """Cut a joint graph in two as torch does, by the tags on its nodes."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    return min_cut_rematerialization_partition(joint, inputs, **options)


def allow_whole_budget() -> AbstractContextManager[Any]:
    """Return a guard under which the partitioner recomputes nothing to save memory by itself."""
    from torch._functorch import config

    return config.patch(activation_memory_budget=1.0)


def compile_by_inductor(
    graph: Any, inputs: Any, partition: Callable[..., tuple[Any, Any]]
) -> Callable[..., Any]:
    """Compile a dynamo graph to generated code, cut in two by `partition`."""
    from torch._functorch import config as functorch_config
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class Partition(CustomPartitionerFn):
        def __call__(self, joint: Any, joint_inputs: Any, **options: Any) -> tuple[Any, Any]:
            return partition(joint, joint_inputs, **options)

        def uuid(self) -> str:
            return "ebbtide"  # the cache below it goes by the halves

        def __reduce__(self) -> tuple[Any, ...]:
            return str, ("ebbtide",)  # a part of that cache's key

    # A whole function from that cache would come without a cut, and nothing be known of it.
    with (
        config.patch(custom_partitioner_fn=Partition()),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        compiled: Any = compile_fx(graph, inputs)
        return compiled


def compile_to_eager(
    graph: Any, inputs: Any, partition: Callable[..., tuple[Any, Any]]
) -> Callable[..., Any]:
    """Run the traced graph of a dynamo graph as it is, cut in two by `partition`."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop

    return aot_autograd(fw_compiler=boxed_nop, partition_fn=partition)(graph, inputs)


def inner_module(module: nn.Module) -> nn.Module:
    """Return the module that `torch.compile(module)` wrapped; any other one is returned as it is.

    Of that alone are the class and the forward of the user's.
    """
    if type(module).__name__ != "OptimizedModule":
        return module
    inner = module._orig_mod
    assert isinstance(inner, nn.Module), "bug in ebbtide"
    return inner


def uses_cuda_graphs(module: nn.Module) -> bool:
    """Return whether a compiled module was compiled to run as CUDA graphs."""
    owner: Any = module if module._compiled_call_impl is None else module._compiled_call_impl
    describe = getattr(owner, "get_compiler_config", None)
    config = None if describe is None else describe()
    return bool(config) and bool(config.get("triton.cudagraphs", False))


def count_ooms(device: torch.device) -> int:
    """Return how often torch's allocator has run out of a CUDA device's memory so far."""
    # `memory_stats` sorts all counters into a new table first.
    counters: Any = torch.cuda.memory_stats_as_nested_dict(device)
    return int(counters["num_ooms"]) if counters else 0


def sleep_on_device(num_cycles: int) -> None:
    """Keep the current CUDA stream busy for so many clock cycles, with nothing."""
    torch.cuda._sleep(num_cycles)  # pyright: ignore[reportPrivateUsage]
