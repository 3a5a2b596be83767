"""The callback for transformers' and TRL's trainers: the same weights, and bytes that moved."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from ebbtide.errors import RuntimeStateError
from ebbtide.integrations.transformers import EbbtideCallback
from ebbtide.torch import attach
from tests.torch.training import learn_at_once

torch.set_num_threads(1)

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

NUM_TOKENS = 32


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        max_position_embeddings=NUM_TOKENS,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    return LlamaForCausalLM(config)


def texts(num: int = 16) -> Dataset:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, 128, (num, NUM_TOKENS), generator=generator).tolist()
    return Dataset.from_dict({"input_ids": ids, "labels": ids})


def arguments(folder: Path, **settings: Any) -> TrainingArguments:
    settings = {
        "max_steps": 5,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        **settings,
    }
    return TrainingArguments(output_dir=str(folder / "out"), **settings)


def offloading(folder: Path, **options: Any) -> EbbtideCallback:
    """A callback that moves even small activations to a file."""
    options = {"disk": f"{folder}:64MiB", "min_bytes": 256, **options}
    plan = None if "budget" in options else "offload"
    return EbbtideCallback(plan, **options)


def trained(
    folder: Path, *callbacks: TrainerCallback, model: nn.Module | None = None, **settings: Any
) -> Any:
    trainer: Any = Trainer(
        model=model or tiny_llama(),
        args=arguments(folder, **settings),
        train_dataset=texts(),
        eval_dataset=texts(4),
        callbacks=list(callbacks),
    )
    with learn_at_once():
        trainer.train()
    return trainer


def assert_same_weights(got: nn.Module, wanted: nn.Module) -> None:
    named = dict(got.named_parameters())
    assert named.keys() == dict(wanted.named_parameters()).keys()
    changed = [n for n, p in wanted.named_parameters() if not torch.equal(named[n], p)]
    assert changed == []


def assert_moved_and_closed(callback: EbbtideCallback, model: nn.Module) -> None:
    assert callback.tide is not None
    counts = callback.tide.statistics()
    assert counts.moved_out_bytes > 0
    assert counts.moved_in_bytes > 0
    assert counts.disk.held_bytes == 0
    assert_nothing_is_left(model)


def assert_nothing_is_left(model: nn.Module) -> None:
    for module in model.modules():
        assert not vars(module)["_forward_hooks"]
        assert not vars(module)["_forward_pre_hooks"]
    attach(model, "keep").close()  # would raise if it were attached still


def test_it_takes_what_attach_takes() -> None:
    wanted = list(inspect.signature(attach).parameters.values())[1:]
    got = list(inspect.signature(EbbtideCallback).parameters.values())
    assert [(p.name, p.kind, p.default) for p in got] == [
        (p.name, p.kind, p.default) for p in wanted
    ]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="plain"),
        pytest.param({"gradient_accumulation_steps": 2}, id="accumulation"),
        pytest.param({"eval_strategy": "steps", "eval_steps": 2}, id="evaluation"),
        pytest.param({"bf16": True}, id="autocast"),
    ],
)
def test_the_weights_are_those_of_plain_training(tmp_path: Path, settings: dict[str, Any]) -> None:
    callback = offloading(tmp_path)
    plain, ours = trained(tmp_path, **settings), trained(tmp_path, callback, **settings)
    assert_same_weights(ours.model, plain.model)
    assert_moved_and_closed(callback, ours.model)
    assert callback.tide is not None and callback.tide.plan is not None
    # The first of the passes observes, and an evaluation is none.
    num_passes = 5 * settings.get("gradient_accumulation_steps", 1)
    moved_bytes = callback.tide.statistics().moved_out_bytes
    assert moved_bytes == (num_passes - 1) * callback.tide.plan.disk_bytes
    losses = [entry["loss"] for entry in plain.state.log_history if "loss" in entry]
    assert [entry["loss"] for entry in ours.state.log_history if "loss" in entry] == losses


class Reader(TrainerCallback):
    """Stands where TensorBoard's callback does, before ours, and notes what reaches it."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(dict(kwargs["logs"]))


def test_its_figures_go_through_the_trainers_log(tmp_path: Path) -> None:
    reader, callback = Reader(), offloading(tmp_path, budget="1GiB")
    trainer = trained(tmp_path, reader, callback)
    plan = None if callback.tide is None else callback.tide.plan
    assert plan is not None
    for source in (reader.seen, trainer.state.log_history):
        ours = [entry for entry in source if "ebbtide/moved_out_bytes" in entry]
        # Two steps are measured before there is a plan, and the third makes it.
        assert len(ours) == 3
        assert ours[-1]["ebbtide/predicted_step_ms"] == plan.predicted_step_ns / 1e6
        assert ours[-1]["ebbtide/bound_step_ms"] == plan.bound_step_ns / 1e6
        assert ours[-1]["ebbtide/predicted_peak_bytes"] == plan.peak_bytes
        assert "ebbtide/measured_peak_bytes" not in ours[-1]  # no allocator counts on a CPU
        assert all("loss" not in entry for entry in ours)


