"""`attach`: two lines that make a model's activations ebb and flow."""

# Over 600 lines, near half of them docstrings: `attach` and the handle that it returns are one
# interface, and what makes the handle of the arguments stands beside them.

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import TracebackType
from typing import Any, Final, Self

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ebbtide.errors import MemoryTierError, ModelError, PlanError, RuntimeStateError
from ebbtide.machine import Machine
from ebbtide.memory.disk import DiskStore
from ebbtide.memory.ledger import Ledger, Statistics
from ebbtide.naming import unknown_name_message
from ebbtide.plan import Decision, Plan
from ebbtide.planner.explain import Explanation, explain
from ebbtide.planner.named import MIN_BYTES, PlanFamily, named_plan, parse_plan_name
from ebbtide.planner.solve import BUDGET_PLANNERS
from ebbtide.supported import check_versions
from ebbtide.torch.blocks import find_blocks
from ebbtide.torch.budgets import BudgetPlanner
from ebbtide.torch.devices.base import AbstractMeter
from ebbtide.torch.devices.cpu import CpuMeter
from ebbtide.torch.devices.cuda import CudaMeter
from ebbtide.torch.devices.delays import AbstractDelay, CudaDelay, ThreadDelay
from ebbtide.torch.hooks import Hooks
from ebbtide.torch.internals import is_compiled
from ebbtide.torch.maker import PlanMaker
from ebbtide.torch.ranks import Ranks, count_local_ranks
from ebbtide.torch.refusals import (
    device_of,
    refuse_checkpointing,
    refuse_compiled,
    refuse_cuda_graphs,
)
from ebbtide.torch.report import Outcome, read_memory, write_report
from ebbtide.torch.runtime import Runtime
from ebbtide.torch.sanitizer import Sanitizer
from ebbtide.torch.tiers import HostRegion
from ebbtide.torch.variants import BACKENDS, Compilation
from ebbtide.torch.verification import Verification
from ebbtide.torch.verify import NUM_STEPS, verify
from ebbtide.units import format_bytes, parse_bytes, parse_path_and_cap
from ebbtide.workload import Workload

log = logging.getLogger("ebbtide")

DISABLE_VARIABLE: Final = "EBBTIDE_DISABLE"
SANITIZE_VARIABLE: Final = "EBBTIDE_SANITIZE"

DEFAULT_PLAN: Final = "balanced"
"""For `attach` without a plan and without a budget."""

DEFAULT_COMPILED_PLAN: Final = "offload"
"""The same, for blocks that were compiled before: nothing of them can be recomputed."""

NOTHING_AGAIN: Final = frozenset({PlanFamily.KEEP, PlanFamily.OFFLOAD, PlanFamily.OFFLOAD_LAST})
"""Families of plans that need nothing recomputed, where nothing is known of how things are made."""

DEFAULT_PLANNER: Final = "lp"
"""For `attach` with a budget."""


