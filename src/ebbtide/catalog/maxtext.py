"""MaxText's names of activations, and which of ours they are.

From MaxText's layers (`attentions.py`, `attention_mla.py`, `linears.py`, `moe.py`) as of
September 2026. A name that a model does not have is an error here; MaxText ignores it in silence.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from ebbtide.naming import unknown_name_message

MAXTEXT_NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "decoder_layer_input": (".input",),
        "query_proj": (".self_attn.q_proj:rotary", ".self_attn.q_proj", ".self_attn.q_b_proj"),
        "key_proj": (".self_attn.k_proj:rotary", ".self_attn.k_proj", ".self_attn.key"),
        "value_proj": (".self_attn.v_proj", ".self_attn.value"),
        "qkv_proj": (".attn.c_attn",),
        "query_wa_proj": (".self_attn.q_a_proj",),
        "mla_q": (".self_attn.q_a_layernorm",),
        "kv_wa_proj": (".self_attn.kv_a_proj",),
        "mla_kv": (".self_attn.kv_a_layernorm",),
        "context": (".self_attn:out", ".self_attn:lse", ".attn:out", ".attn:lse"),
        "attention_out": (".self_attn:out", ".attn:out"),
        "out_proj": (".self_attn.o_proj", ".attn.c_proj"),
        "mlpwi": (".mlp.c_fc",),
        "mlpwi_0": (".mlp.gate_proj", ".mlp.shared_experts.gate_proj"),
        "mlpwi_1": (".mlp.up_proj", ".mlp.shared_experts.up_proj"),
        "mlpwo": (".mlp.down_proj", ".mlp.shared_experts.down_proj", ".mlp.c_proj"),
        "moe_mlpwi_0": (".mlp.experts.gate_proj",),
        "moe_mlpwi_1": (".mlp.experts.up_proj",),
        "moe_mlpwo": (".mlp.experts.down_proj",),
    }
)
"""MaxText's name to ours, over all kinds of layers; read-only."""

# Of these a layer has one: what attention reads, whatever made it.
_FIRST_ALONE = frozenset({"query_proj", "key_proj", "value_proj"})


def resolve_names(names: Sequence[str], known: Iterable[str]) -> frozenset[str]:
    """Return our local names of what is named, in MaxText's words or ours.

    Args:
        names: Given; ours may be written without the leading mark.
        known: All local names that the model's layers have.

    Raises:
        ValueError: A name is neither MaxText's nor ours, or the model does not have it.
    """
    have = set(known)
    found: set[str] = set()
    for name in names:
        ours = tuple(local for local in MAXTEXT_NAMES.get(name, ()) if local in have)
        if name in _FIRST_ALONE:
            ours = ours[:1]
        ours = ours or tuple(n for n in (name, f".{name}", f":{name}") if n in have)
        if not ours:
            valid = {n for n, locals_ in MAXTEXT_NAMES.items() if have & set(locals_)}
            raise ValueError(
                f"--offload {name}: the model's layers have no such activation; "
                f"{unknown_name_message('name', name, valid | {n.lstrip('.:') for n in have})}"
            )
        found.update(ours)
    return frozenset(found)


def maxtext_name(local: str) -> str:
    """Return MaxText's name of one of ours; empty if it has none."""
    for name, ours in MAXTEXT_NAMES.items():
        if local in ours:
            return name
    return ""
