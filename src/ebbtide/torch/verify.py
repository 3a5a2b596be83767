"""Run a step with and without the plan on the user's own model and batch, and compare.

The step without a plan runs at least twice: how far these two are apart is the noise. Without
noise every bit counts. Before each planned step that is compared the plan runs another one (a
*decoy*), in which the first block gets its input with the elements moved by one: memory that is
read too early, or a place that was not written, would otherwise hold the very bytes that are
right, since every step here starts from the same state. No compared step is looked into while it
runs, since waiting for the device would hide a missing wait; only when one differs are the steps
run again with checksums of what goes from block to block, to name the block.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from ebbtide.errors import RuntimeStateError
from ebbtide.memory.ledger import Ledger
from ebbtide.naming import unknown_name_message
from ebbtide.torch.forward import tensors_in
from ebbtide.torch.identity import Layout, bytes_of, have_equal_bits
from ebbtide.torch.internals import compiled_call_of, is_compiled, is_plain
from ebbtide.torch.localise import Probe, locate
from ebbtide.torch.model_state import ModelState, copy_to_host
from ebbtide.torch.runtime import Runtime
from ebbtide.torch.verification import Difference, Verification

log = logging.getLogger("ebbtide")

NUM_STEPS: Final = 4
"""Compared by default. Of a model that never trained they are: the observed one, the checked one,
one that is recorded, and one that follows what the decoy before it recorded."""

REFERENCES: Final = ("plain", "recompute")

MAX_WARM_UP: Final = 4
"""Steps until there is a plan for a budget, and one to spare."""

NUM_QUIET: Final = 2
NUM_NOISY: Final = 4
"""Runs without a plan: where two agree in every bit, and where they do not."""

NOISE_FACTOR: Final = 4.0
"""By how much more than the noise of `NUM_NOISY` runs a tensor may differ: a guess, generous since
the largest of so few is below what others reach."""

NOT_DETERMINISTIC: Final = ("does not have a deterministic implementation", "CUBLAS_WORKSPACE")
"""Parts of torch's messages where a kernel is there alone whose bits vary, or may."""

