"""The op calls of transformer blocks: bytes, FLOPs, and what their backwards ask for."""

# T tokens, D model width, N and M the widths that a matmul goes from and to

from ebbtide.block import OpKind
from ebbtide.catalog.calls import INPUT, Call, Output

BF16_BYTES = 2
FP32_BYTES = 4
INT64_BYTES = 8


def make_input(T: int, D: int, *, width_bytes: int = BF16_BYTES) -> Call:
    """The residual stream as it enters the block."""
    return Call(
        name=INPUT, op="", kind=OpKind.INPUT, outputs=(Output(num_bytes=T * D * width_bytes),)
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
    output_tokens: int | None = None,
    is_frozen: bool = False,
) -> Call:
    """A product with a weight; where ranks share its sum out, each has `output_tokens` of it."""
    return Call(
        name=name,
        op=op,
        kind=OpKind.MATMUL,
        reads=(source,),
        outputs=(Output(num_bytes=(output_tokens or T) * M * width_bytes),),
        uses=(source,),
        flops=2 * T * N * M,
        is_frozen=is_frozen,
    )


def make_rms_norm(name: str, source: str, T: int, D: int, *, width_bytes: int = BF16_BYTES) -> Call:
    """The kernel keeps nothing of its own: it has the variance from its input again."""
    return Call(
        name=name,
        op="aten._fused_rms_norm",
        kind=OpKind.NORM,
        reads=(source,),
        outputs=(Output(num_bytes=T * D * width_bytes),),
        uses=(source,),
    )


def make_layer_norm(
    name: str, source: str, T: int, D: int, *, width_bytes: int = BF16_BYTES
) -> Call:
    """It keeps mean and deviation of each token."""
    return Call(
        name=name,
        op="aten.native_layer_norm",
        kind=OpKind.NORM,
        reads=(source,),
        outputs=(
            Output(suffix=":out", num_bytes=T * D * width_bytes),
            Output(suffix=":mean", num_bytes=T * FP32_BYTES, has_gradient=False),
            Output(suffix=":rstd", num_bytes=T * FP32_BYTES, has_gradient=False),
        ),
        uses=(source, name + ":mean", name + ":rstd"),
    )


def make_attention(
    name: str,
    sources: tuple[str, ...],
    T: int,
    *,
    heads: int,
    query_width: int,
    value_width: int,
    width_bytes: int = BF16_BYTES,
    context: int | None = None,
) -> Call:
    """Causal flash attention; the widths are those of all heads together.

    Each of T queries meets `context` keys, half of which the mask takes away; T by default.
    """
    out, log_sum_exp = ":out", ":lse"
    return Call(
        name=name,
        op="aten._scaled_dot_product_flash_attention",
        kind=OpKind.ATTENTION,
        reads=sources,
        outputs=(
            Output(suffix=out, num_bytes=T * value_width * width_bytes),
            Output(suffix=log_sum_exp, num_bytes=T * heads * FP32_BYTES, has_gradient=False),
        ),
        uses=(*sources, name + out, name + log_sum_exp),
        # Two products of T x T by the width, each half empty: the mask is causal.
        flops=T * (context or T) * (query_width + value_width),
        # The gradient of the queries is summed up in fp32.
        backward_workspace_bytes=T * query_width * FP32_BYTES,
    )


def make_elementwise(
    name: str,
    sources: tuple[str, ...],
    num_elements: int,
    *,
    op: str,
    uses: tuple[str, ...] = (),
    width_bytes: int = BF16_BYTES,
    has_gradient: bool = True,
) -> Call:
    """A cheap op."""
    return Call(
        name=name,
        op=op,
        kind=OpKind.ELEMENTWISE,
        reads=sources,
        outputs=(Output(num_bytes=num_elements * width_bytes, has_gradient=has_gradient),),
        uses=uses,
    )


def make_sum(
    name: str, sources: tuple[str, str], T: int, D: int, *, width_bytes: int = BF16_BYTES
) -> Call:
    """A residual sum."""
    return Call(
        name=name,
        op="aten.add",
        kind=OpKind.ELEMENTWISE,
        reads=sources,
        outputs=(Output(num_bytes=T * D * width_bytes),),
        is_sum=True,
    )


def make_dropout(
    name: str,
    source: str,
    T: int,
    D: int,
    *,
    width_bytes: int = BF16_BYTES,
    is_rerun: bool = False,
) -> Call:
    """The mask has a byte an element.

    Args:
        name: Of the call.
        source: What it reads.
        T: Tokens.
        D: Width.
        width_bytes: Of an element.
        is_rerun: Whoever runs it again restores the random state, as checkpointing does.
    """
    return Call(
        name=name,
        op="aten.native_dropout",
        kind=OpKind.ELEMENTWISE if is_rerun else OpKind.RANDOM,
        reads=(source,),
        outputs=(
            Output(suffix=":out", num_bytes=T * D * width_bytes),
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
    width_bytes: int = BF16_BYTES,
    output_tokens: int | None = None,
    is_frozen: bool = False,
) -> tuple[Call, ...]:
    """Gate, up, their product, which a factor for each token may scale, and down."""
    gate, up, product = name + ".gate_proj", name + ".up_proj", name + ".product"
    factors = (gate, up) if scale is None else (gate, up, scale)
    return (
        make_linear(gate, source, T, D, F, op=op, width_bytes=width_bytes, is_frozen=is_frozen),
        make_linear(up, source, T, D, F, op=op, width_bytes=width_bytes, is_frozen=is_frozen),
        make_elementwise(
            product, factors, T * F, op="aten.mul", uses=factors, width_bytes=width_bytes
        ),
        make_linear(
            name + ".down_proj",
            product,
            T,
            F,
            D,
            op=op,
            width_bytes=width_bytes,
            output_tokens=output_tokens,
            is_frozen=is_frozen,
        ),
    )
