"""`ebbtide estimate` from the command line: what it prints and refuses."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from ebbtide.catalog import find_machine
from ebbtide.commands.estimate import register
from ebbtide.errors import ExitCode
from ebbtide.workload import Workload

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "workload.json"
ROW_KEYS = {
    *("strategy", "status", "short_of", "step_s", "tflops_per_device", "mfu", "peak_gib"),
    *("host_gib", "disk_gib", "holders_gib", "moved_gib", "collectives_s"),
}
STRATEGIES = ["keep", "remat", "offload-no-overlap", "offload", "ebbtide"]
DEEPSEEK = ("deepseek-v3-671b", "--machine", "gb200-nvl72", "--context", "4096", "--batch", "2",
            "--fsdp", "16", "--ep", "8")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """How a command line ended."""

    exit_code: int
    stdout: str
    stderr: str


def run(*arguments: str) -> Finished:
    app = typer.Typer()
    app.callback()(lambda: None)
    register(app)
    result = CliRunner().invoke(app, ["estimate", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Finished(exit_code=result.exit_code, stdout=result.stdout, stderr=result.stderr)


def run_json(*arguments: str) -> dict[str, Any]:
    finished = run(*arguments, "--json")
    assert finished.exit_code == ExitCode.DONE, finished.stderr
    return json.loads(finished.stdout)


def refuse(*arguments: str) -> str:
    finished = run(*arguments)
    assert finished.exit_code == ExitCode.MISUSE, finished.stdout
    assert finished.stdout == ""
    assert finished.stderr.startswith("ebbtide estimate: ")
    assert finished.stderr.count("\n") == 1
    return finished.stderr


def rows_of(answer: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["strategy"]: row for row in answer["rows"]}


def test_671b_is_estimated_with_two_kinds_of_layers() -> None:
    answer = run_json(*DEEPSEEK)
    assert answer["num_devices"] == 128
    assert answer["global_batch"] == 256
    rows = rows_of(answer)
    assert list(rows) == STRATEGIES
    assert all(set(row) == ROW_KEYS for row in rows.values())
    assert {name: row["status"] for name, row in rows.items()} == {
        "keep": "oom", "remat": "fits", "offload-no-overlap": "fits", "offload": "fits",
        "ebbtide": "fits",
    }  # fmt: skip
    assert rows["ebbtide"]["step_s"] < rows["remat"]["step_s"]
    assert rows["ebbtide"]["peak_gib"] <= answer["budget_gib"]
    layers = answer["per_layer_mib"]
    assert list(layers) == ["dense", "experts"]
    assert layers["experts"]["mlp.experts.gate_proj"] == 256.0
    assert answer["maxtext_names"]["mlp.experts.gate_proj"] == "moe_mlpwi_0"
    assert answer["verdict"]["advice"] == "offload"
    assert "self_attn.q_b_proj" in answer["verdict"]["offload"]


def test_holders_add_up_to_the_peak() -> None:
    common = ("--machine", "rtx4090", "--context", "1024", "--layers", "6", "--batch", "4")
    for model in ("gpt2", "smollm2-360m"):
        for row in run_json(model, *common, "--budget", "9GiB")["rows"]:
            assert sum(row["holders_gib"].values()) == pytest.approx(row["peak_gib"])
            assert list(row["holders_gib"]) == [
                "weights", "gradients", "optimizer", "activations", "logits", "copy_buffers",
                "communication",
            ]  # fmt: skip


def test_405b_has_576_mib_of_queries_keys_and_values() -> None:
    # The alias of --context, and MaxText's names.
    answer = run_json(
        "llama-3.1-405b", "--machine", "gb200-nvl72", "--tokens", "8192", "--batch", "2",
        "--fsdp", "128", "--dtype", "fp8", "--offload", "query_proj,key_proj,value_proj",
    )  # fmt: skip
    layer = answer["per_layer_mib"]
    assert sum(layer[f"self_attn.{letter}_proj"] for letter in "qkv") == 576.0
    rows = rows_of(answer)
    assert rows["offload"]["host_gib"] == 70.875
    assert rows["offload-no-overlap"]["host_gib"] == 70.875
    gain = rows["offload"]["tflops_per_device"] / rows["remat"]["tflops_per_device"]
    assert 1.02 <= gain <= 1.04


def test_names_of_ours_and_of_maxtext_are_the_same_thing() -> None:
    common = ("llama-3.1-8b", "--machine", "h200-pcie5", "--context", "8192", "--optimizer",
              "adamw-bf16")  # fmt: skip
    theirs = run_json(*common, "--offload", "context,mlpwi_0")
    ours = run_json(
        *common, "--offload", "self_attn:out,self_attn:lse", "--offload", ".mlp.gate_proj"
    )
    assert rows_of(theirs)["offload"] == rows_of(ours)["offload"]
    assert set(rows_of(ours)["offload"]["moved_gib"]) == {
        "self_attn:out", "self_attn:lse", "mlp.gate_proj",
    }  # fmt: skip


def test_the_report_has_a_table_a_picture_and_a_verdict_last() -> None:
    finished = run("gpt2", "--machine", "rtx4090", "--context", "1024")
    lines = finished.stdout.splitlines()
    assert finished.exit_code == ExitCode.DONE
    assert lines[0].startswith("gpt2: 0.12e9 parameters, 12 layers; 1 x rtx4090; 1 x 1024 tokens")
    assert [line.split()[0] for line in lines[3:8]] == STRATEGIES
    assert any(line.startswith("keep") and line.endswith("|") for line in lines)
    assert any("qkv_proj" in line and "attn.c_attn" in line for line in lines)
    assert lines[-1] == "verdict: everything fits: nothing has to be run again or moved"
    assert "assumed: one device: no collectives" in lines
    assert not any(line.startswith("collectives of a step") for line in lines)


def test_collectives_are_listed_and_what_is_assumed_of_them() -> None:
    common = ("llama-3-8b", "--context", "4096", "--fsdp", "4", "--tp", "2")
    finished = run(*common, "--machine", "h200-pcie5")
    lines = finished.stdout.splitlines()
    at = lines.index("collectives of a step, seconds, each alone")
    assert lines[at + 1].split() == ["strategy", "tp", "fsdp"]
    assert [line.split()[0] for line in lines[at + 2 : at + 7]] == STRATEGIES
    rows = rows_of(run_json(*common, "--machine", "h200-pcie5"))
    assert lines[at + 2].split()[1:] == [
        f"{rows['keep']['collectives_s'][axis]:.3f}" for axis in ("tp", "fsdp")
    ]
    assert any(
        line.startswith("assumed: collectives at 360 GB/s among 8 devices and 47 GB/s beyond")
        for line in lines
    )


def test_a_picture_is_written_of_an_answer_and_of_a_sweep(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    common = ("gpt2", "--machine", "rtx4090", "--context", "512", "--layers", "2")
    for extra in ((), ("--what-if", "batch=1,2")):
        path = tmp_path / f"{len(extra)}.png"
        finished = run(*common, *extra, "--picture", str(path))
        assert finished.exit_code == ExitCode.DONE
        assert finished.stderr == f"ebbtide estimate: wrote {path}\n"
        assert path.read_bytes().startswith(b"\x89PNG")


def test_of_a_machine_without_a_known_network_collectives_take_no_time(tmp_path: Path) -> None:
    path = tmp_path / "desk.json"
    path.write_text(replace(find_machine("h200-pcie5"), name="desk").to_json())
    common = ("llama-3-8b", "--context", "4096", "--tp", "2", "--tflops", "989.4")
    answer = run_json(*common, "--machine", str(path))
    assert any("the catalog knows no network of desk" in text for text in answer["assumptions"])
    assert rows_of(answer)["keep"]["collectives_s"] == {}
    known = rows_of(run_json(*common, "--machine", "h200-pcie5"))["keep"]
    assert known["step_s"] > rows_of(answer)["keep"]["step_s"]


def test_nothing_fits_is_status_3_and_says_what_it_is_short_of() -> None:
    finished = run("llama-3.1-405b", "--machine", "rtx4090", "--context", "4096")
    assert finished.exit_code == ExitCode.NO_PLAN_FITS
    assert "keep: short of " in finished.stdout
    assert "verdict: nothing fits: " in finished.stdout


def test_bars_of_a_budget_of_a_byte_are_cut() -> None:
    finished = run("gpt2", "--machine", "rtx4090", "--context", "1024", "--budget", "1B")
    assert finished.exit_code == ExitCode.NO_PLAN_FITS
    assert max(map(len, finished.stdout.splitlines())) < 400
    bars = [line for line in finished.stdout.splitlines() if line.endswith(">")]
    assert len(bars) == 4


def test_max_context_asks_for_no_context_that_divides() -> None:
    found = run_json("gpt2", "--machine", "rtx4090", "--layers", "2", "--max", "context", "--cp",
                     "3")  # fmt: skip
    assert found["keep"] % 3072 == 0
    assert found["keep"] > 0


def test_a_name_of_a_machine_file_is_printable(tmp_path: Path) -> None:
    path = tmp_path / "desk.json"
    path.write_text(replace(find_machine("rtx4090"), name="a\x1b[31mb").to_json())
    lines = run("gpt2", "--machine", str(path), "--tflops", "165").stdout.splitlines()
    assert "1 x a?[31mb;" in lines[0]


def test_max_finds_more_with_checkpointing_and_more_again_with_offloading() -> None:
    common = ("gpt2", "--machine", "rtx4090", "--layers", "8", "--loss-chunk", "8192")
    found = run_json(*common, "--max", "context")
    assert 0 < found["keep"] < found["remat"] < found["offload"]
    assert found["keep"] % 1024 == 0
    for key, strategy in (("keep", "keep"), ("remat", "remat")):
        at_most = run_json(*common, "--context", str(found[key]))
        assert rows_of(at_most)[strategy]["status"] == "fits"
        above = run_json(*common, "--context", str(int(found[key] * 1.03) + 1024))
        assert rows_of(above)[strategy]["status"] == "oom"
    text = run(*common, "--max", "batch", "--context", "65536").stdout
    assert text.startswith("largest batch of gpt2 on rtx4090")


def test_what_if_sweeps_one_axis() -> None:
    common = ("llama-3.1-8b", "--machine", "h200-pcie5", "--optimizer", "adamw-bf16", "--layers",
              "4", "--budget", "40GiB")  # fmt: skip
    found = run_json(*common, "--context", "8192", "--what-if", "bandwidth=0.25,1,4")
    assert [point["value"] for point in found["points"]] == [0.25, 1.0, 4.0]
    sync = [rows_of(p)["offload-no-overlap"]["step_s"] for p in found["points"]]
    remat = [rows_of(p)["remat"]["step_s"] for p in found["points"]]
    assert sync[0] > sync[1] > sync[2]
    assert len(set(remat)) == 1
    lines = run(*common, "--what-if", "context=4096,8192").stdout.splitlines()
    assert lines[0].split() == ["context", *STRATEGIES, "advice"]
    assert [line.split()[0] for line in lines[1:]] == ["4096", "8192"]


def test_a_measured_run_is_scaled_to_the_full_model(tmp_path: Path) -> None:
    # Of 8 layers of Llama 3 8B at 8192 tokens; the full model has 32.
    common = ("llama-3-8b", "--machine", "h200-pcie5", "--context", "8192", "--optimizer",
              "adamw-bf16", "--workload", str(EXAMPLE))  # fmt: skip
    measured = Workload.from_json(EXAMPLE.read_text(encoding="utf-8"))
    assert measured.outside is not None
    answer = run_json(*common)
    keep = rows_of(answer)["keep"]
    saved = 4 * measured.num_bytes_saved
    held = 8 * 8_030_261_248 + saved + measured.outside.constant_bytes + measured.outside.turn_bytes
    assert keep["peak_gib"] == pytest.approx(held / 2**30, rel=1e-9)
    blocks_ns = 4 * sum(b.forward_ns + b.backward_ns for b in measured.blocks)
    update = (
        keep["step_s"] - (blocks_ns + measured.outside.turn_ns + measured.outside.ends_ns) / 1e9
    )
    assert 0 < update < 0.05
    fewer = run_json(*common, "--layers", "4")
    assert rows_of(fewer)["keep"]["peak_gib"] < keep["peak_gib"]
    assert "times and bytes of blocks as in the measured run" in answer["assumptions"]
    # A run tells nothing of other contexts.
    assert answer["break_even_context"] is None


def test_layers_change_the_model() -> None:
    answer = run_json("llama-3-8b", "--machine", "h200-pcie5", "--layers", "8")
    assert answer["num_parameters"] == 8_030_261_248 - 24 * 218_112_000


def test_a_machine_file_needs_a_peak(tmp_path: Path) -> None:
    path = tmp_path / "desk.json"
    path.write_text(replace(find_machine("rtx4090"), name="desk").to_json())
    message = refuse("gpt2", "--machine", str(path))
    assert "the catalog does not know how fast it computes; give --tflops" in message
    answer = run_json("gpt2", "--machine", str(path), "--tflops", "165.2", "--context", "1024")
    assert answer["machine"] == "desk"


def test_a_disk_takes_what_the_host_has_no_room_for() -> None:
    common = ("llama-3.1-8b", "--machine", "h200-pcie5", "--context", "16384", "--budget",
              "126GiB", "--host", "1GiB", "--optimizer", "adamw-bf16", "--batch", "4",
              "--loss-chunk", "4096")  # fmt: skip
    without = rows_of(run_json(*common))["ebbtide"]
    with_disk = rows_of(run_json(*common, "--disk", "1TiB"))["ebbtide"]
    assert without["host_gib"] <= 1 and with_disk["host_gib"] <= 1
    assert with_disk["disk_gib"] > 0
    assert with_disk["step_s"] < without["step_s"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lama-3.1-8b"], "unknown model 'lama-3.1-8b'; valid names, nearest first: llama-3.1-8b,"),
        (["gpt2", "--machine", "h200"], "unknown machine 'h200'; valid names, nearest first"),
        (["gpt2", "--context", "0"], "--context 0: it must be 1 or more"),
        (["gpt2", "--batch", "-3"], "--batch -3: it must be 1 or more"),
        (["gpt2", "--context", "99999999999"], "more than 134217728 are taken for a typing error"),
        (["gpt2", "--tp", "5"], "--tp 5 does not divide the 12 heads of gpt2; degrees that do: 1,"),
        (["llama-3-8b", "--tp", "16"], "--tp 16 does not divide the 8 kv_heads of llama-3-8b"),
        (["llama-3-8b", "--pp", "5"], "--pp 5 does not divide the 32 layers of llama-3-8b"),
        (["deepseek-v3-671b", "--pp", "2"], "--pp 2 does not divide the 61 layers of deepseek"),
        (["deepseek-v3-671b", "--ep", "3"], "--ep 3 does not divide the 256 experts of deepseek"),
        (["llama-3-8b", "--ep", "2"], "--ep 2: llama-3-8b has no experts to share out"),
        (["llama-3-8b", "--cp", "3"], "--cp 3 does not divide the 4096 context of llama-3-8b"),
        (["llama-3-8b", "--fsdp", "0"], "--fsdp 0: it must be 1 or more"),
        (["llama-3-8b", "--sp"], "--sp without --tp"),
        (["llama-3-8b", "--lora", "-1"], "neither is below 0"),
        (["llama-3-8b", "--lora", "5000"], "an adapter's rank is below the width of the model"),
        (["llama-3-8b", "--optimizer", "adam"], "unknown value 'adam'; valid names, nearest first"),
        (["llama-3-8b", "--dtype", "int4"], "unknown value 'int4'"),
        (["gpt2", "--implementation", "compiled"], "compiled is not worked out for gpt2"),
        (["mixtral-8x7b", "--implementation", "eager"], "eager is not worked out for mixtral-8x7b"),
        (["llama-3-8b", "--attention", "matrix", "--implementation", "eager"], "fused alone"),
        (["gpt2", "--machine", "a100-pcie4", "--dtype", "fp8"], "computes no products in it"),
        (["llama-3-8b", "--offload", "moe_mlpwo"], "the model's layers have no such activation"),
        (["llama-3-8b", "--offload", "q,,k"], "a name is empty"),
        (["gpt2", "--max", "layers"], "--max layers: it finds the largest context or batch"),
        (["gpt2", "--max", "batch", "--what-if", "batch"], "one question at a time"),
        (["gpt2", "--max", "batch", "--offload", "context"], "--offload was given with --max"),
        (["gpt2", "--max", "batch", "--planner", "lp"], "--planner was given with --max batch"),
        (["gpt2", "--max", "batch", "--picture", "a.png"], "--picture was given with --max"),
        (["gpt2", "--picture", "a.jpg"], "--picture a.jpg: a PNG is written"),
        (["gpt2", "--picture", "/nowhere/a.png"], "there is no folder /nowhere"),
        (["gpt2", "--max", "batch", "--disk", "1TiB"], "--disk was given with --max batch"),
        (["gpt2", "--layers", "99999999"], "more than 1000 are taken for a typing error"),
        (["gpt2", "--dp", "99999999"], "more than 10000000 are taken for a typing error"),
        (["gpt2", "--cp", "9999998"], "--cp 9999998 does not divide the 4096 context"),
        (
            ["llama-3-8b", "--workload", str(EXAMPLE), "--implementation", "eager"],
            "--implementation was given with --workload",
        ),
        (
            ["llama-3-8b", "--workload", str(EXAMPLE), "--what-if", "context"],
            "sweep bandwidth, or leave one of them out",
        ),
        (["gpt2", "--what-if", "layers"], "unknown axis 'layers'"),
        (["gpt2", "--what-if", "batch=1,x"], "values are numbers with commas between them"),
        (["gpt2", "--what-if", "batch=1.5"], "whole numbers of 1 or more"),
        (["gpt2", "--budget", "many"], "--budget many: cannot read 'many' as a budget"),
        (["gpt2", "--tflops", "1e-300"], "--tflops 1e-300: a peak in TFLOP/s is above 0"),
        (["gpt2", "--what-if", "batch=" + "1," * 50 + "1"], "51 values were given; 50 at most"),
        (["/dev/zero"], "the file has more than 16.0 MiB"),
        (["gpt2", "--workload", "/dev/zero"], "the file has more than 64.0 MiB"),
        (["x" * 5000], "MODEL xxx"),
        (["gpt2", "--machine", "x" * 5000], "there is no such file, and in the catalog"),
        (["gpt2", "--workload", "/nowhere"], "--workload /nowhere: the file cannot be read"),
        (["gpt2", "--attention", "matrix", "--context", "134217728"], "device would hold"),
        (["gpt2", "--planner", "magic"], "unknown planner 'magic'"),
        (["gpt2", "--layers", "0"], "--layers 0: it must be 1 or more"),
        (["gpt2", "--tflops", "-1"], "a peak in TFLOP/s is above 0"),
        (["llama-3-8b", "--workload", str(EXAMPLE)], "take 8192 tokens of llama-3-8b's width"),
        (["llama-3-8b", "--workload", str(EXAMPLE), "--max", "batch"], "one context and batch"),
        (["llama-3-8b", "--context", "8192", "--tp", "2", "--workload", str(EXAMPLE)],
         "a measured run does not tell what a part of a layer takes"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_in_one_line(arguments: list[str], message: str) -> None:
    machine = [] if "--machine" in arguments else ["--machine", "h200-pcie5"]
    assert message in refuse(*arguments, *machine)


@pytest.mark.parametrize("strategy", ["keep", "remat"])
@pytest.mark.parametrize(
    ("options", "factor"),
    [(("--accumulate", "4"), 4.0), (("--pp", "4", "--accumulate", "4"), 7 / 4)],
)
def test_steps_are_as_many_micro_batches_long(
    strategy: str, options: tuple[str, ...], factor: float
) -> None:
    common = ("llama-3-8b", "--machine", "h200-pcie5", "--optimizer", "none", "--context", "2048")
    one = rows_of(run_json(*common))[strategy]["step_s"]
    many = rows_of(run_json(*common, *options))[strategy]["step_s"]
    # A pipeline waits for its slowest stage, which has the head.
    assert many == pytest.approx(factor * one, rel=0.25 if "--pp" in options else 1e-6)
