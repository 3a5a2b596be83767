"""`plan_for`: a block and a budget in, a policy for `jax.checkpoint` out."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import jax

from ebbtide.budget import parse_budget
from ebbtide.catalog.machines import find_machine
from ebbtide.errors import BudgetError, PlanError
from ebbtide.jax.clock import measure
from ebbtide.jax.internals import refuse_ignored_names
from ebbtide.jax.names import with_names
from ebbtide.jax.observe import LAYER, Observation, Pace, Rates, observe
from ebbtide.jax.policy import NamedPolicy, check_policy, policy_of
from ebbtide.jax.probe import probe_machine
from ebbtide.jax.processes import take_first_machine, take_first_pace
from ebbtide.jax.stacking import charge_moves
from ebbtide.jax.verify import MIN_LAYERS, Verification, scan_body, verify
from ebbtide.machine import Machine
from ebbtide.plan import Decision, Plan
from ebbtide.planner.named import MIN_BYTES
from ebbtide.planner.solve import plan_for_budget
from ebbtide.supported import check_versions
from ebbtide.units import format_bytes, parse_bytes
from ebbtide.workload import Workload

SCAN_PLANNER = "uniform"
"""A scanned stack has one body, and so one decision for all its layers."""
UNROLLED_PLANNER = "lp"

_NUM_SHOWN = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Tide:
    """A plan for a stack of equal blocks, and how to carry it out."""

    plan: Plan
    """One decision for each value of each layer."""
    workload: Workload
    """What was planned: `layers` blocks, with times."""
    observation: Observation
    """The block as it was traced."""
    machine: Machine
    """The links and tiers that were planned with."""
    is_scanned: bool
    """All layers are one body of a `jax.lax.scan`, with one decision."""
    message: str
    """The planner's own sentence."""

    @property
    def layers(self) -> int:
        """Blocks in the stack."""
        return len(self.workload.blocks)

    @property
    def keeps_everything(self) -> bool:
        """Nothing has to leave: `checkpoint` returns the block as it is."""
        return all(self._keeps_all(layer) for layer in range(self.layers))

    @property
    def policy(self) -> Callable[..., Any]:
        """The policy for `jax.checkpoint`, for a block whose values have the names.

        `checkpoint` places them and uses it. It is `save_and_offload_only_these_names`.

        Raises:
            PlanError: The layers differ: take `named_policy(layer).to_jax()`.
            RuntimeStateError: jax is set to ignore names (`JAX_REMAT3`).
        """
        return self.named_policy().to_jax()

    def named_policy(self, layer: int | None = None) -> NamedPolicy:
        """Return the names that are saved and offloaded.

        Args:
            layer: Of which layer; None where all have the same.

        Raises:
            PlanError: There is no such layer, or None was given and the layers differ.
        """
        if layer is None:
            policies = {self._policy(i) for i in range(self.layers)}
            if len(policies) > 1:
                raise PlanError(
                    f"the plan decides differently for the {self.layers} layers; say which one: "
                    "layer=0 is the first."
                )
            return self._policy(0)
        if not 0 <= layer < self.layers:
            raise PlanError(
                f"layer is {layer}; the stack has {self.layers}, counted from 0. "
                "Give one of them, or None where all are alike."
            )
        return self._policy(layer)

    def checkpoint(self, block: Callable[..., Any], layer: int | None = None) -> Callable[..., Any]:
        """Return the block with names on its values, under `jax.checkpoint` with the policy.

        It is called as the block is, works under jit, grad, vmap and scan, and has the block's
        results; gradients are those of any rematerialised block. Where the plan keeps everything
        it is the block itself.

        Args:
            block: The block that was planned: `block(params, x, *rest)`.
            layer: Which one it is, for unrolled layers that differ.

        Raises:
            PlanError: The layers differ and none was named; when the result is called: the block
                lacks a name of the plan.
            RuntimeStateError: jax is set to ignore names (`JAX_REMAT3`).
        """
        policy = self.named_policy(layer)
        if self._keeps_all(layer or 0):
            return block
        # Within a scan XLA cannot merge what is recomputed with the first time it was computed.
        return jax.checkpoint(
            with_names(block, policy.names),
            policy=policy.to_jax(),
            prevent_cse=not self.is_scanned,
        )

    def verify(
        self, block: Callable[..., Any], params: Any, x: Any, *rest: Any, layers: int = MIN_LAYERS
    ) -> Verification:
        """Compare gradients of a small scanned stack under the plan with those of the plain one.

        `ebbtide.jax.verify` says what is compared; it runs on the backend in use.

        Args:
            block: The block that was planned.
            params: Arrays: the parameters of one layer, from which different ones are made.
            x: Array: an input of the scale that it has in training; fewer tokens will do.
            rest: What else a block takes; the same for all layers.
            layers: Of the stack, at least 3.

        Raises:
            PlanError: The layers differ: verify each with `scan_body(self.checkpoint(block, i))`.
            ValueError: As `ebbtide.jax.verify`.
        """
        planned = scan_body(self.checkpoint(block), *rest)
        return verify(scan_body(block, *rest), planned, params, x, layers=layers)

    def report(self) -> str:
        """Return a few lines for people: what is decided, and what it should take."""
        plan, decisions = self.plan, self.plan.decisions
        stack = "scanned" if self.is_scanned else "unrolled"
        lines = [
            f"{self.layers} {stack} layers of {self.observation.block_name}, {plan.name}: "
            f"{self.message}"
        ]
        policies = {self._policy(i): i for i in reversed(range(self.layers))}
        for policy, first in policies.items():
            where = "every layer" if len(policies) == 1 else f"from layer {first} on"
            for text, names in (("kept", policy.saved), ("on the host", policy.offloaded)):
                if names:
                    sizes = {v.name: v.num_bytes for v in self.observation.values}
                    total = format_bytes(sum(sizes[name] for name in names))
                    shown = ", ".join(names[:_NUM_SHOWN])
                    more = f" and {len(names) - _NUM_SHOWN} more" if len(names) > _NUM_SHOWN else ""
                    lines.append(f"{where}, {text}: {total} in {shown}{more}")
        num_again = sum(1 for decision in decisions.values() if decision is Decision.RECOMPUTE)
        lines.append(
            f"recomputed: {num_again // self.layers} values a layer; host memory "
            f"{format_bytes(plan.host_bytes)}; nothing here was measured on a whole step"
        )
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return the plan's JSON form (`docs/formats.md`); `workload.to_json()` has the rest."""
        return self.plan.to_json()

    def _policy(self, layer: int) -> NamedPolicy:
        return policy_of(self.plan, f"{LAYER}.{layer}.", self.observation.inputs)

    def _keeps_all(self, layer: int) -> bool:
        prefix = f"{LAYER}.{layer}."
        return all(
            self.plan.decision(prefix + value.name) is Decision.KEEP
            for value in self.observation.values
            if value.is_saved
        )


