"""Random interleavings of all that a training does, on the fake device, beside a twin.

Copies finish as late as allowed, at once, or in a random legal order. `EBBTIDE_LIFETIMES` is the
number of runs of a longer profile, which draws them anew each time; unset, there are as many as fit
into the suite, always the same ones. What fails is printed as the calls that lead there.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ebbtide.torch.devices.fake import Schedule
from tests.torch.lifetimes import (
    ENOUGH_BYTES,
    MAX_GRAPHS,
    NUM_BLOCKS,
    PLANS,
    STREAMS,
    TOKENS,
    Graph,
    InjectedError,
    Setting,
    Twins,
)

NUM_RUNS = 30
NUM_STEPS = 25
NUM_WARM = 3
"""Steps after which a forward follows a script: one is observed, one checked, one learnt from."""
MIN_AGE = 6
"""Attaching takes longer than a step, and most of what can go wrong takes several."""

LONGER = os.environ.get("EBBTIDE_LIFETIMES")

settings_of_machine = settings(
    max_examples=int(LONGER or NUM_RUNS),
    derandomize=LONGER is None,
    stateful_step_count=NUM_STEPS,
    suppress_health_check=[HealthCheck.too_slow],  # nothing may depend on how fast the machine is
    print_blob=False,
)

which = st.integers(0, MAX_GRAPHS - 1)
tokens = st.sampled_from(TOKENS)
seeds = st.integers(0, 99)
streams = st.sampled_from(STREAMS)
blocks = st.integers(0, NUM_BLOCKS - 1)
attachings = st.builds(
    Setting,
    plan=st.sampled_from(list(PLANS)),
    schedule=st.sampled_from(["late", "eager", "random"]),
    seed=seeds,
    host_bytes=st.sampled_from([ENOUGH_BYTES, 4096, 16384]),
    disk_bytes=st.sampled_from([ENOUGH_BYTES, 16384]),
    is_growing=st.booleans(),
)


class Lifetimes(RuleBasedStateMachine):
    """All that a user can do to an attached model, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.twins = Twins(Path(self.folder.name))
        self.age = 0
        """Steps since the model was attached."""

    def graph(self, index: int) -> Graph:
        return self.twins.graphs[index % len(self.twins.graphs)]

    def has_graph(self) -> bool:
        return bool(self.twins.graphs)

    def has_room(self) -> bool:
        return len(self.twins.graphs) < MAX_GRAPHS

    @initialize(setting=attachings)
    def attach(self, setting: Setting) -> None:
        self.attach_again(setting, NUM_WARM)

    @precondition(lambda self: self.age > MIN_AGE)
    @rule(setting=attachings, num_steps=st.sampled_from([*4 * [NUM_WARM], 1, 0]))
    def attach_again(self, setting: Setting, num_steps: int) -> None:
        self.twins.attach(setting)
        self.age = 0
        for _ in range(num_steps):
            self.twins.forward(num_tokens=TOKENS[1], seed=0, uses_side=True, stream="main")
            self.twins.backward(self.twins.graphs[-1], retains=False, stream="main")

    # Twice: all other things need graphs that are alive.
    @precondition(has_room)
    @rule(num_tokens=tokens, seed=seeds, stream=streams)
    def forward_for_all(self, num_tokens: int, seed: int, stream: str) -> None:
        self.forward(num_tokens, seed, True, stream)

    @precondition(has_room)
    @rule(num_tokens=tokens, seed=seeds, uses_side=st.booleans(), stream=streams)
    def forward(self, num_tokens: int, seed: int, uses_side: bool, stream: str) -> None:
        self.twins.forward(num_tokens=num_tokens, seed=seed, uses_side=uses_side, stream=stream)

    @rule(
        num_tokens=tokens,
        seed=seeds,
        block=blocks,
        error=st.sampled_from([InjectedError, KeyboardInterrupt]),
        stream=streams,
    )
    def fail_in_forward(
        self, num_tokens: int, seed: int, block: int, error: type[BaseException], stream: str
    ) -> None:
        self.twins.fail_in_forward(
            num_tokens=num_tokens, seed=seed, block=block, error=error, stream=stream
        )

    @precondition(has_graph)
    @rule(index=which, retains=st.booleans(), stream=streams)
    def backward(self, index: int, retains: bool, stream: str) -> None:
        self.twins.backward(self.graph(index), retains=retains, stream=stream)

    @precondition(lambda self: len(self.twins.graphs) > 1)
    @rule(index=which, stream=streams)
    def backward_of_two(self, index: int, stream: str) -> None:
        self.twins.backward_of_two(self.graph(index), self.graph(index + 1), stream=stream)

    @precondition(has_graph)
    @rule(index=which, stream=streams)
    def second_derivative(self, index: int, stream: str) -> None:
        self.twins.second_derivative(self.graph(index), stream=stream)

    @precondition(has_graph)
    @rule(index=which, block=blocks, retains=st.booleans(), stream=streams)
    def part_of_backward(self, index: int, block: int, retains: bool, stream: str) -> None:
        self.twins.part_of_backward(self.graph(index), block=block, retains=retains, stream=stream)

    @precondition(has_graph)
    @rule(index=which, block=blocks, retains=st.booleans(), stream=streams)
    def fail_in_backward(self, index: int, block: int, retains: bool, stream: str) -> None:
        self.twins.fail_in_backward(self.graph(index), block=block, retains=retains, stream=stream)

    @precondition(has_graph)
    @rule(index=which)
    def drop(self, index: int) -> None:
        self.twins.drop(self.graph(index))

    @rule(num_tokens=tokens, seed=seeds, is_inference=st.booleans())
    def evaluate(self, num_tokens: int, seed: int, is_inference: bool) -> None:
        self.twins.evaluate(num_tokens=num_tokens, seed=seed, is_inference=is_inference)

    @rule()
    def step(self) -> None:
        self.twins.step()

    @rule(num_tokens=tokens, seed=seeds)
    def train_a_copy(self, num_tokens: int, seed: int) -> None:
        self.twins.train_a_copy(num_tokens=num_tokens, seed=seed)

    @invariant()
    def check(self) -> None:
        self.age += 1
        self.twins.check()

    def teardown(self) -> None:
        if sys.exception() is None:  # an error that is on its way holds a graph
            self.twins.graphs.clear()
            self.twins.check()
            self.twins.close()
            self.twins.check()
        self.folder.cleanup()


