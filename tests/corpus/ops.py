"""The op calls of transformer blocks: bytes, FLOPs, and what their backwards ask for."""

# T tokens, D model width, N and M the widths that a matmul goes from and to

from ebbtide.block import OpKind
from tests.corpus.calls import INPUT, Call, Output

BF16_BYTES = 2
FP32_BYTES = 4
INT64_BYTES = 8


def make_input(T: int, D: int) -> Call:
    return Call(
        name=INPUT, op="", kind=OpKind.INPUT, outputs=(Output(num_bytes=T * D * BF16_BYTES),)
    )


def make_linear(
    name: str,
    source: str,
    T: int,
    N: int,
    M: int,
    *,
    op: str = "aten.mm",
    width_bytes: int = BF16_BYTES,
) -> Call:
    return Call(
        name=name,
        op=op,
        kind=OpKind.MATMUL,
        reads=(source,),
        outputs=(Output(num_bytes=T * M * width_bytes),),
        uses=(source,),
        flops=2 * T * N * M,
    )


def make_rms_norm(name: str, source: str, T: int, D: int) -> Call:
    """The kernel keeps nothing of its own: it has the variance from its input again."""
    return Call(
        name=name,
        op="aten._fused_rms_norm",
        kind=OpKind.NORM,
        reads=(source,),
        outputs=(Output(num_bytes=T * D * BF16_BYTES),),
        uses=(source,),
    )


def make_layer_norm(name: str, source: str, T: int, D: int) -> Call:
    return Call(
        name=name,
        op="aten.native_layer_norm",
        kind=OpKind.NORM,
        reads=(source,),
        outputs=(
            Output(suffix=":out", num_bytes=T * D * BF16_BYTES),
            Output(suffix=":mean", num_bytes=T * FP32_BYTES, has_gradient=False),
            Output(suffix=":rstd", num_bytes=T * FP32_BYTES, has_gradient=False),
        ),
        uses=(source, name + ":mean", name + ":rstd"),
    )


def make_attention(
    name: str, sources: tuple[str, ...], T: int, *, heads: int, query_width: int, value_width: int
) -> Call:
    """Causal flash attention; the widths are those of all heads together."""
    out, log_sum_exp = ":out", ":lse"
    return Call(
        name=name,
        op="aten._scaled_dot_product_flash_attention",
        kind=OpKind.ATTENTION,
        reads=sources,
        outputs=(
            Output(suffix=out, num_bytes=T * value_width * BF16_BYTES),
            Output(suffix=log_sum_exp, num_bytes=T * heads * FP32_BYTES, has_gradient=False),
        ),
        uses=(*sources, name + out, name + log_sum_exp),
        # Two products of T x T by the width, each half empty: the mask is causal.
        flops=T * T * (query_width + value_width),
        # The gradient of the queries is summed up in fp32.
        backward_workspace_bytes=T * query_width * FP32_BYTES,
    )


def make_elementwise(
    name: str, sources: tuple[str, ...], num_elements: int, *, op: str, uses: tuple[str, ...] = ()
) -> Call:
    return Call(
        name=name,
        op=op,
        kind=OpKind.ELEMENTWISE,
        reads=sources,
        outputs=(Output(num_bytes=num_elements * BF16_BYTES),),
        uses=uses,
    )


def make_sum(name: str, sources: tuple[str, str], T: int, D: int) -> Call:
    return Call(
        name=name,
        op="aten.add",
        kind=OpKind.ELEMENTWISE,
        reads=sources,
        outputs=(Output(num_bytes=T * D * BF16_BYTES),),
        is_sum=True,
    )


def make_dropout(name: str, source: str, T: int, D: int) -> Call:
    """The mask has a byte an element."""
    return Call(
        name=name,
        op="aten.native_dropout",
        kind=OpKind.RANDOM,
        reads=(source,),
        outputs=(
            Output(suffix=":out", num_bytes=T * D * BF16_BYTES),
            Output(suffix=":mask", num_bytes=T * D, has_gradient=False),
        ),
        uses=(name + ":mask",),
    )


def make_swiglu_mlp(
    name: str,
    source: str,
    T: int,
    D: int,
    F: int,
    *,
    op: str = "aten.mm",
    scale: str | None = None,
) -> tuple[Call, ...]:
    """Gate, up, their product, which a factor for each token may scale, and down."""
    gate, up, product = name + ".gate_proj", name + ".up_proj", name + ".product"
    factors = (gate, up) if scale is None else (gate, up, scale)
    return (
        make_linear(gate, source, T, D, F, op=op),
        make_linear(up, source, T, D, F, op=op),
        make_elementwise(product, factors, T * F, op="aten.mul", uses=factors),
        make_linear(name + ".down_proj", product, T, F, D, op=op),
    )
