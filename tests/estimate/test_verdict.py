"""What rows come to."""

from dataclasses import replace

from ebbtide.catalog.machines import find_machine
from ebbtide.catalog.models import MODELS
from ebbtide.estimate.setup import Optimizer, Setup
from ebbtide.estimate.verdict import Advice, judge
from tests.estimate.asking import ask


def advice(setup: Setup, machine: str, budget: str = "auto") -> tuple[Advice, str]:
    verdict = judge(ask(setup, machine, budget=budget).rows())
    return verdict.advice, verdict.sentence


def test_where_everything_fits_nothing_is_needed() -> None:
    setup = Setup(shape=MODELS["gpt2"], context=1024, batch=1)
    assert advice(setup, "rtx4090") == (
        Advice.NOTHING,
        "everything fits: nothing has to be run again or moved",
    )


def test_offloading_is_advised_where_it_is_faster_and_says_what() -> None:
    setup = Setup(
        shape=MODELS["llama-3.1-8b"],
        context=32_768,
        batch=1,
        optimizer=Optimizer.ADAMW_BF16,
        loss_chunk=4096,
    )
    verdict = judge(ask(setup, "h200-pcie5", budget="90GiB").rows())
    assert verdict.advice is Advice.OFFLOAD
    assert "faster than checkpointing" in verdict.sentence
    assert verdict.moved
    assert all(not name.startswith((".", ":")) for name in verdict.moved)


def test_without_room_on_the_host_checkpointing_is_enough() -> None:
    setup = Setup(
        shape=MODELS["llama-3.1-8b"],
        context=8192,
        batch=4,
        optimizer=Optimizer.ADAMW_BF16,
        loss_chunk=4096,
    )
    machine = replace(find_machine("h200-pcie5"), host_bytes=0)
    estimator = ask(setup, machine=machine, budget="90GiB")
    verdict = judge(estimator.rows())
    assert verdict.advice is Advice.CHECKPOINT
    assert verdict.moved == ()
    assert verdict.sentence.startswith("checkpointing is enough, and a plan that runs less again")


def test_what_never_fits_says_how_much_it_takes() -> None:
    setup = Setup(shape=MODELS["qwen3-8b"], context=4096, batch=1)
    found, sentence = advice(setup, "rtx4090")
    assert found is Advice.TOO_LARGE
    assert sentence.startswith("nothing fits: ")
    assert "GiB at least" in sentence
