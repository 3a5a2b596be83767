"""The search space of a chain.

A block's *state* is an option of its menu and how many of the stored activations are evicted, in
a fixed order. A candidate gives each block a state; `ebbtide.planner.estimate` times many of them
at once.
"""

from dataclasses import dataclass

from ebbtide.machine import Machine
from ebbtide.plan import MOVED
from ebbtide.planner.caps import Caps
from ebbtide.planner.chain import BlockClass, Chain
from ebbtide.planner.estimate import Estimator, Floats, Ints, Tables, join, tabulate
from ebbtide.planner.menu import Option, make_menu
from ebbtide.planner.named import MIN_BYTES
from ebbtide.planner.program import Program, make_program


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """One way to treat a block."""

    program: Program
    """What is stored, and when it is made and needed."""
    evicted: tuple[int, ...]
    """What of that leaves the device."""
    step: int
    """The option's place in its class's menu."""
    evicted_bytes: int
    """Bytes that leave."""
    kept_bytes: int
    """Bytes that stay until backward."""


class Space:
    """All states of a chain's blocks.

    Args:
        chain: What is planned.
        num_slots: Slots of a block's forward and of its backward; more is finer and slower.
        min_bytes: Smaller activations never move.
    """

    def __init__(self, chain: Chain, *, num_slots: int, min_bytes: int = MIN_BYTES) -> None:
        self.chain = chain
        self.states: list[State] = []
        self.rows: list[list[list[int]]] = []
        """For each class and option, the states by number of evicted activations."""
        self.menus: list[tuple[Option, ...]] = []
        tables: list[Tables] = []
        for block in chain.classes:
            menu = make_menu(block)
            self.menus.append(menu)
            of_class: list[list[int]] = []
            for step, option in enumerate(menu):
                made = _states(block, option, step, min_bytes)
                of_class.append(list(range(len(self.states), len(self.states) + len(made))))
                self.states += made
                evictions = [state.evicted for state in made]
                tables.append(tabulate(made[0].program, evictions, num_slots))
            self.rows.append(of_class)
        joined = join(tables)
        self.evicted_bytes, self.kept_bytes = joined.evicted_bytes, joined.kept_bytes
        largest = max((s.program.num_bytes[i] for s in self.states for i in s.evicted), default=0)
        self._estimator = Estimator(chain, joined, largest)

    def estimate(self, candidates: Ints, machine: Machine, caps: Caps) -> Floats:
        """Return the step time of each candidate in seconds; infinite where it does not fit.

        Args:
            candidates: A state for each candidate (row) and block (column).
            machine: Its links.
            caps: What the step may take.
        """
        return self._estimator.estimate(candidates, machine, caps)


def _states(block: BlockClass, option: Option, step: int, min_bytes: int) -> list[State]:
    program = make_program(block, option)
    always = [i for i in program.first_need if block.pins[i] in MOVED and block.num_bytes[i]]
    # What backward needs last is away longest: it goes first.
    order = sorted(
        (
            i
            for i in program.first_need
            if block.num_bytes[i] >= max(min_bytes, 1) and block.pins[i] is None
        ),
        key=lambda i: (-program.first_need[i], program.made_at[i], i),
    )
    in_order = sorted(program.first_need, key=lambda i: (program.made_at[i], i))
    states: list[State] = []
    for count in range(len(order) + 1):
        chosen = {*always, *order[:count]}
        evicted = tuple(i for i in in_order if i in chosen)
        moved = sum(block.num_bytes[i] for i in evicted)
        states.append(
            State(
                program=program,
                evicted=evicted,
                step=step,
                evicted_bytes=moved,
                kept_bytes=option.num_bytes - moved,
            )
        )
    return states