Loss = Callable[[Any], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """How the steps are run."""

    reference: str
    is_deterministic: bool


class _MustRunOtherwiseError(Exception):
    """Steps cannot be run in this way, but perhaps in another."""

    def __init__(self, way: _Way, error: BaseException) -> None:
        super().__init__(str(error))
        self.way = way


@dataclass(slots=True, kw_only=True)
class _Findings:
    """What differed by more than noise."""

    step: int = 0
    """The first step in which something did."""
    differences: dict[str, float] = field(default_factory=dict[str, float])
    """In that step, by tensor."""
    largest: float = 0.0
    """Of all steps, noise too."""


def verify(
    model: nn.Module,
    runtime: Runtime | None,
    ledger: Ledger,
    batch: Any,
    *,
    loss: Loss | None = None,
    steps: int = NUM_STEPS,
    reference: str | None = None,
    deterministic: bool = True,
) -> Verification:
    """Compare planned steps with the same step without a plan; see `Tide.verify`.

    Args:
        model: The model that `runtime` is attached to.
        runtime: None where nothing is installed, so that both steps are the same.
        ledger: What counts the runtime's copies.
    """
    if steps < 1:
        raise ValueError(f"steps is {steps}; compare 1 or more")
    if reference is not None and reference not in REFERENCES:
        raise ValueError(unknown_name_message("reference", reference, REFERENCES))
    if runtime is not None and runtime.is_closed:
        raise RuntimeStateError("verify() was called after close(). Attach the model again first.")
    if torch.is_inference_mode_enabled():
        raise RuntimeStateError("verify() was called in inference mode; call it outside of that.")
    verifier = _Verifier(model, runtime, ledger, batch, loss, steps)
    if reference == "recompute":
        verifier.refuse_compiled()
    way = _Way(reference=reference or "plain", is_deterministic=deterministic)
    with torch.enable_grad():
        while True:
            try:
                return verifier.run(way)
            except _MustRunOtherwiseError as error:
                way = verifier.choose_otherwise(error, is_given=reference is not None)


class _Verifier:
    def __init__(
        self,
        model: nn.Module,
        runtime: Runtime | None,
        ledger: Ledger,
        batch: Any,
        loss: Loss | None,
        num_steps: int,
    ) -> None:
        self._model = model
        self._runtime = runtime
        self._ledger = ledger
        self._batch = batch
        self._loss = loss
        self._num_steps = num_steps
        found = () if runtime is None else ((s.path, s.module()) for s in runtime.blocks)
        self._blocks = {path: block for path, block in found if block is not None}
        self._state = ModelState(model, tensors_in(batch))
        self._last_loss = torch.zeros(())
        self._arrived: list[str] = []
        """Parameters in the order in which backward makes their gradients."""

    def refuse_compiled(self) -> None:
        """Refuse to put checkpoints around compiled code."""
        compiled = next((path for path, b in self._blocks.items() if is_compiled(b)), None)
        if compiled is not None:
            raise ValueError(
                f"reference='recompute' was given, and {compiled} is compiled: torch would compile "
                "it anew, to code that rounds elsewhere. Leave reference= out."
            )

    def choose_otherwise(self, error: _MustRunOtherwiseError, *, is_given: bool) -> _Way:
        """Return the next way to try after one that failed.

        Raises:
            RuntimeStateError: There is none.
        """
        way, text = error.way, str(error)
        if any(part in text for part in NOT_DETERMINISTIC):
            log.warning("verify compares against noise: %s", text.splitlines()[0])
            return replace(way, is_deterministic=False)
        is_compiled_model = any(is_compiled(block) for block in self._blocks.values())
        if way.reference == "plain" and not is_given and not is_compiled_model:
            log.warning("the step without a plan ran out of memory; it runs under checkpoints now")
            return replace(way, reference="recompute")
        if way.is_deterministic:
            log.warning("deterministic kernels ran out of memory; the default ones are used now")
            return replace(way, is_deterministic=False)
        raise RuntimeStateError(
            f"verify ran out of memory under {way.reference!r} too: {text.splitlines()[0]} Give it "
            "a smaller batch; what is compared is the same."
        )

    def run(self, way: _Way) -> Verification:
        """Run and compare all steps; the model is left as it was.

        Raises:
            _MustRunOtherwiseError: They cannot be run in this way.
        """
        runtime = self._runtime
        try:
            if runtime is not None and runtime.follow_shape is not None:
                self._warm_up(runtime)
            if runtime is not None:
                runtime.is_untimed = True
            with _kernels(is_deterministic=way.is_deterministic):
                return self._compare(way)
        except RuntimeError as error:
            if not _may_run_otherwise(error):
                raise
            failed = _MustRunOtherwiseError(way, error)
        finally:
            if runtime is not None:
                runtime.is_untimed = False
            self._state.restore()
        raise failed  # here, where nothing holds the graph of the step that failed

    def _warm_up(self, runtime: Runtime) -> None:
        """Let a budget have its plan from steps under the user's own kernels."""
        for _ in range(MAX_WARM_UP):
            if runtime.plan is not None:
                return
            self._step(None)

    def _compare(self, way: _Way) -> Verification:
        wanted = self._reference(way)
        noise = self._measure_noise(way, wanted)
        found = _Findings()
        counts = [0, 0, 0]
        for step in range(1, self._num_steps + 1):
            if self._runtime is not None and (step > 1 or self._runtime.plan is not None):
                self._decoy()
            before = self._ledger.snapshot()
            self._step(None)
            after = self._ledger.snapshot()
            counts[0] += after.moved_out_bytes - before.moved_out_bytes
            counts[1] += after.moved_in_bytes - before.moved_in_bytes
            counts[2] += after.num_recomputed_ops - before.num_recomputed_ops
            differences = self._differences(wanted)
            _note(found, step, differences, noise)
        first = self._first_difference(way, found) if found.differences else None
        plan = None if self._runtime is None else self._runtime.plan
        name = "keep" if self._runtime is None else "not there yet"
        return Verification(
            equal=not found.differences,
            largest_difference=found.largest,
            noise=_largest(noise.values()),
            first_difference=first,
            model=type(self._model).__name__,
            plan=name if plan is None else plan.name,
            reference=way.reference,
            is_deterministic=way.is_deterministic,
            is_training=self._model.training,
            num_steps=self._num_steps,
            num_tensors=len(wanted),
            loss=float(wanted["loss"]),
            moved_out_bytes=counts[0],
            moved_in_bytes=counts[1],
            num_recomputed_ops=counts[2],
        )

    def _reference(self, way: _Way) -> dict[str, Tensor]:
        """Run the step without a plan; its tensors are copied to host memory."""
        last: dict[str, None] = {}

        def arrive(name: str) -> Callable[[Tensor], None]:
            def hook(_: Tensor) -> None:
                last.pop(name, None)  # of a shared parameter the last part counts
                last[name] = None

            return hook

        handles = [
            p.register_hook(arrive(name))
            for name, p in self._model.named_parameters()
            if p.requires_grad
        ]
        try:
            self._step(way)
        finally:
            for handle in handles:
                handle.remove()
        self._arrived = list(last)
        # A checkpoint writes to buffers twice, as to the averages of a batch normalisation.
        has_buffers = way.reference == "plain"
        return {
            name: copy_to_host(tensor)
            for name, tensor in self._results().items()
            if has_buffers or not name.startswith("buffer ")
        }

    def _measure_noise(self, way: _Way, wanted: Mapping[str, Tensor]) -> dict[str, float]:
        noise: dict[str, float] = {}
        num_runs = NUM_QUIET
        run = 1
        while run < num_runs:
            self._step(way)
            for name, difference in self._differences(wanted).items():
                noise[name] = _larger(noise.get(name, 0.0), difference)
                num_runs = NUM_NOISY
            run += 1
        return noise

    def _first_difference(self, way: _Way, found: _Findings) -> Difference:
        """Name where a step first went another way, if need be from steps that are looked into."""
        plain = [self._probe(way), self._probe(way)]
        planned = Probe()
        for _ in range(NUM_QUIET):
            self._decoy()
            planned = self._probe(None)
            if planned.differs_from(plain):
                break
        place = locate(
            found.differences,
            blocks=tuple(self._blocks),
            arrived=self._arrived,
            plain=plain,
            planned=planned,
        )
        return Difference(
            step=found.step,
            block=place.block,
            tensor=place.tensor,
            largest_difference=found.differences.get(place.tensor, math.nan),
        )

    # -- steps ---------------------------------------------------------------------------------

    def _step(self, way: _Way | None) -> None:
        """Run forward and backward from the state of the start; None: under the plan."""
        self._state.start()
        with self._without_plan(way):
            loss = self._loss_of(self._call())
            self._last_loss = loss.detach()
            loss.backward()

    def _probe(self, way: _Way | None) -> Probe:
        with Probe().on(self._hookable()) as probe:
            self._step(way)
        return probe

    def _decoy(self) -> None:
        """Run a planned step with other values in every block, so that none is right by chance."""
        first = next(iter(self._hookable().values()), None)
        if first is None:
            return  # a hook of a compiled block would be compiled with it
        handle = first.register_forward_pre_hook(_move_elements, prepend=True, with_kwargs=True)
        try:
            self._step(None)
        finally:
            handle.remove()

    def _hookable(self) -> dict[str, nn.Module]:
        return {path: b for path, b in self._blocks.items() if compiled_call_of(b) is None}

    @contextmanager
    def _without_plan(self, way: _Way | None) -> Generator[None]:
        if way is None or self._runtime is None:
            yield
            return
        self._runtime.is_paused = True
        try:
            if way.reference == "recompute":
                with _recomputing(self._blocks):
                    yield
            else:
                yield
        finally:
            self._runtime.is_paused = False

    def _call(self) -> Any:
        if isinstance(self._batch, dict):
            return self._model(**self._batch)
        if isinstance(self._batch, list | tuple):
            return self._model(*self._batch)
        return self._model(self._batch)

    def _loss_of(self, output: Any) -> Tensor:
        found: Any = output
        if self._loss is not None:
            found = self._loss(output)
        elif isinstance(output, dict):
            found = output.get("loss")
        elif not isinstance(output, Tensor):
            found = getattr(output, "loss", None)
        if not isinstance(found, Tensor) or found.numel() != 1 or not found.requires_grad:
            what = "loss(output)" if self._loss is not None else "the model's output"
            raise ValueError(
                f"{what} gave {_describe(found)}, and backward needs a tensor of one element that "
                "depends on parameters. Give labels with the batch, so that the output has a "
                "`.loss`, or verify(batch, loss=lambda output: ...)."
            )
        return found

    # -- comparisons ---------------------------------------------------------------------------

    def _results(self) -> dict[str, Tensor]:
        """Return what the last step left, by name."""
        results = {"loss": self._last_loss}
        for name, parameter in self._model.named_parameters():
            if parameter.grad is not None:
                results[f"gradient of {name}"] = parameter.grad
        for number, tensor in enumerate(tensors_in(self._batch)):
            if tensor.is_leaf and tensor.grad is not None:
                results[f"gradient of tensor {number} of the batch"] = tensor.grad
        for name, buffer in self._model.named_buffers():
            results[f"buffer {name}"] = buffer
        results["random state"] = torch.get_rng_state()
        return results

    def _differences(self, wanted: Mapping[str, Tensor]) -> dict[str, float]:
        """Compare what the last step left with `wanted`, one tensor in host memory at a time."""
        results = self._results()
        differences = dict.fromkeys((name for name in wanted if name not in results), math.nan)
        for name, tensor in results.items():
            expected = wanted.get(name)
            if expected is None:
                if not name.startswith("buffer "):
                    differences[name] = math.nan
                continue
            found = copy_to_host(tensor)
            if found.shape != expected.shape or found.dtype != expected.dtype:
                differences[name] = math.nan
            elif not have_equal_bits(found, expected):
                differences[name] = _distance(found, expected)
        return differences


def _note(
    found: _Findings, step: int, differences: Mapping[str, float], noise: Mapping[str, float]
) -> None:
    found.largest = _larger(found.largest, _largest(differences.values()))
    if found.differences:
        return
    # A NaN is no less than anything.
    found.differences = {
        name: difference
        for name, difference in differences.items()
        if not difference <= NOISE_FACTOR * noise.get(name, -1.0)
    }
    found.step = step


def _distance(found: Tensor, expected: Tensor) -> float:
    if found.is_complex():
        found, expected = torch.view_as_real(found), torch.view_as_real(expected)
    return (found.double() - expected.double()).abs().max().item()


def _larger(left: float, right: float) -> float:
    return math.nan if math.isnan(left) or math.isnan(right) else max(left, right)


def _largest(values: Any) -> float:
    largest = 0.0
    for value in values:
        largest = _larger(largest, value)
    return largest


def _describe(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"a tensor of shape {tuple(value.shape)}, which needs " + (
        "a gradient" if value.requires_grad else "no gradient"
    )


def _may_run_otherwise(error: RuntimeError) -> bool:
    text = str(error)
    # torch reports a failed allocation in host memory as a plain RuntimeError.
    is_oom = isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in text
    return is_oom or any(part in text for part in NOT_DETERMINISTIC)


def _move_elements(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Give a block its first floating-point tensor with the elements of each row moved by one."""
    del module
    for index, value in enumerate(args):
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim():
            return (*args[:index], value.roll(1, -1), *args[index + 1 :]), kwargs
    for name, value in kwargs.items():
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim():
            return args, {**kwargs, name: value.roll(1, -1)}
    return args, kwargs


@contextmanager
def _kernels(*, is_deterministic: bool) -> Generator[None]:
    """Ask torch for kernels that give the same bits each time; else leave things as they are."""
    if not is_deterministic:
        yield
        return
    flags: Any = torch.utils.deterministic
    was_on = torch.are_deterministic_algorithms_enabled()
    was_warning = torch.is_deterministic_algorithms_warn_only_enabled()
    was_filling = flags.fill_uninitialized_memory
    had_cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    was_trying = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    # Filling every new tensor with NaN would only take time.
    flags.fill_uninitialized_memory = False
    # Its backward adds up in varying order whatever is asked for.
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=was_warning)
        flags.fill_uninitialized_memory = was_filling
        torch.backends.cuda.enable_cudnn_sdp(had_cudnn)
        torch.backends.cudnn.benchmark = was_trying


@contextmanager
def _recomputing(blocks: Mapping[str, nn.Module]) -> Generator[None]:
    """Run each block under torch's own checkpoint, with its input in pageable host memory.

    Nothing of ebbtide's runtime takes part, so that the two cannot be wrong in the same way.
    """
    before = {path: block.__dict__.get("forward") for path, block in blocks.items()}
    for block in blocks.values():
        block.__dict__["forward"] = _checkpointed(block.forward)
    try:
        yield
    finally:
        for path, block in blocks.items():
            del block.__dict__["forward"]
            if before[path] is not None:
                block.__dict__["forward"] = before[path]


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with saved_tensors_hooks(_to_host, _from_host):
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run


@dataclass(frozen=True, slots=True, kw_only=True)
class _OnHost:
    row: Tensor
    layout: Layout
    device: torch.device


def _to_host(tensor: Tensor) -> _OnHost | Tensor:
    if type(tensor) is not Tensor or not is_plain(tensor):
        return tensor
    row = bytes_of(tensor.detach())
    copy = torch.empty(row.shape, dtype=row.dtype, device="cpu").copy_(row)
    return _OnHost(row=copy, layout=Layout.of(tensor), device=tensor.device)


def _from_host(packed: _OnHost | Tensor) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    return packed.layout.over(packed.row.to(packed.device))
