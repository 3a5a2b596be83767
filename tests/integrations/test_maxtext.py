"""A plan becomes MaxText's settings and comes back; what MaxText would ignore is refused."""

import importlib.util
import re
from dataclasses import replace
from pathlib import Path

import pytest

from ebbtide.block import Activation, Block, OpKind
from ebbtide.errors import PlanError
from ebbtide.integrations.maxtext import (
    MaxTextConfig,
    plan_of,
    read_maxtext,
    to_maxtext,
)
from ebbtide.integrations.maxtext_names import (
    DEAD_KEYS,
    DECODERS,
    KEYS,
    OFFLOADING,
    SAVING,
    MaxTextModel,
)
from ebbtide.jax.flags import FlagSet, xla_flags
from ebbtide.plan import Decision
from ebbtide.workload import Workload
from tests.jax.test_flags import MACHINE, PLAN

KEEP, HOST, RECOMPUTE = Decision.KEEP, Decision.HOST, Decision.RECOMPUTE

LLAMA = MaxTextModel(attention="cudnn_flash_te", hardware="gpu")
DEEPSEEK = MaxTextModel(
    decoder_block="deepseek",
    attention="cudnn_flash_te",
    attention_type="mla",
    hardware="gpu",
    num_experts=256,
    q_lora_rank=1536,
)
MIXTRAL = MaxTextModel(decoder_block="mixtral", hardware="gpu", num_experts=8)


def test_a_llama_decoder_names_these() -> None:
    assert LLAMA.names == {
        "decoder_layer_input",
        "query_proj",
        "key_proj",
        "value_proj",
        "context",
        "attention_out",
        "out_proj",
        "mlpwi_0",
        "mlpwi_1",
        "mlpwo",
    }


def test_a_deepseek_decoder_names_these() -> None:
    assert DEEPSEEK.names - LLAMA.names == {
        "query_wa_proj",
        "mla_q",
        "kv_wa_proj",
        "mla_kv",
        "moe_mlpwi_0",
        "moe_mlpwi_1",
        "moe_mlpwo",
        "moe_x_sorted",
        "moe_routing_maps",
    }
    assert LLAMA.names <= DEEPSEEK.names
    assert {"query_wa_proj", "mla_q"}.isdisjoint(replace(DEEPSEEK, q_lora_rank=0).names)
    assert "indexer_cutoff_threshold" in replace(DEEPSEEK, use_indexer=True).names


@pytest.mark.parametrize(
    ("model", "there", "not_there"),
    [
        (replace(LLAMA, fused_qkv=True), {"qkv_proj"}, {"query_proj", "key_proj", "value_proj"}),
        (replace(LLAMA, fused_mlp=True), {"mlpwi", "mlpwo"}, {"mlpwi_0", "mlpwi_1"}),
        (replace(LLAMA, num_mlp_activations=1), {"mlpwi"}, {"mlpwi_0"}),
        (replace(LLAMA, attention="dot_product"), {"attention_out"}, {"context"}),
        (replace(LLAMA, attention="flash", hardware="tpu"), {"context"}, set[str]()),
        (replace(LLAMA, num_experts=8), {"mlpwi_1"}, {"moe_mlpwi_0"}),
        (MIXTRAL, {"moe_mlpwi_1", "mlpwi_0", "mlpwo"}, {"mlpwi_1"}),
        (replace(MIXTRAL, sparse_matmul=False), {"mlpwi_1"}, {"moe_x_sorted"}),
        (replace(LLAMA, decoder_block="gpt3"), {"out_proj"}, {"attention_out"}),
        (replace(LLAMA, decoder_block="deepseek4"), {"kv_proj", "query_proj"}, {"key_proj"}),
        (replace(LLAMA, decoder_block="qwen3_next"), {"mlpwo"}, {"decoder_layer_input"}),
    ],
)
def test_names_depend_on_settings(
    model: MaxTextModel, there: set[str], not_there: set[str]
) -> None:
    assert there <= model.names
    assert not_there.isdisjoint(model.names)


def test_every_decoder_has_names_that_maxtext_reads() -> None:
    for decoder in DECODERS:
        assert MaxTextModel(decoder_block=decoder, num_experts=8).names <= set(KEYS)
    assert MaxTextModel(decoder_block="simple").names == set()


