"""The example runs, and trains as it does without ebbtide."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "train_gpt2.py"


def run_tiny(**environment: str) -> str:
    """Run the example with its tiny model on the CPU; return what it printed."""
    finished = subprocess.run(
        [sys.executable, str(EXAMPLE), "--tiny", "--budget", "8MiB", "--steps", "5"],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT / "src"),
            "CUDA_VISIBLE_DEVICES": "",
            # Threads that spin while they wait would take the cores of other tests.
            "OMP_WAIT_POLICY": "passive",
            **environment,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


MOVED = r"moved out [1-9]\S* MiB in [1-9]\d* copies, in [1-9]\S* MiB in [1-9]"


def losses(printed: str) -> list[str]:
    return re.findall(r"^step \d+: loss (\S+)$", printed, re.MULTILINE)


@pytest.mark.slow
def test_the_example_moves_activations_and_has_the_losses_of_plain_training() -> None:
    printed, plain = run_tiny(), run_tiny(EBBTIDE_DISABLE="1")
    assert len(losses(printed)) == 5
    assert losses(printed) == losses(plain)
    assert float(losses(printed)[-1]) < float(losses(printed)[0])
    # The disk at hand decides whether the plan moves or recomputes.
    (plan,) = re.findall(r"^plan lp: .*", printed, re.MULTILINE)
    assert re.search(r"[1-9]\d* recompute \([1-9]", plan)
    if "disk" in plan:
        assert re.search(MOVED, printed)
    assert "ebbtide keeps everything: no hook is installed" in plain


def run_example(name: str, *launch: str, **environment: str) -> str:
    """Run an example on the CPU, by the Python options `launch`; return what it printed."""
    finished = subprocess.run(
        [sys.executable, *launch, str(ROOT / "examples" / name)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
            ),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            **environment,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "packages"),
    [
        ("train_accelerate.py", ("accelerate",)),
        ("train_sft.py", ("trl", "peft")),
        ("train_lightning.py", ("lightning",)),
    ],
)
def test_examples_for_other_stacks_have_the_losses_of_plain_training(
    name: str, packages: tuple[str, ...]
) -> None:
    for package in packages:
        pytest.importorskip(package)
    printed = run_example(name)
    plain = run_example(name, EBBTIDE_DISABLE="1")
    assert len(losses(printed)) == 6
    assert losses(printed) == losses(plain)
    assert re.search(MOVED, printed)
    assert "ebbtide keeps everything: no hook is installed" in plain


IN_TWO_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train_ddp.py", "train_fsdp2.py"])
def test_examples_for_two_ranks_have_the_losses_of_plain_training(name: str) -> None:
    printed = run_example(name, *IN_TWO_RANKS)
    plain = run_example(name, *IN_TWO_RANKS, EBBTIDE_DISABLE="1")
    assert len(losses(printed)) == 6
    assert losses(printed) == losses(plain)
    if name == "train_ddp.py":
        # The disk at hand decides whether the plan moves or recomputes.
        assert re.search(r"plan lp: .*(disk|recompute)", printed)
        assert "of a budget of 5.0 MiB" in printed
    else:
        assert re.search(MOVED, printed)
    assert "ebbtide keeps everything: no hook is installed" in plain


@pytest.mark.slow
def test_the_example_for_deepspeed_has_the_losses_of_plain_training() -> None:
    pytest.importorskip("deepspeed")
    printed = run_example("train_deepspeed.py", *IN_TWO_RANKS, DS_ACCELERATOR="cpu")
    plain = run_example(
        "train_deepspeed.py", *IN_TWO_RANKS, DS_ACCELERATOR="cpu", EBBTIDE_DISABLE="1"
    )
    assert len(losses(printed)) == 6
    assert losses(printed) == losses(plain)
    assert re.search(MOVED, printed)
    assert "ebbtide keeps everything: no hook is installed" in plain


def test_every_example_is_run_by_a_test() -> None:
    examples = {path.name for path in (ROOT / "examples").glob("*.py")}
    assert examples - set(re.findall(r"train_\w+\.py", Path(__file__).read_text())) == set()
