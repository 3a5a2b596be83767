"""One layer of a model as op calls: what it makes and keeps, for each way of running it.

Three implementations, since they keep different bytes of the same layer:

- `fused`: one kernel each for norms, attention, and the product after gate and up, rotary
  embeddings with the projections before them; what published formulas count.
- `eager`: Hugging Face's modules op by op, with torch's fused attention (`eager.py`).
- `compiled`: as fused, but norms keep a number for each token, and the block is one call.

Attention may also be `matrix`, as before flash attention: scores and their softmax in full.
"""

# T tokens, D model width, F width of the MLP, A heads, E experts

from dataclasses import dataclass

from ebbtide.block import OpKind
from ebbtide.catalog.calls import INPUT, Call, Output
from ebbtide.catalog.exchanges import pass_round, send_to_experts, spread, sum_up
from ebbtide.catalog.form import Attention, Form, Implementation
from ebbtide.catalog.ops import (
    FP32_BYTES,
    INT64_BYTES,
    make_attention,
    make_dropout,
    make_elementwise,
    make_input,
    make_layer_norm,
    make_linear,
    make_rms_norm,
    make_sum,
)
from ebbtide.catalog.shapes import Family, Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """What one layer does."""

    calls: tuple[Call, ...]
    """In the order of forward."""
    lora_parameters: int
    """Of its adapters on this device."""


def make_layer(shape: Shape, layer: int, form: Form) -> Layer:
    """Return what the layer, counted from 0, does.

    Unchecked: that heads and widths divide by the tensor-parallel degree, and that the
    implementation is one that is worked out for the family; `estimate` checks both.
    """
    # Only here: `eager` is written in terms of this module.
    from ebbtide.catalog.eager import EagerBuilder

    kind = EagerBuilder if form.implementation is Implementation.EAGER else Builder
    builder = kind(shape, form)
    builder.build(layer)
    return Layer(calls=tuple(builder.calls), lora_parameters=builder.lora_parameters)


