"""A layer as Hugging Face's modules run it, op by op, with torch's fused attention.

Checked against what autograd saves on real modules (`tests/catalog/test_eager.py`). For the
shape of Llama 3 8B it is 196.1 KiB a token and layer, where the fused formulas have 136.1: norms
are computed in fp32 and keep their input there, and the activation function its output.
"""

from ebbtide.catalog.layers import Builder
from ebbtide.catalog.ops import FP32_BYTES


class EagerBuilder(Builder):
    """Collects the calls of a layer of `LlamaForCausalLM` and its like, or of GPT-2."""

    def norm(self, name: str, source: str, T: int, D: int) -> str:
        """Collect an RMS norm of seven ops, the inner ones in fp32."""
        is_wide = self.form.width_bytes == FP32_BYTES
        wide = source
        if not is_wide:
            wide = name + ":float"
            self.elementwise(wide, (source,), T * D, op="aten._to_copy", width_bytes=FP32_BYTES)
        square, mean, rstd = name + ":pow", name + ":mean", name + ":rsqrt"
        four = FP32_BYTES
        self.elementwise(square, (wide,), T * D, op="aten.pow", uses=(wide,), width_bytes=four)
        self.elementwise(mean, (square,), T, op="aten.mean", width_bytes=four)
        self.elementwise(rstd, (mean,), T, op="aten.rsqrt", uses=(rstd,), width_bytes=four)
        normed = name + ":mul"
        self.elementwise(
            normed, (wide, rstd), T * D, op="aten.mul", uses=(wide, rstd), width_bytes=four
        )
        if not is_wide:
            self.elementwise(name + ":cast", (normed,), T * D, op="aten._to_copy")
            normed = name + ":cast"
        # A frozen weight has no gradient to make of it.
        uses = () if self.form.lora_rank else (normed,)
        self.elementwise(name, (normed,), T * D, op="aten.mul", uses=uses)
        return name

    def rotary(self, name: str, num_elements: int) -> str:
        """Collect x cos + rotate(x) sin; the tables are constants, so that nothing is kept."""
        parts = {"cos": (name,), "rotate": (name,), "sin": (name + ":rotate",)}
        for part, reads in parts.items():
            op = "aten.cat" if part == "rotate" else "aten.mul"
            self.elementwise(f"{name}:{part}", reads, num_elements, op=op)
        out = name + ":rotary"
        self.elementwise(out, (f"{name}:cos", f"{name}:sin"), num_elements, op="aten.add")
        return out

    def product(self, name: str, F: int, T: int, scale: str | None) -> str:
        """Collect SiLU of gate, whose output is kept too, times up."""
        assert scale is None, "bug in ebbtide: experts are not worked out op by op"
        gate, up, act = name + ".gate_proj", name + ".up_proj", name + ".act_fn"
        self.elementwise(act, (gate,), T * F, op="aten.silu", uses=(gate,))
        self.elementwise(name + ".product", (act, up), T * F, op="aten.mul", uses=(act, up))
        return name + ".product"

    def gelu(self, name: str, source: str, num_elements: int) -> str:
        """Collect GPT-2's GELU, 0.5 x (1 + tanh(c (x + 0.044715 x^3))), op by op."""
        x = source
        steps: tuple[tuple[str, tuple[str, ...], str, tuple[str, ...]], ...] = (
            ("half", (x,), "aten.mul", ()),
            ("pow", (x,), "aten.pow", (x,)),
            ("scaled", (f"{name}:pow",), "aten.mul", ()),
            ("inner", (x, f"{name}:scaled"), "aten.add", ()),
            ("argument", (f"{name}:inner",), "aten.mul", ()),
            ("tanh", (f"{name}:argument",), "aten.tanh", (f"{name}:tanh",)),
            ("plus", (f"{name}:tanh",), "aten.add", ()),
        )
        for part, reads, op, uses in steps:
            self.elementwise(f"{name}:{part}", reads, num_elements, op=op, uses=uses)
        factors = (f"{name}:half", f"{name}:plus")
        self.elementwise(name, factors, num_elements, op="aten.mul", uses=factors)
        return name
