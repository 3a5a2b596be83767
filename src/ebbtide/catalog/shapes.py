"""The published shape of a model: what its parameters are, exactly."""

# D model width, F width of the MLP, A heads, K heads of keys and values, W head width,
# V vocabulary, E experts

import enum
from dataclasses import dataclass


@enum.unique
class Family(enum.Enum):
    """How the layers are built."""

    GPT2 = "gpt2"
    """Layer norms with biases, one projection for queries, keys and values, GELU, dropout."""
    LLAMA = "llama"
    """RMS norms, grouped heads, SwiGLU; in place of SwiGLU there may be experts."""
    DEEPSEEK = "deepseek"
    """As LLAMA, with queries, keys and values from latents (MLA)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latents:
    """Multi-head latent attention: widths of what queries, keys and values are made of."""

    query: int
    """Of the latent that queries are made of."""
    key_value: int
    """Of the latent that keys and values are made of."""
    nope: int
    """Of the part of a head's key that has no position."""
    rope: int
    """Of the part that has one."""
    value: int
    """Of a head's value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts in place of the MLP."""

    num_experts: int
    """Routed ones, in one layer."""
    num_routed: int
    """Experts that a token goes to."""
    ffn: int
    """Width of one."""
    shared_ffn: int = 0
    """Width of all shared experts together; 0: none."""
    num_dense_layers: int = 0
    """First layers that have an MLP instead."""
    has_router_bias: bool = False
    """One number for each expert, as DeepSeek-V3 has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """How many parameters a part of a model has, by how ranks share them out."""

    split: int
    """In matrices that tensor parallelism splits."""
    copied: int
    """In norms and routers, of which every tensor-parallel rank has all."""
    experts: int = 0
    """In routed experts, which expert parallelism splits as well."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.split + self.copied + self.experts


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model as its configuration file describes it."""

    name: str
    """As people say it: `llama-3.1-8b`."""
    family: Family
    """How its layers are built."""
    num_layers: int
    """Of them."""
    hidden: int
    """D, width of the residual stream."""
    heads: int
    """A, of queries."""
    kv_heads: int
    """K, of keys and values."""
    head_width: int
    """W."""
    ffn: int
    """F, width of the MLP."""
    vocab: int
    """V."""
    is_tied: bool = False
    """The head is the embedding."""
    has_head_norms: bool = False
    """Norms on each head's query and key, as Qwen3 has."""
    has_qkv_bias: bool = False
    """Biases of the projections of queries, keys and values, as Qwen2 has."""
    has_output_bias: bool = False
    """A bias of the projection after attention."""
    has_mlp_bias: bool = False
    """Biases of gate, up and down, where there is an MLP."""
    window: int = 0
    """Keys that a query sees at most; 0: all before it."""
    num_positions: int = 0
    """Rows of a learned table of positions; 0: none."""
    latents: Latents | None = None
    """Of multi-head latent attention."""
    experts: Experts | None = None
    """In place of the MLP."""
    source: str
    """Where the figures are from."""

    @property
    def class_name(self) -> str:
        """Of the model, for people."""
        return {
            Family.GPT2: "GPT2LMHeadModel",
            Family.LLAMA: "LlamaForCausalLM",
            Family.DEEPSEEK: "DeepseekV3ForCausalLM",
        }[self.family]

    def has_experts(self, layer: int) -> bool:
        """Whether this layer, counted from 0, has experts."""
        return self.experts is not None and layer >= self.experts.num_dense_layers

    @property
    def query_width(self) -> int:
        """Of all heads' queries together."""
        if self.latents is not None:
            return self.heads * (self.latents.nope + self.latents.rope)
        return self.heads * self.head_width

    @property
    def value_width(self) -> int:
        """Of all heads' outputs together."""
        if self.latents is not None:
            return self.heads * self.latents.value
        return self.heads * self.head_width

    def layer_parameters(self, layer: int) -> Parameters:
        """Count the parameters of one layer, counted from 0."""
        D = self.hidden
        if self.family is Family.GPT2:
            # Weights and biases: the projections', 3D + D + F + D.
            return Parameters(split=4 * D * D + 2 * D * self.ffn + 5 * D + self.ffn, copied=4 * D)
        split, copied = self._attention_parameters()
        if not self.has_experts(layer):
            # Of gate and up each rank has a part, of down all.
            split += 3 * D * self.ffn + (2 * self.ffn if self.has_mlp_bias else 0)
            return Parameters(split=split, copied=copied + (D if self.has_mlp_bias else 0))
        experts = self.experts
        assert experts is not None, "bug in ebbtide: a layer of experts without experts"
        router = experts.num_experts * (D + (1 if experts.has_router_bias else 0))
        return Parameters(
            split=split + 3 * D * experts.shared_ffn,
            copied=copied + router,
            experts=3 * D * experts.ffn * experts.num_experts,
        )

    def _attention_parameters(self) -> tuple[int, int]:
        D, A = self.hidden, self.heads
        latents = self.latents
        if latents is not None:
            split = (
                latents.query * self.query_width
                + latents.key_value * A * (latents.nope + latents.value)
                + self.value_width * D
            )
            # What makes the latents is small, and every rank needs all of them.
            copied = D * (latents.query + latents.key_value + latents.rope)
            return split, copied + latents.query + latents.key_value + 2 * D
        kv_width = self.kv_heads * self.head_width
        split = 2 * D * self.query_width + 2 * D * kv_width
        if self.has_qkv_bias:
            split += self.query_width + 2 * kv_width
        copied = 2 * D + (2 * self.head_width if self.has_head_norms else 0)
        return split, copied + (D if self.has_output_bias else 0)

    @property
    def embedding_parameters(self) -> int:
        """Of tokens and, where there is a table, of positions."""
        return (self.vocab + self.num_positions) * self.hidden

    @property
    def head_parameters(self) -> int:
        """Of the head alone; 0 where it is the embedding."""
        return 0 if self.is_tied else self.vocab * self.hidden

    @property
    def norm_parameters(self) -> int:
        """Of the norm before the head."""
        return (2 if self.family is Family.GPT2 else 1) * self.hidden

    @property
    def num_parameters(self) -> int:
        """All of them; a shared one counts once."""
        layers = sum(self.layer_parameters(i).total for i in range(self.num_layers))
        return layers + self.embedding_parameters + self.head_parameters + self.norm_parameters
