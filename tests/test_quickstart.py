"""Every block of code of docs/quickstart.md runs, and does what the page says."""

import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from ebbtide.cli import main
from ebbtide.errors import ExitCode
from ebbtide.plan import Plan

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
TORCH, VERIFY, JAX = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
COMMANDS = [
    line
    for block in re.findall(r"^```sh\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    for line in block.splitlines()
]


def test_no_block_is_of_another_kind() -> None:
    kinds = re.findall(r"^```(\w*)$", PAGE, re.MULTILINE)
    assert [kind for kind in kinds if kind] == ["python"] * 3 + ["sh"] * 3


@pytest.mark.slow
def test_the_torch_loop_moves_activations_and_changes_no_bit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names: dict[str, Any] = {}
    exec(TORCH, names)
    counts = names["tide"].statistics()
    assert counts.moved_out_bytes > 0
    # What a first forward moves is fetched once more, to be compared.
    assert counts.moved_in_bytes >= counts.moved_out_bytes
    assert counts.num_recomputed_ops > 0
    assert "plan offload: " in capsys.readouterr().out
    exec(VERIFY, names)
    said = capsys.readouterr().out
    words = re.search(r"`(equal: .*?)`", PAGE)
    assert words is not None
    assert words[1] in said


@pytest.mark.slow
def test_the_jax_stack_has_a_plan_and_the_same_gradients(
    capsys: pytest.CaptureFixture[str],
) -> None:
    import jax
    import numpy as np

    names: dict[str, Any] = {}
    exec(JAX, names)
    stack = names["stack"]
    assert not stack.keeps_everything
    assert stack.report() in capsys.readouterr().out
    planned = names["grads"]
    names["body"] = names["block"]
    plain = jax.jit(jax.grad(names["loss"]))(names["params"], names["x"])
    for one, other in zip(jax.tree.leaves(plain), jax.tree.leaves(planned), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def run(line: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.argv", shlex.split(line))
    with pytest.raises(SystemExit) as caught:
        main()
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_the_commands_run_one_after_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    estimate, plan, check, doctor = COMMANDS
    assert run(estimate, monkeypatch) == ExitCode.DONE
    assert "llama-3.1-8b" in capsys.readouterr().out
    assert run(plan, monkeypatch) == ExitCode.DONE
    assert "12.0 GiB at most" in capsys.readouterr().out
    made = Plan.from_json((tmp_path / "plan.json").read_text(encoding="utf-8"))
    assert made.budget_bytes == 12 * 2**30
    assert run(check, monkeypatch) == ExitCode.DONE
    # Nothing is set here, so copies would not be hidden.
    assert run(doctor, monkeypatch) == ExitCode.FAILED
    assert "latency_hiding_scheduler" in capsys.readouterr().out