def plan_for(
    block: Callable[..., Any],
    params: Any,
    x: Any,
    *rest: Any,
    layers: int,
    budget: str | int,
    decide: Mapping[str, str | Decision] | None = None,
    machine: Machine | str | None = None,
    rates: Rates | None = None,
    host: str | int | None = None,
    scan: bool = True,
    min_bytes: int = MIN_BYTES,
) -> Tide:
    """Plan what a stack of equal blocks keeps, moves to the host and recomputes.

    Args:
        block: `block(params, x, *rest)`, which returns what the next block takes as x.
        params: Parameters of one block: arrays, or shapes and dtypes
            (`jax.eval_shape`, `jax.ShapeDtypeStruct`).
        x: Input of one block, on one device: arrays, or shapes and dtypes.
        rest: What else a block takes: masks, tables, random keys. It is never moved.
        layers: Blocks in the stack.
        budget: Most device memory that the stack's **activations** take: what its blocks store,
            and what one of them works with. Parameters, gradients of parameters, optimizer,
            logits and all else are not in it; for the peak of a whole step use `plan_step`. A
            size, or a share of the device such as `"50%"`.
        decide: Decisions to keep to, by pattern over names: `{"mlp.*": "RECOMPUTE"}`; later
            patterns win. They hold in every layer.
        machine: Links and tiers, or a name of the catalog. Default: this process's device is
            probed; a CPU has no link to probe.
        rates: How fast the device computes; then nothing is compiled or run. Default: one block
            is compiled and timed on this process's device.
        host: Most pinned host memory of this process. Default: its share of the machine's.
        scan: The stack is one `jax.lax.scan`, so that all layers have one decision. False: they
            are unrolled, and each has its own.
        min_bytes: Smaller values are never moved.

    Returns:
        The plan, with `checkpoint(block)` to carry it out.

    Raises:
        BudgetError: No plan keeps to the budget; it names the smallest that would do.
        PlanError: A pattern of `decide` matches nothing or cannot be, or the machine is unknown.
        ModelError: The block has no input of floating point, or keeps nothing.
        RuntimeStateError: jax is set to ignore names (`JAX_REMAT3`), or lacks what is relied on.
        ValueError: A size cannot be read, or `layers` is less than 1.
    """
    check_versions("jax", jax.__version__)
    refuse_ignored_names()
    link = take_first_machine(resolve_machine(machine))
    observation = observe(block, params, x, *rest)
    pace = (
        measure(observation, block, params, x, *rest)
        if rates is None
        else Pace(rates=rates, forward_ns=0, backward_ns=0)
    )
    pace = take_first_pace(pace)
    workload = observation.to_workload(layers, pace, is_scanned=scan)
    if scan:
        link = charge_moves(link, pace.rates.memory_bytes_per_s)
    tide = plan_workload(
        workload,
        observation,
        link,
        budget_bytes=parse_budget(budget, link.device_bytes),
        decide=decide,
        host_bytes=None if host is None else parse_bytes(host),
        scan=scan,
        planner=SCAN_PLANNER if scan else UNROLLED_PLANNER,
        min_bytes=min_bytes,
    )
    check_tide(tide, block, params, x, *rest)
    return tide