def attach(
    model: nn.Module,
    plan: str | Plan | None = None,
    *,
    budget: str | int | None = None,
    host: str | int | None = None,
    disk: str | Sequence[str] | None = None,
    disk_checksums: bool = False,
    blocks: str | Sequence[str] | None = None,
    decide: Mapping[str, str | Decision] | None = None,
    planner: str | None = None,
    disk_write_per_day: str | int | None = None,
    min_bytes: int = MIN_BYTES,
    compile: bool | str = False,
    sanitize: bool = False,
    ranks: ProcessGroup | None = None,
) -> Tide:
    """Let a model's activations leave the device in forward and come back for backward.

    The model is not changed: its blocks get hooks, which `Tide.close` takes off again. Losses
    and gradients have the same bits as without ebbtide, wherever torch itself is deterministic.
    The first training step observes the model under the most frugal decisions; the plan runs
    from the second on, and everything is checked bit for bit the first time. With a budget the
    second step is measured, still frugally, and the plan runs from the third on; a batch of
    another shape gets a plan of its own, worked out from what was measured.

    Args:
        model: The model, already on its device.
        plan: A named plan (`keep`, `recompute`, `offload-inputs`, `offload`, `balanced`,
            `offload-last:K`) or a `Plan` made for this model. Default: `balanced`, or what the
            planner finds for `budget`.
        budget: Most device memory of a step, parameters, gradients and optimizer state
            included: `"40GiB"`, `"50%"` of the device, bytes, or `"auto"`, which leaves a reserve
            to the allocator. The fastest plan that keeps to it is used.
        host: Most pinned host memory to take, such as `"64GiB"`, by all ranks of the node
            together: each takes its share at most. What does not fit is recomputed or stays.
            Default: what the plan needs, with a budget at most 7/8 of what is free. Where the
            system gives less, a warning says why, and the plan is made for that.
        disk: `"FOLDER:SIZE"`, or several of them, on several disks: evict to a file of at most
            that size in that folder, of all ranks of the node together; each activation is
            spread over the folders. With `host` as well, what does not fit there goes to disk,
            the earliest blocks first.
        disk_checksums: Compare what is read from disk with a checksum of what was written, and
            raise before a wrong gradient is made from it. Needs xxhash (`ebbtide[disk]`).
        blocks: Module paths of the blocks, or patterns such as `"encoder.layer.*"`. Default:
            the longest run of modules of one class.
        decide: With a budget: decisions to keep to, by pattern over activation names, such as
            `{"*.mlp.*": "RECOMPUTE"}`; later patterns win.
        planner: With a budget: one of `ebbtide.planner.BUDGET_PLANNERS`. Default: `lp`.
        disk_write_per_day: With a budget and a disk: most bytes of this process that a day of
            steps may write there, such as `"1.3TB"`, which one drive write per day (DWPD) is of
            a disk of that size. Default: no limit.
        min_bytes: Activations of fewer bytes are never moved.
        compile: Compile each block, with what the plan recomputes as a part of the compiled
            backward: True, or a backend of `ebbtide.torch.variants.BACKENDS`. Each set of things
            to recompute is compiled once for all blocks of a class, in the first steps. With a
            budget the third step is measured instead of the second. Blocks that were compiled
            before must do without, and take no budget.
        sanitize: Compare everything that comes back with what was saved, in every step, under
            poison and delays (`docs/verify.md`); `EBBTIDE_SANITIZE=1` does so for every attach.
        ranks: With a budget: a process group whose ranks run the same blocks and get one plan,
            made for the worst that any of them measured. All of them attach with the same
            arguments and do the same steps; they wait for each other once, up to 300 s, where
            the first block of the third step starts. Default: this process plans for itself,
            and ebbtide waits for no other.

    Returns:
        A handle: `verify(batch)`, `statistics()`, `report()`, `close()`; it works in `with`.

    Raises:
        ModelError: The model has no repeated blocks, is compiled, or checkpoints itself.
        PlanError: The plan is unknown or was made for another model.
        RuntimeStateError: The model is attached already.
        MemoryTierError: The disk folder is missing, read-only or too full; or there is no such
            tier on this device.
        ValueError: A size cannot be read, both a plan and a budget were given, there is no such
            backend, no disk for its checksums, or this process is no rank of `ranks`.

    The third training step raises `BudgetError` if no plan keeps to the budget; it names the
    smallest that would do. With `ranks` all of them raise it, and `RankError` names a rank that did
    not come or was asked for something else. The model is left as it was then, and trains on.
    """
    if _is_set(DISABLE_VARIABLE):
        _say_disabled()
        return Tide(model, None, Ledger(), None, None)
    check_versions("torch", torch.__version__)
    if budget is not None and plan is not None:
        name = plan if isinstance(plan, str) else plan.name
        raise ValueError(
            f"plan={name!r} and budget={budget!r} were both given; a budget makes the plan. "
            "Give one of them."
        )
    for name, value in {
        "decide": decide,
        "planner": planner,
        "disk_write_per_day": disk_write_per_day,
        "ranks": ranks,
    }.items():
        if budget is None and value is not None:
            raise ValueError(
                f"{name}= was given without a budget, and only the planner for a budget takes it. "
                "Give budget=, or leave it out."
            )
    wish = (
        None
        if budget is None
        else _Wish(
            budget=budget,
            decide=decide,
            planner=planner or DEFAULT_PLANNER,
            written_bytes_per_day=_daily_bytes(disk_write_per_day, disk),
            ranks=ranks,
        )
    )
    attachment = _Attachment(
        model, plan, wish, host, disk, disk_checksums, blocks, min_bytes, compile
    )
    tide = attachment.run(sanitize=sanitize or _is_set(SANITIZE_VARIABLE))
    _attached[model] = tide
    return tide