TestLifetimes = pytest.mark.slow(Lifetimes.TestCase)
TestLifetimes.settings = settings_of_machine


# -- one walk that takes every step, and shows that each does something ----------------------------


@pytest.mark.parametrize("schedule", ["late", "random"])
@pytest.mark.parametrize("plan", ["recompute", "offload", "spilled", "by hand 4"])
def test_every_step_of_the_model_does_what_it_says(
    plan: str, schedule: Schedule, tmp_path: Path
) -> None:
    twins = Twins(tmp_path)
    twins.attach(Setting(plan=plan, schedule=schedule, seed=1))
    assert twins.tide is not None
    tide, stream = twins.tide, STREAMS[1]

    def forward(num_tokens: int = TOKENS[1]) -> Graph:
        twins.forward(num_tokens=num_tokens, seed=num_tokens, uses_side=True, stream=stream)
        twins.check()
        return twins.graphs[-1]

    for _ in range(NUM_WARM + 1):
        twins.backward(forward(), retains=False, stream="main")
        twins.check()
    assert twins.num_compared == NUM_WARM + 1 and tide.runtime.num_followed > 0
    moved_bytes = tide.plan.host_bytes + tide.plan.disk_bytes
    assert (moved_bytes == 0) is (plan == "recompute")
    assert tide.held_host_bytes + tide.held_disk_bytes == 0

    # No variable: a graph must die where it is dropped.
    forward()
    assert tide.held_host_bytes + tide.held_disk_bytes <= moved_bytes
    assert (tide.held_host_bytes == 0) is (tide.plan.host_bytes == 0)
    assert (tide.held_disk_bytes == 0) is (tide.plan.disk_bytes == 0)
    for block in range(NUM_BLOCKS):
        twins.part_of_backward(twins.graphs[0], block=block, retains=True, stream=stream)
        twins.fail_in_backward(twins.graphs[0], block=block, retains=True, stream="main")
        twins.check()
    assert twins.graphs[0].is_stale and twins.graphs[0].is_begun
    for retains in (True, False):
        twins.backward(twins.graphs[0], retains=retains, stream=stream)
        twins.check()
    twins.second_derivative(forward(), stream=stream)
    twins.backward_of_two(forward(), forward(TOKENS[2]), stream=stream)
    assert twins.num_compared == NUM_WARM + 1 + 2 * NUM_BLOCKS + 4
    for error in (InjectedError, KeyboardInterrupt):
        twins.fail_in_forward(num_tokens=4, seed=0, block=1, error=error, stream=stream)
        twins.check()
    twins.evaluate(num_tokens=4, seed=0, is_inference=False)
    twins.train_a_copy(num_tokens=4, seed=0)

    for _ in range(2):
        forward()
    twins.step()
    num_compared = twins.num_compared
    twins.backward(twins.graphs[0], retains=False, stream=stream)  # torch refuses it, and so do we
    twins.attach(Setting(plan="offload", schedule=schedule, seed=2))
    twins.check()
    twins.backward(twins.graphs[0], retains=False, stream=stream)
    assert twins.num_compared == num_compared and not twins.graphs
    twins.check()
    counts = tide.ledger.snapshot()
    assert (counts.host.moved_in_bytes > 0) is (tide.plan.host_bytes > 0)
    assert (counts.disk.moved_in_bytes > 0) is (tide.plan.disk_bytes > 0)