def resolve_machine(machine: Machine | str | None) -> Machine:
    """Return the machine that was given, named or probed; without a disk, which jax lacks."""
    if machine is None:
        return probe_machine()
    found = find_machine(machine) if isinstance(machine, str) else machine
    return replace(found, disk_bytes=0)


def plan_workload(
    workload: Workload,
    observation: Observation,
    machine: Machine,
    *,
    budget_bytes: int,
    decide: Mapping[str, str | Decision] | None,
    host_bytes: int | None,
    scan: bool,
    planner: str,
    min_bytes: int,
) -> Tide:
    """Plan a workload that was observed; other arguments are those of `plan_for`.

    Args:
        workload: The stack, and what else there is.
        observation: Of one block.
        machine: Its links.
        budget_bytes: Most device memory of what the workload holds.
        decide: Pins.
        host_bytes: Most host memory; None: the machine's.
        scan: The layers are scanned.
        planner: `SCAN_PLANNER` gives all layers one decision, `UNROLLED_PLANNER` does not.
        min_bytes: Smaller values are never moved.

    Raises:
        BudgetError: No plan keeps to the budget.
        PlanError: A pattern matches nothing, or a scanned stack's layers would differ.
    """
    outcome = plan_for_budget(
        workload,
        machine,
        budget_bytes=budget_bytes,
        host_bytes=host_bytes,
        planner=planner,
        decide=_in_all_layers(decide, observation),
        min_bytes=min_bytes,
    )
    if outcome.plan is None:
        raise BudgetError(outcome.message)
    tide = Tide(
        plan=outcome.plan,
        workload=workload,
        observation=observation,
        machine=machine,
        is_scanned=scan,
        message=outcome.message,
    )
    if planner == SCAN_PLANNER and len({tide.named_policy(i) for i in range(tide.layers)}) > 1:
        raise PlanError(
            "decide: a scanned stack has one decision for all layers, and these patterns decide "
            f"differently for some of them. Leave {LAYER}.N out of the patterns."
        )
    return tide


def check_tide(tide: Tide, block: Callable[..., Any], *arguments: Any) -> None:
    """Raise unless jax keeps just what the plan says, for every policy in it.

    Raises:
        PlanError: What `check_policy` finds.
    """
    if tide.keeps_everything:
        return
    for policy in {tide.named_policy(i) for i in range(tide.layers)}:
        if policy.names:
            check_policy(policy, block, *arguments)


def _in_all_layers(
    decide: Mapping[str, str | Decision] | None, observation: Observation
) -> dict[str, str | Decision]:
    """Let patterns over a block's names hold in every layer."""
    names = [value.name for value in observation.values]
    return {
        (f"{LAYER}.*.{p}" if any(fnmatchcase(name, p) for name in names) else p): decision
        for p, decision in (decide or {}).items()
    }