def _daily_bytes(given: str | int | None, disk: str | Sequence[str] | None) -> int:
    """Return the most bytes that a day may write to disk; 0: no limit."""
    if given is None:
        return 0
    num_bytes = parse_bytes(given)
    if not disk or not num_bytes:
        raise ValueError(
            f"disk_write_per_day={given!r} was given without a disk to write to. Give "
            "disk='FOLDER:SIZE' beside it, or leave it out."
            if num_bytes
            else f"disk_write_per_day={given!r} lets nothing be written; leave disk= out instead."
        )
    return num_bytes


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "0") not in ("", "0")


@cache
def _say_disabled() -> None:
    """Warn once in a process, since scripts attach in loops and in many ranks."""
    log.warning("%s is set: attach() does nothing", DISABLE_VARIABLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wish:
    """What the planner is asked for."""

    budget: str | int
    decide: Mapping[str, str | Decision] | None
    planner: str
    written_bytes_per_day: int
    ranks: ProcessGroup | None


class Tide:
    """An attached model. Close it, or use it in `with`, to take everything off again."""

    def __init__(
        self,
        model: nn.Module,
        runtime: Runtime | None,
        ledger: Ledger,
        hooks: Hooks | None,
        disk: DiskStore | None,
        budgets: BudgetPlanner | None = None,
        compilation: Compilation | None = None,
    ) -> None:
        self._model = weakref.ref(model)
        self._runtime = runtime
        self._ledger = ledger
        self._hooks = hooks
        self._disk = disk
        self._budgets = budgets
        self._compilation = compilation

    @property
    def plan(self) -> Plan | None:
        """The plan, once the first training step has been observed; None before."""
        return None if self._runtime is None else self._runtime.plan

    @property
    def workload(self) -> Workload | None:
        """What was observed in the first training step; None before."""
        return None if self._runtime is None else self._runtime.workload

    @property
    def runtime(self) -> Runtime | None:
        """The runtime, for `observe`; None when nothing is installed."""
        return self._runtime

    @property
    def machine(self) -> Machine | None:
        """What was measured of the device and its links; None without a budget.

        With `ranks` the worst that any of them measured, and None until the plan is made.
        """
        if self._budgets is None or not self._budgets.is_known:
            return None
        return self._budgets.machine

    @property
    def num_graphs(self) -> int:
        """Forwards whose graphs a budget's plan has room for at once; 1 without a budget."""
        return 1 if self._budgets is None else self._budgets.num_graphs

    def explain(self, name: str) -> Explanation:
        """Say what an activation costs to move and to recompute, and why the plan decides so.

        Raises:
            PlanError: There is no such activation; the nearest names are given.
            RuntimeStateError: There is no plan yet, or it was not made for a budget.
        """
        if self._budgets is None or self.plan is None or self.workload is None:
            raise RuntimeStateError(
                "explain() needs a plan that was made for a budget, with measured times: "
                "attach(model, budget=...), and train three steps."
            )
        return explain(self.plan, self.workload, self._budgets.machine, name)

    def statistics(self) -> Statistics:
        """Return what was moved, held and recomputed since attach or the last reset."""
        if self._runtime is None:
            return self._ledger.snapshot()
        self._runtime.bury()
        sanitizer = self._runtime.sanitizer
        found = None if sanitizer is None else sanitizer.statistics()
        return replace(self._ledger.snapshot(), sanitizer=found)

    @property
    def host_taken_bytes(self) -> int:
        """Pinned host memory that is taken from the system now."""
        host = self._host_region()
        return 0 if host is None else host.buffer.numel()

    @property
    def host_region_address(self) -> int:
        """Where the pinned host region starts; it stays the same within a step."""
        host = self._host_region()
        return 0 if host is None else host.buffer.data_ptr()

    def _host_region(self) -> HostRegion | None:
        tiers = None if self._runtime is None else self._runtime.tiers
        return None if tiers is None else tiers.host

    def verify(
        self,
        batch: Any,
        *,
        loss: Callable[[Any], Tensor] | None = None,
        steps: int = NUM_STEPS,
        reference: str | None = None,
        deterministic: bool = True,
    ) -> Verification:
        """Run training steps with and without the plan on a batch, and compare every bit.

        The loss, every gradient, every buffer and the random state afterwards are compared. All
        is put back: parameters, buffers, gradients, modes, and the random states of torch, Python
        and numpy. No optimizer is stepped. Where runs without the plan differ among themselves,
        that is the noise, and what is compared. A model that has not trained yet gets its plan
        from these steps. What this costs, in time and memory, is in `docs/verify.md`.

        Args:
            batch: What a step gives the model: a dict of keyword arguments, a tuple or list of
                positional ones, or the only one.
            loss: From the model's output to a loss of one element. Default: the output's `.loss`,
                or the output itself if it is a tensor.
            steps: Planned steps to compare.
            reference: What runs without the plan: `plain`, which keeps everything, or
                `recompute`, torch's own checkpoint around each block with its input in host
                memory. Default: `plain`, and `recompute` if that runs out of memory.
            deterministic: Ask torch for kernels that give the same bits each time, as far as it
                has them. They may be slower, and take more memory.

        Returns:
            What was found; `str()` of it is for people, `to_json()` for programs.

        Raises:
            ValueError: There is no loss of one element, or an argument is none of those above.
            ModelError: An optimizer runs in backward, or the step writes to parameters.
            RuntimeStateError: After `close`, or when memory does not suffice in any way.
        """
        model = self._model()
        if model is None:
            raise RuntimeStateError("the model that was attached is gone; attach the one you have.")
        return verify(
            model,
            self._runtime,
            self._ledger,
            batch,
            loss=loss,
            steps=steps,
            reference=reference,
            deterministic=deterministic,
        )

    def reset_statistics(self) -> None:
        """Start counting anew."""
        self._ledger.reset()

    def report(self) -> str:
        """Return lines for people: predicted, measured, what was moved, who holds the peak, advice.

        Reads what was counted, and waits for the device; nothing is measured for it in a step.
        `docs/report.md` explains the lines.
        """
        if self._runtime is None:
            return "ebbtide keeps everything: no hook is installed"
        if self._runtime.plan is None:
            return "ebbtide has not observed a whole training step yet"
        memory = read_memory(self._runtime.device)
        return write_report(
            Outcome(
                plan=self._runtime.plan,
                counts=self.statistics(),
                workload=self.workload,
                machine=self.machine,
                paced=self._runtime.read_pace(),
                memory=memory,
            )
        )

    def close(self) -> None:
        """Take the hooks off and give the tiers' memory back. A second call does nothing.

        A graph that is still alive must have run backward before: its evicted values are gone
        afterwards.
        """
        if self._hooks is not None:
            self._hooks.close()
        if self._compilation is not None:
            self._compilation.close()
        if self._runtime is not None:
            self._runtime.close()
            if self._runtime.traffic is not None:
                self._runtime.traffic.bury()
            if self._runtime.tiers is not None:
                # Also where the plan of the last batch moved nothing, and that of another did.
                self._runtime.tiers.close()
        if self._disk is not None:
            self._disk.close()
        for model in [m for m, t in _attached.items() if t is self]:
            del _attached[model]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


_attached: weakref.WeakKeyDictionary[nn.Module, Tide] = weakref.WeakKeyDictionary()


class _Attachment:
    """Checks everything that can be checked before a hook is installed, then installs."""

    def __init__(
        self,
        model: nn.Module,
        plan: str | Plan | None,
        wish: _Wish | None,
        host: str | int | None,
        disk: str | Sequence[str] | None,
        disk_checksums: bool,
        blocks: str | Sequence[str] | None,
        min_bytes: int,
        compile: bool | str,
    ) -> None:
        self._model = model
        self._wish = wish
        num_local_ranks = count_local_ranks()
        self._node_host_bytes = None if host is None else parse_bytes(host)
        self._host_cap = None if host is None else parse_bytes(host) // num_local_ranks
        given = [disk] if isinstance(disk, str) else disk or ()
        self._disks = [
            replace(spec, cap_bytes=spec.cap_bytes // num_local_ranks)
            for spec in map(parse_path_and_cap, given)
        ]
        self._has_checksums = disk_checksums
        if min_bytes < 0:
            raise ValueError(f"min_bytes is {min_bytes}; it must be 0 or more")
        self._min_bytes = min_bytes
        self._blocks = find_attachable_blocks(model, blocks)
        compiled = [path for path, block in self._blocks.items() if is_compiled(block)]
        self._plan = plan or (DEFAULT_COMPILED_PLAN if compiled else DEFAULT_PLAN)
        self._compiled = next(iter(compiled), None)
        """A block that was compiled before."""
        self._backend = _backend_name(compile)
        if self._backend is not None and self._compiled is not None:
            raise ModelError(
                f"{self._compiled} is compiled already, and compile={compile!r} was given. Leave "
                "compile= out, or attach before you compile."
            )
        if wish is not None and self._compiled is not None:
            raise ModelError(
                f"budget={wish.budget!r} was given, and {self._compiled} is compiled already: what "
                "it saves and what it recomputes was decided then. Let ebbtide compile the blocks, "
                "with attach(model, budget=..., compile=True), or give a plan, such as 'offload'."
            )
        self._device = device_of(self._blocks)
        self._budgets = None if wish is None else self._make_planner(wish)
        self._check_plan()
        self._check_tiers()

    def _make_planner(self, wish: _Wish) -> BudgetPlanner:
        if wish.planner not in BUDGET_PLANNERS:
            raise PlanError(unknown_name_message("planner", wish.planner, BUDGET_PLANNERS))
        return BudgetPlanner(
            wish.budget,
            device=self._device,
            host_bytes=self._node_host_bytes,
            disks=self._disks,
            decide=wish.decide,
            min_bytes=self._min_bytes,
            planner=wish.planner,
            written_bytes_per_day=wish.written_bytes_per_day,
            ranks=None if wish.ranks is None else Ranks(wish.ranks),
        )

    def run(self, *, sanitize: bool) -> Tide:
        ledger = Ledger()
        is_keep = isinstance(self._plan, str) and self._plan == "keep"
        compilation = None
        if self._backend is not None:
            compilation = Compilation(self._blocks, self._backend, is_planned=not is_keep)
        if is_keep:
            return Tide(self._model, None, ledger, None, None, compilation=compilation)
        store = None
        if self._disks:
            store = DiskStore(self._disks, has_checksums=self._has_checksums)
        sanitizer = Sanitizer(_delay_of(self._device)) if sanitize else None
        maker = PlanMaker(
            self._plan,
            budgets=self._budgets,
            device=self._device,
            host_cap_bytes=self._host_cap,
            disk=store,
            min_bytes=self._min_bytes,
            ledger=ledger,
            sanitizer=sanitizer,
        )
        meter = None if self._budgets is None else meter_of(self._device)
        runtime = Runtime(self._model, self._blocks, maker.make_plan, ledger, meter)
        runtime.device = self._device
        runtime.sanitizer = sanitizer
        if self._budgets is not None:
            runtime.follow_shape = maker.follow_shape
            runtime.note_out_of_memory = maker.note_out_of_memory
            if self._wish is None or self._wish.ranks is None:
                # Each rank would correct its own plan by its own pace.
                runtime.note_pace = maker.note_pace
            else:
                runtime.agree = maker.agree
            runtime.note_growth = maker.forget_plans
            runtime.note_num_graphs = maker.note_num_graphs
        hooks = Hooks(runtime)
        runtime.compilation = compilation
        runtime.hook_blocks = hooks.hook_blocks
        runtime.hook_scopes = hooks.hook_scopes
        tide = Tide(self._model, runtime, ledger, hooks, store, self._budgets, compilation)
        maker.close = runtime.close_all = _closer_of(tide)
        return tide

    def _check_plan(self) -> None:
        if isinstance(self._plan, str):
            parsed = parse_plan_name(self._plan)
            if parsed.num_last_blocks is not None and parsed.num_last_blocks > len(self._blocks):
                raise PlanError(
                    f"plan {self._plan!r} names {parsed.num_last_blocks} blocks, but "
                    f"{type(self._model).__name__} has {len(self._blocks)}. Name at most as many."
                )
            if self._compiled is not None and parsed.family not in NOTHING_AGAIN:
                raise PlanError(
                    f"plan {self._plan!r} recomputes, but {self._compiled} is compiled already: "
                    "what it saves and what it recomputes was decided then. Use 'offload' or "
                    "'offload-last:K', which move what it saves."
                )
            return
        # An activation is named by its block's path, and a module in it or an operator.
        starts = tuple(f"{path}{mark}" for path in self._blocks for mark in ".:")
        foreign = [name for name in self._plan.decisions if not name.startswith(starts)]
        if foreign:
            raise PlanError(
                f"plan {self._plan.name!r} was made for {self._plan.model}, and decides for "
                f"{foreign[0]}, which is in no block of this {type(self._model).__name__}. "
                "Make a plan for this model, or name its blocks: attach(model, blocks=[...])."
            )

    def _check_tiers(self) -> None:
        if self._has_checksums and not self._disks:
            raise ValueError(
                "disk_checksums=True was given without a disk, and only what is read from one has "
                "checksums. Give disk='FOLDER:SIZE', or leave it out."
            )
        if isinstance(self._plan, Plan) and self._plan.disk_bytes and not self._disks:
            raise MemoryTierError(
                f"plan {self._plan.name!r} evicts {format_bytes(self._plan.disk_bytes)} to disk, "
                "but no disk was given. Give one: attach(model, disk='/path/to/folder:20GiB')."
            )
        if self._device.type == "cuda":
            return
        if self._node_host_bytes is not None:
            raise MemoryTierError(
                f"host={format_bytes(self._node_host_bytes)} was given, but the model is on "
                f"{self._device.type!r}: there, host memory is the device's own memory. "
                "Leave host= out; use disk='FOLDER:SIZE' to move activations out of memory."
            )
        if isinstance(self._plan, Plan) and self._plan.host_bytes:
            raise MemoryTierError(
                f"plan {self._plan.name!r} evicts {format_bytes(self._plan.host_bytes)} to host "
                f"memory, but the model is on {self._device.type!r}: there, that is the device's "
                "own memory. Make the plan again on this device, with disk='FOLDER:SIZE'."
            )
        if not self._disks and self._moves():
            raise MemoryTierError(
                f"plan {self._plan!r} moves activations off the device, but the model is on "
                f"{self._device.type!r} and has no other memory. Give a disk: "
                "attach(model, disk='/path/to/folder:20GiB'), or use plan='recompute'."
            )

    def _moves(self) -> bool:
        if isinstance(self._plan, Plan) or self._wish is not None:
            return False  # what it moves was checked, or the planner knows which tiers there are
        return parse_plan_name(self._plan).family not in (PlanFamily.KEEP, PlanFamily.RECOMPUTE)


def _delay_of(device: torch.device) -> AbstractDelay:
    return CudaDelay(device) if device.type == "cuda" else ThreadDelay()


def _backend_name(compile: bool | str) -> str | None:
    """Return what compiles the blocks; None: nothing does."""
    if isinstance(compile, bool):
        return BACKENDS[0] if compile else None
    if compile not in BACKENDS:
        raise ValueError(unknown_name_message("backend", compile, BACKENDS))
    return compile


def _closer_of(tide: Tide) -> Callable[[], None]:
    known = weakref.ref(tide)

    def close() -> None:
        found = known()
        if found is not None:
            found.close()  # the model is left as it was, and trains on

    return close


def attach_to_measure(model: nn.Module, blocks: str | Sequence[str] | None = None) -> Tide:
    """Attach for `observe`: measure under the most frugal decisions, and keep to those.

    Raises:
        ModelError: As `attach` does.
        RuntimeStateError: The model is attached already.
    """
    found = find_attachable_blocks(model, blocks)
    ledger = Ledger()
    runtime = Runtime(model, found, _recompute, ledger, meter_of(device_of(found)))
    tide = Tide(model, runtime, ledger, Hooks(runtime), None)
    _attached[model] = tide
    return tide


def _recompute(workload: Workload) -> tuple[Plan, None]:
    return named_plan("recompute", workload), None


def meter_of(device: torch.device) -> AbstractMeter:
    """Return the clock and the allocator's counters of `device`."""
    return CudaMeter(device) if device.type == "cuda" else CpuMeter()


def find_attachable_blocks(
    model: nn.Module, blocks: str | Sequence[str] | None
) -> dict[str, nn.Module]:
    """Return the blocks of a model that can be attached.

    Raises:
        ModelError: It has no such blocks, is compiled, or checkpoints itself.
        RuntimeStateError: It is attached already.
    """
    _refuse_attached(model)
    found = find_blocks(model, blocks)
    refuse_compiled(model, found)
    refuse_cuda_graphs(found)
    refuse_checkpointing(model)
    return found


def _refuse_attached(model: nn.Module) -> None:
    for other in _attached:
        if any(m is other for m in model.modules()) or any(m is model for m in other.modules()):
            raise RuntimeStateError(
                f"{type(other).__name__} is attached already; a model has one plan at a time. "
                "Call close() on what attach() returned before."
            )
