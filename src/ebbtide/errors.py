"""Every exception that ebbtide raises on its own account.

    Exception
      EbbtideError
        PlanError
          BudgetError
        ModelError
        RuntimeStateError
        RankError
        CorruptionError
        MemoryTierError
          PinnedMemoryError
        MissingExtraError   (also an ImportError)
        TraceError

A bad argument is a plain `ValueError` or `TypeError`. "No plan fits" is an
outcome that a planner returns; it becomes a `BudgetError` only where a caller
asked for a running model and cannot be given one.
"""

from enum import IntEnum
from typing import Self


class EbbtideError(Exception):
    """Root of the tree: catch it to catch everything that ebbtide raises itself."""


class PlanError(EbbtideError):
    """A plan is unsound, or does not belong to the workload or machine it is used with."""


class BudgetError(PlanError):
    """No plan keeps the step within the budget, or a step went over it."""


class ModelError(EbbtideError):
    """The model is built in a way that ebbtide cannot attach to."""


class RuntimeStateError(EbbtideError):
    """A call came in the wrong state: a second attach, or a use after close."""


class RankError(EbbtideError):
    """Ranks that share a plan do not do the same: some did not come, or was asked for otherwise."""


class CorruptionError(EbbtideError):
    """What came back for backward is not what was saved: gradients would be wrong."""


class MemoryTierError(EbbtideError):
    """The system refused the pinned memory or the disk space that a plan needs."""


class PinnedMemoryError(MemoryTierError):
    """The system or the driver refused to pin host memory.

    Args:
        message: What was asked, which limit was met, and what to change.
        room_bytes: What could be had, as far as the system says; None: it does not say.
    """

    def __init__(self, message: str, room_bytes: int | None = None) -> None:
        super().__init__(message, room_bytes)
        self.room_bytes = room_bytes

    def __str__(self) -> str:
        return str(self.args[0])


class MissingExtraError(EbbtideError, ImportError):
    """A feature needs packages that come with an extra that is not installed."""

    @classmethod
    def for_extra(cls, extra: str, *, needed_by: str) -> Self:
        """Build the error whose message names the command that installs `extra`.

        Args:
            extra: One extra, or several with commas between them: "torch,demo".
            needed_by: What the user asked for, in their terms: "ebbtide compare".
        """
        return cls(
            f"{needed_by} needs packages that are not installed. "
            f"Install them with: pip install 'ebbtide[{extra}]'"
        )


class TraceError(EbbtideError):
    """A profiler's file cannot be read as a timeline."""


class ExitCode(IntEnum):
    """What a command's exit status means."""

    DONE = 0
    FAILED = 1
    MISUSE = 2
    NO_PLAN_FITS = 3
