"""How long planned steps really take, so that predictions can be corrected.

A step that is measured op by op runs with pauses, on a device that is cooler and faster than in
steady training, and with nobody else on the link. What counts is a few whole steps under the plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ebbtide.plan import Plan
from ebbtide.torch.devices.base import AbstractMeter, Mark

# The step in which the plan is made, and its blocks are checked, is not told of here. The next one
# fills the allocator's cache, and the one after it may still be slow.
NUM_SKIPPED: Final = 2
# Single steps vary by 5 % and more where they are short.
NUM_STEPS: Final = 5
NUM_FASTER: Final = 1
"""Steps faster than the one that counts. What disturbs a step only adds to its time: their median
may hold what others did on the host meanwhile, and a plan for that is a wrong plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paced:
    """What forward and backward took under one plan."""

    plan: Plan
    """As it was when the steps ran, with what was predicted then."""
    num_steps: int
    """Steps that were timed."""
    measured_ns: int
    """Of an undisturbed one."""


class Pace:
    """Times forward and backward of the first steps under each plan."""

    def __init__(self, meter: AbstractMeter) -> None:
        self._meter = meter
        self._plan: Plan | None = None
        self._settled: list[Plan] = []
        self._start: Mark = None
        self._spans: list[tuple[Mark, Mark]] = []
        self._num_started = 0
        self._last: Paced | None = None

    @property
    def is_running(self) -> bool:
        """Whether a step is timed now, and its end is wanted."""
        return self._start is not None

    def start(self, plan: Plan) -> None:
        """Note that the model's forward starts, under `plan`."""
        if plan is not self._plan:
            self._plan, self._spans, self._num_started = plan, [], 0
        self._num_started += 1
        is_wanted = (
            self._num_started > NUM_SKIPPED
            and len(self._spans) < NUM_STEPS
            and all(plan is not settled for settled in self._settled)
        )
        self._start = self._meter.mark() if is_wanted else None

    def settle(self, plan: Plan) -> None:
        """Never time `plan`: what it takes is known."""
        self._settled.append(plan)

    def end(self) -> None:
        """Note that the backward pass ended; of a forward that was started since the last one."""
        if self._start is not None:
            self._spans.append((self._start, self._meter.mark()))
            self._start = None

    def take_ns(self, plan: Plan) -> int:
        """Return what steps under `plan` take undisturbed, once; 0 while there are too few.

        Waits for the device.
        """
        if plan is not self._plan or len(self._spans) != NUM_STEPS:
            return 0
        self._last = self._read_spans(plan)
        self._spans = []
        self.settle(plan)
        return self._last.measured_ns

    def read(self) -> Paced | None:
        """Return what was timed last, also where it is not enough to correct a plan by.

        Waits for the device. None before any step was timed.
        """
        if self._plan is not None and self._spans:
            return self._read_spans(self._plan)
        return self._last

    def _read_spans(self, plan: Plan) -> Paced:
        taken_ns = sorted(self._meter.elapsed_ns(a, b) for a, b in self._spans)
        return Paced(
            plan=plan,
            num_steps=len(taken_ns),
            measured_ns=taken_ns[min(NUM_FASTER, len(taken_ns) - 1)],
        )
