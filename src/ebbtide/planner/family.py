"""Candidates worth looking at: how much is recomputed, and how much is evicted.

The family has two parameters. *Steps*: steps down the blocks' menus are taken cheapest price per
byte first, and for equal prices in the last block first: what early blocks store can leave, so that
the link is busy from the start. *Bytes*: what is evicted is taken from the first block on, since
that leaves earliest and is needed last. Every candidate is a point of this plane; which is best for
a budget is for a planner to find.

With steps in the first block first, early blocks store little and the link idles while they run.
"""

from itertools import pairwise

import numpy as np

from ebbtide.planner.space import Floats, Ints, Space


class Family:
    """The candidates of a space.

    Args:
        space: States of the blocks.
        max_evicted_bytes: Most bytes that the tiers hold.
    """

    def __init__(self, space: Space, *, max_evicted_bytes: int) -> None:
        self.space = space
        self._max_evicted = float(max_evicted_bytes)
        class_of = np.array(space.chain.class_of)
        self._class_of = class_of
        counts = [int((class_of == c).sum()) for c in range(len(space.menus))]
        self._rank = np.zeros(len(class_of), dtype=np.int64)
        for c in range(len(space.menus)):
            self._rank[class_of == c] = np.arange(counts[c])[::-1]
        prices: list[tuple[float, int, int]] = []
        for c, menu in enumerate(space.menus):
            for step, (left, right) in enumerate(pairwise(menu)):
                freed = left.num_bytes - right.num_bytes
                prices.append(((right.spent_ns - left.spent_ns) / freed, c, step))
        most = max(len(menu) for menu in space.menus)
        self._starts = np.full((len(space.menus), most - 1), np.inf)
        """Steps before the first of a class's from each option to the next."""
        self.num_steps = 0
        """Steps down the menus until every block stores least."""
        for _, c, step in sorted(prices):
            self._starts[c, step] = self.num_steps
            self.num_steps += counts[c]
        self._none = np.zeros((len(space.menus), most), dtype=np.int64)
        """State that evicts least, by class and option; those that evict more follow it."""
        self._full = np.zeros_like(self._none)
        """State that evicts all it can."""
        most_states = max(len(row) for options in space.rows for row in options)
        self._moved = np.full((*self._none.shape, most_states), np.inf)
        """Bytes that each of these evicts."""
        for c, options in enumerate(space.rows):
            for step, row in enumerate(options):
                self._none[c, step], self._full[c, step] = row[0], row[-1]
                self._moved[c, step, : len(row)] = space.evicted_bytes[row]

    def options(self, steps: Ints) -> Ints:
        """Return the option of each block (column) after so many steps (row)."""
        starts = self._starts[self._class_of] + self._rank[:, None]
        return (steps[:, None, None] > starts).sum(axis=2)

    def uniform(self) -> Ints:
        """Return candidates that treat all blocks of a class alike: each option, kept and evicted.

        All the pure strategies are among them.
        """
        rows: list[Ints] = []
        for step in range(self._full.shape[1]):
            options = np.array([min(step, len(menu) - 1) for menu in self.space.menus])
            for states in (self._none, self._full):
                rows.append(states[self._class_of, options[self._class_of]])
        return np.array(rows)

    def stored_bytes(self, steps: Ints) -> Floats:
        """Return the bytes that are kept or evicted after so many steps."""
        rows = self._none[self._class_of, self.options(steps)]
        return self.space.kept_bytes[rows].sum(axis=1)

    def evictable_bytes(self, steps: Ints) -> Floats:
        """Return the bytes that may be evicted after so many steps."""
        rows = self._full[self._class_of, self.options(steps)]
        return np.minimum(self.space.evicted_bytes[rows].sum(axis=1), self._max_evicted)

    def candidates(self, steps: Ints, evicted_bytes: Floats) -> Ints:
        """Return candidates after so many steps that evict at least so many bytes.

        Less only where the tiers, or what may be evicted, are less.

        Args:
            steps: Numbers of steps.
            evicted_bytes: Amounts (columns) for each of them (row).
        """
        options = self.options(steps)
        none, full = self._none[self._class_of, options], self._full[self._class_of, options]
        full_bytes = self.space.evicted_bytes[full]
        before = np.cumsum(full_bytes, axis=1) - full_bytes
        wanted = np.minimum(evicted_bytes, self._max_evicted)[:, :, None] - before[:, None, :]
        all_bytes = full_bytes[:, None, :]
        rows = np.where(wanted >= all_bytes, full[:, None, :], none[:, None, :])
        k, amount, block = np.nonzero((wanted > 0) & (wanted < all_bytes))
        moved = self._moved[self._class_of[block], options[k, block]]
        count = (moved < wanted[k, amount, block][:, None]).sum(axis=1)
        # One less where the tiers have no room for the last of them.
        reached = before[k, block] + moved[np.arange(len(count)), count]
        count = np.maximum(count - (reached > self._max_evicted), 0)
        rows[k, amount, block] = none[k, block] + count
        return rows.reshape(-1, rows.shape[2])