def test_the_bytes_that_it_logs_are_those_that_moved(tmp_path: Path) -> None:
    callback = offloading(tmp_path)
    trainer = trained(tmp_path, callback)
    assert callback.tide is not None
    logged = [
        e["ebbtide/moved_out_bytes"] for e in trainer.state.log_history if "ebbtide" in str(e)
    ]
    assert logged == sorted(logged) and logged[0] > 0
    assert logged[-1] == callback.tide.statistics().moved_out_bytes


def test_a_resumed_training_ends_with_the_weights_of_one_that_went_through(tmp_path: Path) -> None:
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6}
    whole = trained(tmp_path / "whole", **saving)
    trained(tmp_path / "ours", offloading(tmp_path), **saving)
    callback = offloading(tmp_path)
    resumed: Any = Trainer(
        model=tiny_llama(),
        args=arguments(tmp_path / "ours", **saving),
        train_dataset=texts(),
        callbacks=[callback],
    )
    resumed.train(resume_from_checkpoint=str(tmp_path / "ours" / "out" / "checkpoint-3"))
    assert_same_weights(resumed.model, whole.model)
    assert_moved_and_closed(callback, resumed.model)


class Small(LlamaForCausalLM):
    """Runs out of memory with more than two rows."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input_ids: Any = None, labels: Any = None, **kwargs: Any
    ) -> Any:
        output = super().forward(input_ids=input_ids, labels=labels, **kwargs)
        if input_ids.shape[0] > 2:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return output


def small() -> LlamaForCausalLM:
    model = tiny_llama()
    model.__class__ = Small
    return model


def test_each_batch_size_that_is_tried_is_attached_anew(tmp_path: Path) -> None:
    sizes = {"auto_find_batch_size": True, "per_device_train_batch_size": 4}
    plain = trained(tmp_path, model=small(), **sizes)
    callback = offloading(tmp_path)
    ours = trained(tmp_path, callback, model=small(), **sizes)
    assert plain._train_batch_size == ours._train_batch_size == 2
    assert_same_weights(ours.model, plain.model)
    assert_moved_and_closed(callback, ours.model)


class Fails(TrainerCallback):
    """Raises after the third step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            raise KeyboardInterrupt


def test_it_is_closed_when_training_raises_and_trains_again(tmp_path: Path) -> None:
    callback = offloading(tmp_path)
    trainer: Any = Trainer(
        model=tiny_llama(),
        args=arguments(tmp_path),
        train_dataset=texts(),
        callbacks=[Fails(), callback],
    )
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert_moved_and_closed(callback, trainer.model)
    first = callback.tide
    trainer.remove_callback(Fails)
    trainer.train()
    assert callback.tide is not first
    assert_moved_and_closed(callback, trainer.model)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"gradient_checkpointing": True},
            r"checkpointing=True and EbbtideCallback .* Set \w+_checkpointing=False",
        ),
        (
            {"torch_compile": True},
            r"torch_compile=True .* Set torch_compile=False and EbbtideCallback\(compile=True\)",
        ),
        (
            {"fsdp_config": {"activation_checkpointing": True}},
            r"fsdp_config=\{'activation_checkpointing': True\} and EbbtideCallback .* to False",
        ),
    ],
)
def test_settings_of_the_trainer_that_conflict_are_refused_at_once(
    tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    args = arguments(tmp_path, **settings)
    with pytest.raises(ValueError, match=words):
        Trainer(model=tiny_llama(), args=args, callbacks=[EbbtideCallback("recompute")])


def test_several_gpus_in_one_process_are_refused() -> None:
    args = SimpleNamespace(n_gpu=2)
    with pytest.raises(ValueError, match=r"2 GPUs in threads .*`torchrun --nproc-per-node 2`"):
        EbbtideCallback("recompute").on_init_end(args, None, None)


def test_a_callback_that_was_added_later_refuses_too(tmp_path: Path) -> None:
    args = arguments(tmp_path, gradient_checkpointing=True)
    trainer = Trainer(model=tiny_llama(), args=args, train_dataset=texts())
    trainer.add_callback(EbbtideCallback("recompute"))
    with pytest.raises(ValueError, match="each block would be recomputed twice"):
        trainer.train()


def test_a_trainer_that_does_not_call_transformers_train_is_refused(tmp_path: Path) -> None:
    callback = EbbtideCallback("recompute")
    with pytest.raises(RuntimeStateError, match="would not learn when training raises"):
        callback.on_train_begin(arguments(tmp_path), None, None, model=tiny_llama())


def test_one_callback_serves_one_trainer_at_a_time(tmp_path: Path) -> None:
    callback = EbbtideCallback("recompute")
    trainer = Trainer(model=tiny_llama(), args=arguments(tmp_path), callbacks=[callback])
    callback.start_training(trainer)
    with pytest.raises(RuntimeStateError, match="make a callback for each trainer"):
        trainer.train()


# -- TRL and PEFT ----------------------------------------------------------------------------------


def sft(
    folder: Path,
    *callbacks: TrainerCallback,
    change: Callable[[Any], Any] = lambda m: m,
    **settings: Any,
) -> Any:
    trl = pytest.importorskip("trl")
    settings = {
        "max_steps": 5,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "dataset_kwargs": {"skip_prepare_dataset": True},
        "max_length": NUM_TOKENS,
        **settings,
    }
    peft_config = settings.pop("peft_config", None)
    return trl.SFTTrainer(
        model=change(tiny_llama()),
        args=trl.SFTConfig(output_dir=str(folder / "out"), **settings),
        train_dataset=texts().remove_columns("labels"),
        processing_class=tokenizer(),
        callbacks=list(callbacks),
        peft_config=peft_config,
    )


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(128)}, unk_token="w0"))
    return PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="w0", eos_token="w1", pad_token="w2", unk_token="w0"
    )


