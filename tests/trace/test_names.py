"""What the names of profilers mean."""

import pytest

from ebbtide.timeline import HostMemory, Lane
from ebbtide.trace.names import (
    activation_in,
    activation_of,
    lane_of_copy,
    lane_of_kernel,
    name_scope,
    plain_call,
    plain_kernel,
    step_of,
)


@pytest.mark.parametrize(
    ("name", "lane", "memory"),
    [
        ("Memcpy DtoH (Device -> Pinned)", Lane.COPY_OUT, HostMemory.PINNED),
        ("Memcpy HtoD (Pageable -> Device)", Lane.COPY_IN, HostMemory.PAGEABLE),
        ("Memcpy DtoD (Device -> Device)", Lane.COMPUTE, HostMemory.UNKNOWN),
        ("Memcpy PtoP (Device -> Device)", Lane.COLLECTIVE, HostMemory.UNKNOWN),
        ("MemcpyD2H", Lane.COPY_OUT, HostMemory.UNKNOWN),
        ("MemcpyH2D", Lane.COPY_IN, HostMemory.UNKNOWN),
        ("CopyDeviceToHost", Lane.COPY_OUT, HostMemory.UNKNOWN),
        ("CopyHostToDevice", Lane.COPY_IN, HostMemory.UNKNOWN),
    ],
)
def test_copies(name: str, lane: Lane, memory: HostMemory) -> None:
    copied = lane_of_copy(name)
    assert copied is not None
    assert (copied.lane, copied.host_memory) == (lane, memory)


@pytest.mark.parametrize("name", ["gemm", "Memset (Device)", "loop_copy_fusion", "wrapped_copy"])
def test_kernels_are_no_copies(name: str) -> None:
    assert lane_of_copy(name) is None


def test_only_the_kernels_of_libraries_communicate() -> None:
    assert lane_of_kernel("ncclDevKernel_ReduceScatter_Sum_bf16") is Lane.COLLECTIVE
    assert lane_of_kernel("loop_all_gather_fusion") is Lane.COMPUTE
    assert lane_of_kernel("void at::native::reduce_kernel<512, 1>") is Lane.COMPUTE


def test_versions_of_calls_are_cut_off() -> None:
    assert plain_call("cudaMemcpyAsync_v3020") == "cudaMemcpyAsync"
    assert plain_call("cudaLaunchKernel") == "cudaLaunchKernel"


@pytest.mark.parametrize("name", ["ProfilerStep#4", "step 4", "train_step_4", "Iteration: 12"])
def test_steps(name: str) -> None:
    assert step_of(name) == name


@pytest.mark.parametrize("name", ["Optimizer.step#AdamW.step", "step", "a step 4 of many"])
def test_what_is_no_step(name: str) -> None:
    assert step_of(name) is None


@pytest.mark.parametrize(
    ("name", "activation"),
    [
        ("ebbtide: evict h.0.mlp", "h.0.mlp"),
        ("jit(step)/ebbtide: fetch h.1 x", "h.1 x"),
        ("ebbtide: evict ", None),
        ("ebbtide: step", None),
        ("evict h.0", None),
    ],
)
def test_activations(name: str, activation: str | None) -> None:
    assert activation_of(name) == activation


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        (
            "void at::native::vectorized_elementwise_kernel<8, at::native::FillFunctor<"
            "c10::BFloat16>, std::array<char*, 1ul> >(int, at::native::FillFunctor<c10::BFloat16>, "
            "std::array<char*, 1ul>)",
            "vectorized_elementwise_kernel<8, FillFunctor<BFloat16>, array<char*, 1ul> >",
        ),
        (
            "void at::native::(anonymous namespace)::copy<at::native::(anonymous namespace)::Opaque"
            "<8u>, 2>(at::native::(anonymous namespace)::Opaque<8u>*)",
            "copy<Opaque<8u>, 2>",
        ),
        (
            "void at::native::unrolled<at::native::direct_copy(at::Iter&)::{lambda()#3}::operator()"
            "() const::{lambda(float)#1}>(int)",
            "unrolled<direct_copy(Iter&)::{lambda()#3}::operator()() const::{lambda(float)#1}>",
        ),
        ("nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NTN", None),
        ("Memcpy DtoH (Device -> Pinned)", None),
        ("model.layers.0.self_attn:add#2", None),
        ("void (a", "(a"),
        ("void a)", "a)"),
        ("", None),
    ],
)
def test_a_kernels_name_for_people(name: str, plain: str | None) -> None:
    assert plain_kernel(name) == (name if plain is None else plain)


@pytest.mark.parametrize(
    ("scopes", "name"),
    [
        (
            f"jit(f)/jvp()/while/body/mlp/{name_scope('mlp.dot_general.0')}/dot_general",
            "mlp.dot_general.0",
        ),
        (f"jit(f)/transpose(jvp({name_scope('input')}))/add", "input"),
        (f"{name_scope('input')}/jit(block)/{name_scope('a/b: c')}/dot", "a/b: c"),
        (name_scope("user's (own)"), "user's _own_"),
        ("jit(f)/my_ebbtide(x)/add", None),
        ("jit(f)/ebbtide()/add", None),
        ("", None),
    ],
)
def test_the_activation_of_the_innermost_scope(scopes: str, name: str | None) -> None:
    assert activation_in(scopes) == name
