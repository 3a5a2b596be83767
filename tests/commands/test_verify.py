"""`ebbtide verify` from the command line: what it prints, how it ends and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from ebbtide.commands.verify import register
from ebbtide.errors import ExitCode
from ebbtide.torch import Tide
from ebbtide.torch.verification import Difference, Verification
from tests.commands.test_plan import EXAMPLE, Finished

KEYS = {"equal", "largest_difference", "noise", "first_difference"}


def run(*arguments: str) -> Finished:
    app = typer.Typer()
    app.callback()(lambda: None)
    register(app)
    result = CliRunner().invoke(app, ["verify", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Finished(exit_code=result.exit_code, stdout=result.stdout, stderr=result.stderr)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The arguments for a random Llama of three blocks whose activations are large enough."""
    folder = tmp_path_factory.mktemp("verified")
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=256,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=2,
            vocab_size=256,
            max_position_embeddings=128,
        )
    )
    model.save_pretrained(folder / "tiny-llama")
    text = folder / "tide.txt"
    text.write_text("the tide goes out and comes back.\n" * 100)
    model = str(folder / "tiny-llama")
    return ["--model", model, "--text", str(text), "--device", "cpu", "--context", "128"]


def test_a_real_model_is_equal_and_something_moved(tiny: list[str]) -> None:
    finished = run(*tiny, "--plan", "offload", "--json")
    assert finished.exit_code == ExitCode.DONE
    found = json.loads(finished.stdout)
    assert set(found) >= KEYS
    assert (found["equal"], found["largest_difference"], found["noise"]) == (True, 0.0, 0.0)
    assert found["first_difference"] is None
    assert (found["plan"], found["reference"], found["num_steps"]) == ("offload", "plain", 4)
    assert found["is_deterministic"] and found["is_training"]
    # Three of the four steps run the plan; the first is observed, and moves nothing.
    assert found["moved_out_bytes"] > 0
    assert found["moved_out_bytes"] == found["moved_in_bytes"]
    assert found["num_recomputed_ops"] > 0


def test_with_a_sanitizer_its_report_goes_to_stderr(tiny: list[str]) -> None:
    finished = run(*tiny, "--plan", "offload", "--sanitize", "--steps", "3")
    assert finished.exit_code == ExitCode.DONE
    assert finished.stdout.startswith("LlamaForCausalLM, plan offload: 3 steps compared")
    assert finished.stdout.splitlines()[2].startswith("equal: the loss, every gradient")
    assert "sanitizer, " in finished.stderr and "no difference" in finished.stderr


def test_a_difference_is_named_and_the_command_fails(
    tiny: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def differ(self: Tide, batch: Any, *, steps: int, reference: str | None) -> Verification:
        assert self.runtime is not None and set(batch) == {"input_ids", "labels"}
        assert (steps, reference) == (2, "recompute")
        return Verification(
            equal=False,
            largest_difference=float("nan"),
            noise=0.0,
            first_difference=Difference(
                step=2, block="b.1", tensor="gradient of b.1.w", largest_difference=0.5
            ),
            model="M",
            plan="offload",
            reference="plain",
            is_deterministic=True,
            is_training=True,
            num_steps=2,
            num_tensors=3,
            loss=1.0,
            moved_out_bytes=1,
            moved_in_bytes=1,
            num_recomputed_ops=0,
        )

    monkeypatch.setattr(Tide, "verify", differ)
    arguments = [*tiny, "--plan", "offload", "--steps", "2", "--reference", "recompute"]
    finished = run(*arguments)
    assert finished.exit_code == ExitCode.FAILED
    assert "DIFFERENT: first gradient of b.1.w, in block b.1, in step 2, by 0.5" in finished.stdout
    found = json.loads(run(*arguments, "--json").stdout)
    assert found["largest_difference"] is None
    assert found["first_difference"] == {
        "step": 2, "block": "b.1", "tensor": "gradient of b.1.w", "largest_difference": 0.5,
    }  # fmt: skip


def test_a_budget_that_nothing_keeps_to_is_its_own_exit_status(tiny: list[str]) -> None:
    finished = run(*tiny, "--budget", "1MiB")
    assert finished.exit_code == ExitCode.NO_PLAN_FITS
    assert finished.stderr.splitlines()[-1].startswith("ebbtide verify: ")
    assert "1.0 MiB" in finished.stderr and "Traceback" not in finished.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--plan", "offlaod"], "--plan offlaod: there is no such file, and unknown plan"),
        (["--plan", EXAMPLE], "--plan"),
        (["--plan", "offload", "--budget", "1GiB"], "--plan offload and --budget 1GiB"),
        (["--steps", "0"], "--steps 0: it must be 1 or more"),
        (["--reference", "keep"], "--reference: unknown reference 'keep'"),
        (["--context", "1"], "--context 1: it must be 2 or more"),
        (["--budget", "much"], "--budget much:"),
        (["--model", "/no/such/folder"], "no/such/folder"),
    ],
)
def test_misuse_is_one_sentence_that_names_the_argument(arguments: list[str], said: str) -> None:
    finished = run(*arguments)
    assert finished.exit_code == ExitCode.MISUSE
    assert finished.stdout == ""
    assert said in finished.stderr.splitlines()[-1]


def test_a_plan_file_of_another_model_is_refused(tiny: list[str], tmp_path: Path) -> None:
    from ebbtide.errors import PlanError
    from ebbtide.planner.named import named_plan
    from ebbtide.workload import Workload

    workload = Workload.from_json(Path(EXAMPLE).read_text())
    path = tmp_path / "plan.json"
    path.write_text(named_plan("recompute", workload).to_json())
    with pytest.raises(PlanError, match="was made for"):
        run(*tiny, "--plan", str(path))