def lora() -> Any:
    peft = pytest.importorskip("peft")
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


@pytest.mark.slow
def test_sft_with_lora_has_the_weights_of_plain_training(tmp_path: Path) -> None:
    callback = offloading(tmp_path)
    trained: list[Any] = []
    for callbacks in ((), (callback,)):
        torch.manual_seed(11)
        trainer = sft(tmp_path, *callbacks, peft_config=lora(), gradient_accumulation_steps=2)
        trainer.train()
        trained.append(trainer)
    plain, ours = trained
    assert any(p.requires_grad and "lora" in n for n, p in ours.model.named_parameters())
    assert_same_weights(ours.model, plain.model)
    assert_moved_and_closed(callback, ours.model)
    with_figures = [e for e in ours.state.log_history if "ebbtide/moved_out_bytes" in e]
    assert len(with_figures) == 5
    # TRL's own metrics are in its own entries, once.
    names = [set(e) for e in plain.state.log_history if "loss" in e]
    assert [set(e) for e in ours.state.log_history if "loss" in e] == names
    assert all("mean_token_accuracy" not in e for e in with_figures)


def test_sfts_checkpointing_which_is_on_by_default_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"on by default\) and Ebbtide.* Set gradient_checkp\w+=False"
    ):
        sft(tmp_path, EbbtideCallback("recompute"), gradient_checkpointing=True)


def test_sfts_activation_offloading_is_refused(tmp_path: Path) -> None:
    words = "activation_offloading=True and EbbtideCallback .* Set activation_offloading=False"
    with pytest.raises(ValueError, match=words):
        sft(tmp_path, EbbtideCallback("recompute"), activation_offloading=True)


def four_bit_llama(folder: Path) -> nn.Module:
    """A tiny Llama with 4-bit weights, loaded as users load one, and trainable adapters."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    tiny_llama().save_pretrained(folder / "weights")
    quantised: Any = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    load: Any = AutoModelForCausalLM.from_pretrained
    base = load(folder / "weights", quantization_config=quantised, device_map="cpu")
    torch.manual_seed(4)
    return get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))


def test_adapters_over_four_bit_weights_train_alike(tmp_path: Path) -> None:
    """QLoRA: the weights are bytes in a subclass of `Parameter`, and none of them moves."""
    pytest.importorskip("bitsandbytes")
    wanted = trained(tmp_path, model=four_bit_llama(tmp_path)).model
    callback = offloading(tmp_path)
    got = trained(tmp_path, callback, model=four_bit_llama(tmp_path)).model
    assert_same_weights(got, wanted)
    assert sum(p.dtype == torch.uint8 for p in got.parameters()) == 3 * 7
    assert any("lora_B" in n and bool(p.abs().sum() > 0) for n, p in got.named_parameters())
    assert_moved_and_closed(callback, got)
    assert callback.tide is not None
    plan, counts = callback.tide.plan, callback.tide.statistics()
    assert plan is not None
    assert counts.num_kept_not_understood == ()
    # Five steps, of which the first observes.
    assert counts.moved_out_bytes == 4 * plan.disk_bytes