class Builder:
    """Collects the calls of a layer with fused kernels."""

    def __init__(self, shape: Shape, form: Form) -> None:
        self.shape, self.form = shape, form
        self.calls: list[Call] = []
        self.lora_parameters = 0
        self._gathered: set[str] = set()

    def build(self, layer: int) -> None:
        """Collect the calls of one layer."""
        shape, D = self.shape, self.shape.hidden
        T = self.form.shared_tokens
        self.calls.append(make_input(T, D, width_bytes=self.form.width_bytes))
        if shape.family is Family.GPT2:
            self._build_gpt2()
            return
        normed = self.norm(".input_layernorm", INPUT, T, D)
        if shape.family is Family.DEEPSEEK:
            self._latent_attention(normed)
        else:
            self._grouped_attention(normed)
        self.linear(".self_attn.o_proj", ".self_attn:out", shape.value_width, D, row=True)
        self.sum(".residual", INPUT, ".self_attn.o_proj")
        normed = self.norm(".post_attention_layernorm", ".residual", T, D)
        if shape.has_experts(layer):
            self.sum(".output", ".residual", self._experts(normed))
        else:
            self.sum(".output", ".residual", self.mlp(".mlp", normed, shape.ffn))

    # Parts that an implementation may replace.

    def norm(self, name: str, source: str, T: int, D: int) -> str:
        """Collect an RMS norm; returns the name of its output."""
        call = make_rms_norm(name, source, T, D, width_bytes=self.form.width_bytes)
        if self.form.implementation is Implementation.COMPILED:
            rstd = Output(suffix=":rstd", num_bytes=T * FP32_BYTES, has_gradient=False)
            call = Call(
                name=name,
                op=call.op,
                kind=call.kind,
                reads=call.reads,
                outputs=(*call.outputs, rstd),
                uses=(*call.uses, name + ":rstd"),
            )
        self.calls.append(call)
        return name

    def rotary(self, name: str, num_elements: int) -> str:
        """Collect a rotary embedding: it is part of the projection before it."""
        return name

    def product(self, name: str, F: int, T: int, scale: str | None) -> str:
        """Collect the activation of gate, times up."""
        gate, up = name + ".gate_proj", name + ".up_proj"
        factors = (gate, up) if scale is None else (gate, up, scale)
        self.elementwise(name + ".product", factors, T * F, op="aten.mul", uses=factors)
        return name + ".product"

    def gelu(self, name: str, source: str, num_elements: int) -> str:
        """Collect GELU."""
        self.elementwise(name, (source,), num_elements, op="aten.gelu", uses=(source,))
        return name

    # Parts that all share.

    def elementwise(
        self,
        name: str,
        reads: tuple[str, ...],
        num_elements: int,
        *,
        op: str,
        uses: tuple[str, ...] = (),
        width_bytes: int = 0,
        has_gradient: bool = True,
    ) -> None:
        """Collect a cheap op."""
        self.calls.append(
            make_elementwise(
                name,
                reads,
                num_elements,
                op=op,
                uses=uses,
                width_bytes=width_bytes or self.form.width_bytes,
                has_gradient=has_gradient,
            )
        )

    def sum(self, name: str, left: str, right: str) -> None:
        """Collect a residual sum."""
        self.calls.append(
            make_sum(
                name,
                (left, right),
                self.form.shared_tokens,
                self.shape.hidden,
                width_bytes=self.form.width_bytes,
            )
        )

    def linear(
        self,
        name: str,
        source: str,
        N: int,
        M: int,
        *,
        row: bool = False,
        is_split: bool = True,
        tokens: int = 0,
    ) -> None:
        """Collect a product with a weight of N x M, which tensor-parallel ranks split.

        Args:
            name: Of the call and its output.
            source: What it reads.
            N: Rows of the whole weight.
            M: Columns of the whole weight.
            row: Ranks split the rows, and sum the outputs up; otherwise they split the columns.
            is_split: Whether ranks split it at all.
            tokens: Of its input; all of the device's by default.
        """
        form = self.form
        T, t = tokens or form.tokens, form.tensor_parallel if is_split else 1
        n, m = (N // t, M) if row else (N, M // t)
        given = form.shared_tokens if row else T
        op = "aten.addmm" if self.shape.family is Family.GPT2 else "aten.mm"
        width = form.width_bytes
        rank = form.lora_rank
        base = name + ".base_layer" if rank else name
        product = make_linear(
            base,
            source,
            T,
            n,
            m,
            op=op,
            width_bytes=width,
            output_tokens=given,
            is_frozen=bool(rank),
        )
        if is_split:
            product = sum_up(product, form, M) if row else self._spread(product, source, N)
        if not rank:
            self.calls.append(product)
            return
        # The frozen weight has no gradient, so that its product asks for nothing.
        self.calls.append(_without_uses(product))
        self.calls.append(make_linear(name + ".lora_A", source, T, n, rank, width_bytes=width))
        self.calls.append(
            make_linear(
                name + ".lora_B",
                name + ".lora_A",
                T,
                rank,
                m,
                width_bytes=width,
                output_tokens=given,
            )
        )
        self.calls.append(make_sum(name, (base, name + ".lora_B"), given, m, width_bytes=width))
        self.lora_parameters += rank * (n + m)

    def attention(
        self, name: str, sources: tuple[str, ...], *, query_width: int, value_width: int
    ) -> None:
        """Collect attention, of this device's heads; its output is `name:out`."""
        form, t = self.form, self.form.tensor_parallel
        A = self.shape.heads // t
        if form.attention is Attention.MATRIX:
            self._matrix_attention(name, sources, query_width // t, value_width // t)
            return
        call = make_attention(
            name,
            sources,
            form.tokens,
            heads=A,
            query_width=query_width // t,
            value_width=value_width // t,
            width_bytes=form.width_bytes,
            context=self._keys_seen(),
        )
        self.calls.append(pass_round(call, form, self.shape))

    def _spread(self, call: Call, source: str, N: int) -> Call:
        """Add what it takes that all tensor-parallel ranks read `source`; the first reader pays."""
        is_first = source not in self._gathered
        self._gathered.add(source)
        return spread(call, self.form, N, is_first=is_first)

    def _keys_seen(self) -> int:
        """Keys that a query meets, twice the mean of those that the mask leaves."""
        window, context = self.shape.window, self.form.context
        if not window or window >= context:
            return context
        return window * (2 * context - window) // context

    def _matrix_attention(
        self, name: str, sources: tuple[str, ...], query_width: int, value_width: int
    ) -> None:
        form, T = self.form, self.form.tokens
        num_scores = T * form.context * (self.shape.heads // form.tensor_parallel)
        scores, weights = name + ".scores", name + ".softmax"
        keys, values = sources[:2], sources[-1:]
        product = Call(
            name=scores,
            op="aten.bmm",
            kind=OpKind.MATMUL,
            reads=keys,
            outputs=(Output(num_bytes=num_scores * form.width_bytes),),
            uses=keys,
            flops=2 * T * form.context * query_width,
        )
        self.calls.append(pass_round(product, form, self.shape))
        self.elementwise(weights, (scores,), num_scores, op="aten._softmax", uses=(weights,))
        if self.shape.family is Family.GPT2:
            self._dropout(name + ".attn_dropout", weights, num_scores, 1)
            weights = name + ".attn_dropout:out"
        self.calls.append(
            Call(
                name=name,
                op="aten.bmm",
                kind=OpKind.MATMUL,
                reads=(weights, *values),
                outputs=(Output(suffix=":out", num_bytes=T * value_width * form.width_bytes),),
                uses=(weights, *values),
                flops=2 * T * form.context * value_width,
            )
        )

    def _dropout(self, name: str, source: str, T: int, D: int) -> None:
        self.calls.append(
            make_dropout(
                name,
                source,
                T,
                D,
                width_bytes=self.form.width_bytes,
                is_rerun=self.form.is_rerun,
            )
        )

    def _build_gpt2(self) -> None:
        shape, form, T = self.shape, self.form, self.form.shared_tokens
        D, F = shape.hidden, shape.ffn
        width = form.width_bytes
        self.calls.append(make_layer_norm(".ln_1", INPUT, T, D, width_bytes=width))
        self.linear(".attn.c_attn", ".ln_1:out", D, 3 * D)
        self.attention(".attn", (".attn.c_attn",), query_width=D, value_width=D)
        self.linear(".attn.c_proj", ".attn:out", D, D, row=True)
        self._dropout(".attn.resid_dropout", ".attn.c_proj", T, D)
        self.sum(".residual", INPUT, ".attn.resid_dropout:out")
        self.calls.append(make_layer_norm(".ln_2", ".residual", T, D, width_bytes=width))
        self.linear(".mlp.c_fc", ".ln_2:out", D, F)
        num_elements = form.tokens * (F // form.tensor_parallel)
        activated = self.gelu(".mlp.act", ".mlp.c_fc", num_elements)
        self.linear(".mlp.c_proj", activated, F, D, row=True)
        self._dropout(".mlp.dropout", ".mlp.c_proj", T, D)
        self.sum(".output", ".residual", ".mlp.dropout:out")

    def _grouped_attention(self, normed: str) -> None:
        shape, T, t = self.shape, self.form.tokens, self.form.tensor_parallel
        D, W = shape.hidden, shape.head_width
        sources: list[str] = []
        for letter, heads in (("q", shape.heads), ("k", shape.kv_heads), ("v", shape.kv_heads)):
            name = f".self_attn.{letter}_proj"
            self.linear(name, normed, D, heads * W)
            if letter != "v":
                if shape.has_head_norms:
                    # Each head is a row of the norm.
                    name = self.norm(f".self_attn.{letter}_norm", name, T * heads // t, W)
                name = self.rotary(name, T * heads * W // t)
            sources.append(name)
        self.attention(
            ".self_attn",
            tuple(sources),
            query_width=shape.query_width,
            value_width=shape.value_width,
        )

    def _latent_attention(self, normed: str) -> None:
        shape, latents = self.shape, self.shape.latents
        assert latents is not None, "bug in ebbtide: latent attention without latents"
        D, A = shape.hidden, shape.heads
        T, given = self.form.tokens, self.form.shared_tokens
        of_rank = T * (A // self.form.tensor_parallel)
        at, kv_latent = ".self_attn", latents.key_value
        self.linear(f"{at}.q_a_proj", normed, D, latents.query, is_split=False, tokens=given)
        query = self.norm(f"{at}.q_a_layernorm", f"{at}.q_a_proj", given, latents.query)
        self.linear(f"{at}.q_b_proj", query, latents.query, shape.query_width)
        self.linear(
            f"{at}.kv_a_proj", normed, D, kv_latent + latents.rope, is_split=False, tokens=given
        )
        latent = self.norm(f"{at}.kv_a_layernorm", f"{at}.kv_a_proj", given, kv_latent)
        self.linear(f"{at}.kv_b_proj", latent, kv_latent, A * (latents.nope + latents.value))
        # Keys have a part of their own and one, rotated, that all heads share.
        self.elementwise(
            f"{at}.key",
            (f"{at}.kv_b_proj", f"{at}.kv_a_proj"),
            of_rank * (latents.nope + latents.rope),
            op="aten.cat",
        )
        self.elementwise(
            f"{at}.value", (f"{at}.kv_b_proj",), of_rank * latents.value, op="aten.clone"
        )
        self.attention(
            at,
            (f"{at}.q_b_proj", f"{at}.key", f"{at}.value"),
            query_width=shape.query_width,
            value_width=shape.value_width,
        )

    def mlp(self, name: str, source: str, F: int) -> str:
        """Collect a SwiGLU MLP; returns the name of its output."""
        T, D = self.form.tokens, self.shape.hidden
        self.linear(name + ".gate_proj", source, D, F)
        self.linear(name + ".up_proj", source, D, F)
        product = self.product(name, F // self.form.tensor_parallel, T, None)
        self.linear(name + ".down_proj", product, F, D, row=True)
        return name + ".down_proj"

    def _experts(self, source: str) -> str:
        """Collect routing and experts; combine weights are applied before the down projection."""
        experts, form = self.shape.experts, self.form
        assert experts is not None, "bug in ebbtide: a layer of experts without experts"
        T, D, R = form.tokens, self.shape.hidden, experts.num_routed
        F = experts.ffn // form.tensor_parallel
        is_frozen = bool(form.lora_rank)
        gate = make_linear(
            ".mlp.gate",
            source,
            T,
            D,
            experts.num_experts,
            width_bytes=FP32_BYTES,
            is_frozen=is_frozen,
        )
        self.calls.append(_without_uses(gate) if is_frozen else gate)
        self.calls.append(
            Call(
                name=".mlp.topk",
                op="aten.topk",
                kind=OpKind.ELEMENTWISE if form.is_rerun else OpKind.OPAQUE,
                reads=(".mlp.gate",),
                outputs=(
                    Output(suffix=":weights", num_bytes=T * R * FP32_BYTES),
                    Output(suffix=":indices", num_bytes=T * R * INT64_BYTES, has_gradient=False),
                ),
                uses=(".mlp.gate", ".mlp.topk:indices"),
            )
        )
        indices = ".mlp.topk:indices"
        dispatch = make_elementwise(
            ".mlp.dispatch",
            (source, indices),
            T * R * D,
            op="aten.index_select",
            uses=(indices,),
            width_bytes=form.width_bytes,
        )
        routed_bytes = T * R * D * form.width_bytes
        dispatch = self._spread(dispatch, source, D)
        self.calls.append(send_to_experts(dispatch, form, routed_bytes))
        at, grouped = ".mlp.experts", "aten._grouped_mm"

        def product(name: str, read: str, N: int, M: int) -> None:
            call = make_linear(
                name,
                read,
                T * R,
                N,
                M,
                op=grouped,
                width_bytes=form.width_bytes,
                is_frozen=is_frozen,
            )
            self.calls.append(_without_uses(call) if is_frozen else call)

        product(f"{at}.gate_proj", ".mlp.dispatch", D, F)
        product(f"{at}.up_proj", ".mlp.dispatch", D, F)
        self.product(at, F, T * R, ".mlp.topk:weights")
        product(f"{at}.down_proj", f"{at}.product", F, D)
        shared = ()
        if experts.shared_ffn:
            shared = (self.mlp(".mlp.shared_experts", source, experts.shared_ffn),)
        combine = make_elementwise(
            ".mlp.combine",
            (*shared, f"{at}.down_proj", indices),
            form.shared_tokens * D,
            op="aten.index_add",
            uses=(indices,),
            width_bytes=form.width_bytes,
        )
        self.calls.append(send_to_experts(sum_up(combine, form, D), form, routed_bytes))
        return ".mlp.combine"


def _without_uses(call: Call) -> Call:
    return Call(
        name=call.name,
        op=call.op,
        kind=call.kind,
        reads=call.reads,
        outputs=call.outputs,
        flops=call.flops,
        is_frozen=True,
    )
