"""The models' blocks with cuDNN's kernel, lowered for CUDA on a machine without a GPU."""

import importlib
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from ebbtide.compare.jax.layers import AttentionKind
from ebbtide.compare.jax.model import LanguageModel
from ebbtide.compare.jax.policies import choose_blocks
from ebbtide.compare.jax.shapes import DEEPSEEK_TINY, LLAMA_TINY, Shape
from ebbtide.jax import scan_body

# B batch, T tokens
B, T = 1, 64

CUDNN = "jax._src.cudnn.fused_attention_stablehlo"


@pytest.fixture(autouse=True)
def cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let jax take the kernel though there is no GPU to ask."""
    module = importlib.import_module(CUDNN)
    for name in ("check_cudnn_version", "check_compute_capability"):
        if name not in vars(module):
            pytest.skip(f"jax {jax.__version__} asks for cuDNN in another way")
    monkeypatch.setattr(module, "check_cudnn_version", lambda: 91500)
    monkeypatch.setattr(module, "check_compute_capability", lambda _: True)
    monkeypatch.setattr(module, "is_cuda_compute_capability_equal", lambda _: False, raising=False)


WIDE = replace(DEEPSEEK_TINY, d_nope=24)
"""The kernel's heads are 8, 16 and so on wide."""


@pytest.mark.parametrize(
    ("shape", "stack", "strategy", "num_forward", "num_moved"),
    [
        (LLAMA_TINY, "layers", "offload-attention", 1, 3),
        (LLAMA_TINY, "layers", "offload", 2, 3),
        (WIDE, "moe", "offload-attention", 1, 3),
        (WIDE, "moe", "offload", 2, 6),
    ],
)
def test_the_kernel_runs_again_only_where_its_residuals_are_not_kept(
    shape: Shape, stack: str, strategy: str, num_forward: int, num_moved: int
) -> None:
    model = LanguageModel(shape, attention=AttentionKind.CUDNN, dtype=jnp.bfloat16)
    params = model.describe_params()
    x = jax.ShapeDtypeStruct((B, T, shape.d_model), jnp.bfloat16)
    chosen = choose_blocks(
        strategy,
        model,
        params,
        x,
        step=lambda *args: None,
        args=(),
        donate=(),
        budget=None,
        machine=None,
        host=None,
    )

    body = scan_body(chosen.blocks[stack])

    def find_loss(params: Any, x: Any) -> Any:
        return jnp.sum(jax.lax.scan(body, x, params)[0].astype(jnp.float32))

    traced = jax.jit(jax.grad(find_loss)).trace(params[stack], x)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    backward = text.count("__cudnn$fmhaSoftmaxBackward")
    assert backward == 1
    assert text.count("__cudnn$fmhaSoftmax") - backward == num_forward
    # Each value goes out once and comes back once.
    assert text.count("@annotate_device_placement") == 2 * num_moved
