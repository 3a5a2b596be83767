"""`ebbtide observe` from the command line: what it writes, prints and refuses."""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import typer
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from ebbtide.commands.observe import register
from ebbtide.commands.observe_report import write_workload_summary
from ebbtide.errors import ExitCode
from ebbtide.workload import Workload
from tests.commands.test_plan import EXAMPLE, PAGE, Finished, run_alone

EXAMPLE_WORKLOAD = Workload.from_json(Path(EXAMPLE).read_text())


def run(*arguments: str) -> Finished:
    app = typer.Typer()
    app.callback()(lambda: None)
    register(app)
    result = CliRunner().invoke(app, ["observe", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Finished(exit_code=result.exit_code, stdout=result.stdout, stderr=result.stderr)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The arguments for a random Llama of three blocks, and a text."""
    folder = tmp_path_factory.mktemp("observed")
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=2,
            vocab_size=256,
            max_position_embeddings=64,
        )
    )
    model.save_pretrained(folder / "tiny-llama")
    text = folder / "tide.txt"
    text.write_text("the tide goes out and comes back.\n" * 100)
    return ["--model", str(folder / "tiny-llama"), "--text", str(text), "--device", "cpu"]


def test_the_step_that_is_observed_trains(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    observed: list[nn.Module] = []

    def observe(model: nn.Module, step: Callable[[], object]) -> Workload:
        observed.append(model)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        # More often than there are batches: the text starts again.
        for _ in range(5):
            step()
        changed = [not p.equal(b) for p, b in zip(model.parameters(), before, strict=True)]
        assert all(changed)
        assert all(parameter.grad is None for parameter in model.parameters())
        return EXAMPLE_WORKLOAD

    fake = ModuleType("ebbtide.torch.observe")
    vars(fake)["observe"] = observe
    monkeypatch.setitem(sys.modules, "ebbtide.torch.observe", fake)
    path = tmp_path / "workload.json"
    finished = run(*tiny, "--context", "16", "--batch", "2", "--out", str(path))
    assert finished.exit_code == ExitCode.DONE
    assert [type(model) for model in observed] == [LlamaForCausalLM]
    assert path.read_text() == EXAMPLE_WORKLOAD.to_json()
    assert finished.stdout.splitlines() == write_workload_summary(EXAMPLE_WORKLOAD)
    assert finished.stderr.endswith(f"ebbtide observe: wrote {path}\n")


def test_a_real_model_is_measured_and_can_be_planned(tiny: list[str], tmp_path: Path) -> None:
    path = tmp_path / "workload.json"
    finished = run(*tiny, "--context", "16", "--out", str(path))
    assert finished.exit_code == ExitCode.DONE
    workload = Workload.from_json(path.read_text())
    assert workload.is_timed
    assert [block.name for block in workload.blocks] == [f"model.layers.{k}" for k in range(3)]
    assert all(block.forward_ns and block.backward_ns for block in workload.blocks)
    assert finished.stdout.splitlines() == write_workload_summary(workload)
    assert finished.stdout.startswith("LlamaForCausalLM: 3 blocks (3 x LlamaDecoderLayer)\n")
    planned = run_alone(str(path), "--machine", "h200-pcie5", "--budget", "auto", "--json")
    assert planned.exit_code == ExitCode.DONE
    assert json.loads(planned.stdout)["outcome"] == "everything fits"


def test_the_summary_says_where_time_and_memory_go() -> None:
    assert write_workload_summary(EXAMPLE_WORKLOAD) == [
        "LlamaForCausalLM: 8 blocks (8 x LlamaDecoderLayer)",
        "saved for backward: 8.5 GiB in 96 activations",
        "blocks: 85.6 ms forward, 176.3 ms backward",
        "outside of the blocks: 16.1 ms between forward and backward (logits and loss), "
        "0.1 ms before and after",
        "held all through: 7.5 GiB; for logits and loss: 2.6 GiB",
    ]


def test_the_summary_says_what_gradients_take_where_they_are_not_there_before() -> None:
    outside = EXAMPLE_WORKLOAD.outside
    assert outside is not None
    workload = replace(EXAMPLE_WORKLOAD, outside=replace(outside, turn_gradient_bytes=3 * 2**29))
    assert write_workload_summary(workload)[5:] == ["made by backward: 1.5 GiB of gradients"]


def test_the_documented_flags_are_those_of_the_command() -> None:
    flag = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
    known = set(flag.findall(run("--help").stdout))
    assert {"--model", "--context", "--out"} <= known
    documented = PAGE.read_text().partition("\n## `ebbtide observe`\n")[2]
    assert set(flag.findall(documented)) == known


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--out", "/no/such/w.json"), "--out /no/such/w.json: there is no folder /no/such; make"),
        (("--out", "w.json", "--batch", "0"), "--batch 0: it must be 1 or more"),
        (("--out", "w.json", "--layers", "2"), "--layers 2 was given with --model"),
        (("--out", "w.json", "--context", "100"), "--context 100: the model"),
        (("--out", "w.json", "--device", "tpu"), "--device tpu: unknown device"),
        (("--out", "w.json", "--text", "/no.txt"), "--text /no.txt: there is no such file"),
    ],
)
def test_misuse_exits_2_with_one_sentence(
    tiny: list[str], arguments: tuple[str, ...], message: str
) -> None:
    finished = run(*tiny, *arguments)
    assert (finished.exit_code, finished.stdout) == (ExitCode.MISUSE, "")
    assert f"ebbtide observe: {message}" in finished.stderr


def test_a_file_to_write_is_required() -> None:
    finished = run()
    assert finished.exit_code == ExitCode.MISUSE
    assert "--out" in finished.stderr
