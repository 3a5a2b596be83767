"""How long planned steps really take, by a clock that a test turns."""

from ebbtide.plan import Plan
from ebbtide.torch.devices.base import AbstractMeter, Mark
from ebbtide.torch.pace import NUM_SKIPPED, NUM_STEPS, Pace, Paced


class TurnedMeter(AbstractMeter):
    """A clock that stands still until it is turned."""

    def __init__(self) -> None:
        self.now_ns = 0

    def mark(self, *, is_ahead: bool = False) -> Mark:
        del is_ahead
        return self.now_ns

    def elapsed_ns(self, start: Mark, end: Mark) -> int:
        return end - start

    def allocated_bytes(self) -> int:
        return 0

    def take_peak_bytes(self) -> int:
        return 0


def make_plan(name: str) -> Plan:
    return Plan(
        name=name,
        model="M",
        fingerprint="f",
        decisions={},
        host_bytes=0,
        disk_bytes=0,
        max_out_bytes_in_flight=0,
        max_in_bytes_in_flight=0,
    )


def run(pace: Pace, meter: TurnedMeter, plan: Plan, *taken_ns: int) -> None:
    for step_ns in taken_ns:
        pace.start(plan)
        meter.now_ns += step_ns
        pace.end()


def test_what_was_timed_can_be_read_before_and_after_it_is_taken() -> None:
    meter, plan = TurnedMeter(), make_plan("one")
    pace = Pace(meter)
    run(pace, meter, plan, *[900] * NUM_SKIPPED)
    assert pace.read() is None
    run(pace, meter, plan, 70)
    assert pace.read() == Paced(plan=plan, num_steps=1, measured_ns=70)
    assert pace.take_ns(plan) == 0
    run(pace, meter, plan, *[50, 60, 80, 90][: NUM_STEPS - 1])
    # The fastest does not count: what disturbs a step only adds to it.
    timed = Paced(plan=plan, num_steps=NUM_STEPS, measured_ns=60)
    assert pace.read() == timed
    assert pace.take_ns(plan) == 60
    assert (pace.read(), pace.take_ns(plan)) == (timed, 0)


def test_another_plan_is_read_once_a_step_under_it_was_timed() -> None:
    meter, first, second = TurnedMeter(), make_plan("one"), make_plan("two")
    pace = Pace(meter)
    run(pace, meter, first, *[900] * NUM_SKIPPED, *[70] * NUM_STEPS)
    assert pace.take_ns(first) == 70
    run(pace, meter, second, *[900] * NUM_SKIPPED)
    last = pace.read()
    assert last is not None and last.plan is first
    run(pace, meter, second, 30)
    assert pace.read() == Paced(plan=second, num_steps=1, measured_ns=30)