def test_decisions_become_settings() -> None:
    config = to_maxtext({"context": HOST, "query_proj": HOST, "mlpwi_0": KEEP}, LLAMA)
    assert config.to_yaml() == (
        "remat_policy: custom\n"
        "scan_layers: true\n"
        "decoder_layer_input: device\n"
        "context: offload\n"
        "mlpwi_0: device\n"
        "mlpwi_1: remat\n"
        "mlpwo: remat\n"
        "query_proj: offload\n"
        "key_proj: remat\n"
        "value_proj: remat\n"
        "out_proj: remat\n"
        "attention_out: remat\n"
    )
    assert config.to_arguments()[:3] == (
        "remat_policy=custom",
        "scan_layers=true",
        "decoder_layer_input=device",
    )
    assert config.flags == FlagSet()


@pytest.mark.parametrize(
    ("decisions", "model", "message"),
    [
        ({"engram": HOST}, LLAMA, "'engram' is a key of MaxText's .* that nothing reads"),
        ({"contxt": HOST}, LLAMA, "unknown MaxText name 'contxt'.*nearest first: context"),
        ({"moe_mlpwo": HOST}, LLAMA, "'moe_mlpwo' is host, and a llama2 decoder .* never names it"),
        ({"qkv_proj": KEEP}, LLAMA, "Its names are: attention_out, context"),
        (
            {"decoder_layer_input": HOST},
            replace(LLAMA, decoder_block="qwen3_next"),
            "a qwen3_next decoder with attention cudnn_flash_te on gpu never names it",
        ),
        ({"context": HOST}, replace(LLAMA, attention="dot_product"), "never names it"),
        ({"context": HOST}, MaxTextModel(decoder_block="simple"), "Its names are: none"),
        ({"context": Decision.DISK}, LLAMA, "'context' is disk; MaxText has none"),
        ({"decoder_layer_input": RECOMPUTE}, LLAMA, "what recomputing a layer starts from"),
        ({"mlpwi_0": HOST}, DEEPSEEK, "'mlpwi_0' is host and 'moe_mlpwi_0' is recompute"),
        ({"mlpwo": KEEP, "moe_mlpwo": RECOMPUTE}, MIXTRAL, "Set both to keep, or both to recomp"),
    ],
)
def test_what_maxtext_would_ignore_is_refused(
    decisions: dict[str, Decision], model: MaxTextModel, message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        to_maxtext(decisions, model)


def test_an_outer_name_may_be_stronger_than_the_inner_one() -> None:
    config = to_maxtext({"mlpwi_0": KEEP, "moe_mlpwi_0": HOST}, DEEPSEEK)
    assert (config.settings["mlpwi_0"], config.settings["moe_mlpwi_0"]) == ("device", "offload")


def make_workload(num_layers: int = 2) -> Workload:
    def activation(name: str, num_bytes: int, kind: OpKind, *inputs: str) -> Activation:
        return Activation(
            name=name,
            op=kind.value,
            num_bytes=num_bytes,
            kind=kind,
            inputs=inputs,
            is_saved=True,
            is_replayable=kind is not OpKind.INPUT,
            group=name,
        )

    def block(name: str) -> Block:
        x, q, silu = f"{name}:decoder_layer_input", f"{name}:query_proj", f"{name}:silu"
        return Block(
            name=name,
            class_name="Layer",
            activations=(
                activation(x, 100, OpKind.INPUT),
                activation(q, 30, OpKind.MATMUL, x),
                activation(silu, 7, OpKind.ELEMENTWISE, q),
            ),
        )

    return Workload(model="Llama", blocks=tuple(block(f"layers.{i}") for i in range(num_layers)))


def test_a_plan_becomes_settings_and_flags() -> None:
    decisions = {
        f"layers.{i}:{name}": decision
        for i in range(2)
        for name, decision in (
            ("decoder_layer_input", HOST),
            ("query_proj", KEEP),
            ("silu", RECOMPUTE),
        )
    }
    plan = replace(PLAN, decisions=decisions)
    config = to_maxtext(plan, LLAMA, machine=MACHINE)
    assert config.settings["decoder_layer_input"] == "offload"
    assert config.settings["query_proj"] == "device"
    assert config.flags == xla_flags(MACHINE, plan)
    assert "XLA_FLAGS" in config.flags.environment()
    unrolled = to_maxtext(plan, LLAMA, machine=MACHINE, is_scanned=False)
    assert unrolled.settings["scan_layers"] is False
    assert "command_buffer" not in unrolled.flags.xla_flags


def test_layers_that_differ_are_refused() -> None:
    plan = replace(PLAN, decisions={"layers.0:query_proj": HOST, "layers.1:query_proj": KEEP})
    with pytest.raises(
        PlanError, match=r"has host for 'layers.0:query_proj' and keep for 'layers.1"
    ):
        to_maxtext(plan, LLAMA)


def test_what_has_no_name_there_can_only_be_recomputed() -> None:
    plan = replace(PLAN, decisions={"layers.0:silu": RECOMPUTE, "layers.0.attn:sdpa#2": HOST})
    with pytest.raises(
        PlanError, match=r"has host for 'layers.0.attn:sdpa#2', which MaxText has no"
    ):
        to_maxtext(plan, LLAMA)
    config = to_maxtext(plan, LLAMA, names={"sdpa": "context"})
    assert config.settings["context"] == "offload"
    whole = to_maxtext(plan, LLAMA, names={"layers.0.attn:sdpa#2": "attention_out"})
    assert whole.settings["attention_out"] == "offload"


def settings_of(config: MaxTextConfig, **more: object) -> dict[str, object]:
    return {**config.settings, "attention": "cudnn_flash_te", "hardware": "gpu", **more}


def test_what_was_written_is_read_back() -> None:
    decisions = {"context": HOST, "query_proj": HOST, "mlpwi_0": KEEP}
    written = to_maxtext(decisions, LLAMA, is_scanned=False)
    text = written.to_yaml() + "attention: cudnn_flash_te\nhardware: gpu\n"
    placement = read_maxtext(text)
    assert placement == read_maxtext(settings_of(written))
    assert placement.model == LLAMA
    assert (placement.policy, placement.is_scanned, placement.ignored) == ("custom", False, ())
    expected = dict.fromkeys(LLAMA.names, RECOMPUTE) | decisions | {"decoder_layer_input": KEEP}
    assert dict(placement.decisions) == expected
    assert to_maxtext(placement.decisions, placement.model, is_scanned=False) == written


NVIDIA = """
remat_policy: custom
scan_layers: true
decoder_block: deepseek
attention: cudnn_flash_te
attention_type: mla
hardware: gpu_multiprocess
num_experts: 256
q_lora_rank: 1536
moe_mlpwi_0: offload
moe_mlpwi_1: offload
mlpwi: device
mlpwi_0: device
mlpwi_1: device
mlpwo: device
moe_mlpwo: device
query_wa_proj: device
kv_wa_proj: device
out_proj: device
context: device
query_proj: remat
key_proj: remat
value_proj: remat
"""
"""The published placement for DeepSeek-V3 of September 2026."""


def test_a_published_placement_is_read_and_what_it_sets_for_nothing_is_named() -> None:
    placement = read_maxtext(NVIDIA)
    moved = {name for name, decision in placement.decisions.items() if decision is HOST}
    assert moved == {"moe_mlpwi_0", "moe_mlpwi_1"}
    assert placement.decisions["mlpwi_0"] is KEEP
    assert placement.decisions["mla_q"] is RECOMPUTE
    assert placement.ignored == ("mlpwi",)


@pytest.mark.parametrize(
    ("policy", "kept", "moved"),
    [
        ("full", set[str](), set[str]()),
        ("minimal", {"query_proj", "key_proj", "value_proj", "out_proj", "mlp"}, set[str]()),
        ("save_out_proj", {"out_proj"}, set[str]()),
        ("qkv_proj_offloaded", set[str](), {"query_proj", "key_proj", "value_proj"}),
        (
            "minimal_offloaded",
            set[str](),
            {"query_proj", "key_proj", "value_proj", "out_proj", "mlp"},
        ),
    ],
)
def test_presets_are_read(policy: str, kept: set[str], moved: set[str]) -> None:
    mlp = {"mlpwi_0", "mlpwi_1", "mlpwo"}
    placement = read_maxtext({"remat_policy": policy, "context": "offload"})
    for decision, names in ((KEEP, kept), (HOST, moved)):
        wanted = (names - {"mlp"}) | (mlp if "mlp" in names else set[str]())
        found = {n for n, d in placement.decisions.items() if d is decision}
        assert found - {"decoder_layer_input"} == wanted
    assert placement.decisions["decoder_layer_input"] is KEEP
    # Only `custom` reads words for names.
    assert placement.ignored == ("context",)


def test_a_preset_for_separate_projections_does_nothing_for_fused_ones() -> None:
    placement = read_maxtext({"remat_policy": "qkv_proj_offloaded", "fused_qkv": True})
    assert HOST not in placement.decisions.values()


def test_a_value_with_two_names_has_the_stronger_decision() -> None:
    experts = {"decoder_block": "mixtral", "num_experts": 8}
    placement = read_maxtext({"remat_policy": "minimal_offloaded", **experts})
    assert placement.decisions["moe_mlpwi_0"] is HOST
    assert placement.decisions["moe_mlpwi_1"] is RECOMPUTE


def test_without_rematerialisation_all_is_kept() -> None:
    assert set(read_maxtext({"remat_policy": "none"}).decisions.values()) == {KEEP}
    plan = plan_of(read_maxtext({"remat_policy": "none"}), make_workload())
    assert set(plan.decisions.values()) == {KEEP}


def test_a_configuration_becomes_a_plan() -> None:
    workload = make_workload()
    config = {"remat_policy": "custom", "decoder_layer_input": "offload", "query_proj": "offload"}
    plan = plan_of(read_maxtext(config), workload)
    plan.check_fits(workload)
    assert plan.name == "maxtext:custom"
    assert plan.host_bytes == 2 * (100 + 30)
    assert plan.decision("layers.1:silu") is RECOMPUTE
    full = plan_of(read_maxtext({"remat_policy": "full"}), workload)
    assert full.host_bytes == 0
    # The layer input cannot be made again, and nothing else is stored.
    assert [n for n, d in full.decisions.items() if d is KEEP] == [
        "layers.0:decoder_layer_input",
        "layers.1:decoder_layer_input",
    ]
    other = plan_of(read_maxtext(config), workload, names={"silu": "query_proj", "query_proj": "x"})
    assert other.decision("layers.0:silu") is HOST
    assert other.decision("layers.0:query_proj") is RECOMPUTE


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"remat_policy": "minimal_offload"}, "unknown remat_policy .*first: minimal_offloaded"),
        ({"remat_policy": "custom", "context": "host"}, "context: unknown placement 'host'"),
        ({"decoder_block": "llama5"}, "unknown decoder_block 'llama5'; .*first: llama[24]"),
        ({"num_experts": "eight"}, "num_experts is 'eight'; MaxText wants a value such as 1"),
        ({"fused_qkv": 1}, "fused_qkv is 1; MaxText wants a value such as False"),
        ({"mlp_activations": "silu"}, "mlp_activations is 'silu'; it must be a list"),
        ("- a\n- b\n", "is list, and must be a mapping"),
        ("a: [", "is no YAML"),
    ],
)
def test_bad_configurations_are_refused(config: str | dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        read_maxtext(config)


def maxtext_folder() -> Path:
    spec = importlib.util.find_spec("maxtext")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("maxtext is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


def test_the_installed_maxtext_has_these_keys_and_no_others() -> None:
    text = (maxtext_folder() / "configs" / "base.yml").read_text()
    words = re.findall(r"^(\w+): '(?:remat|device|offload)'", text, re.MULTILINE)
    assert set(words) == {*KEYS, *DEAD_KEYS}
    read = (maxtext_folder() / "configs" / "types.py").read_text()
    lists = re.findall(r"tensors = \[(.*?)\]", read, re.DOTALL)
    found = [set(re.findall(r'"(\w+)"', text)) for text in lists]
    # That of reinforcement learning has no kv_proj.
    assert set(KEYS) in found
    assert all(set(KEYS) - names <= {"kv_proj"} and names <= set(KEYS) for names in found)


def test_the_installed_maxtext_gives_these_names_and_reads_these_policies() -> None:
    sources = [p.read_text() for p in maxtext_folder().glob("*/*.py")]
    lines = [line for s in sources for line in s.splitlines() if "checkpoint_name(" in line]
    given = {name for line in lines for name in re.findall(r'"(\w+)"', line)}
    given |= {n for s in sources for n in re.findall(r'checkpoint_name="(\w+)"', s)}
    assert set(KEYS) <= given
    assert DEAD_KEYS.isdisjoint(given)
    decoders = (maxtext_folder() / "layers" / "nnx_decoders.py").read_text()
    policies = set(re.findall(r'remat_policy == "(\w+)"', decoders))
    assert policies <= {*SAVING, *OFFLOADING, "custom"}
    assert {*SAVING, *OFFLOADING, "custom"} - policies <= {"minimal_with_context"}
    enums = (maxtext_folder() / "common" / "common_types.py").read_text()
    block = enums.partition("class DecoderBlockType")[2].partition("class ")[0]
    assert set(re.findall(r'= "(\w+)"', block)) == set(DECODERS)
