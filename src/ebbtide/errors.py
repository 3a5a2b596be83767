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
    """Root of the tree: catch it to catch everything that ebbtide raises itself.

    It is never raised as such.
    """


class PlanError(EbbtideError):
    """A plan is unsound, or does not belong to the workload or machine it is used with.

    Raised before a step runs under the plan, so nothing is lost. Make the plan again for this
    model, these shapes and this machine; of a file that was edited, the message names the field.
    """


class BudgetError(PlanError):
    """No plan keeps the step within the budget.

    The message names the smallest budget that a plan was found for, and what holds the rest:
    weights, gradients, optimizer state, logits. Give that budget, a shorter sequence or a smaller
    batch, or make what it names smaller.
    """


class ModelError(EbbtideError):
    """The model is built in a way that ebbtide cannot attach to.

    Raised before any hook is installed: the model is as it was. The message names the module and
    what to change, most often which blocks to name.
    """


class RuntimeStateError(EbbtideError):
    """A call came in the wrong state: a second attach, or a use after close.

    A mistake in the program's order. Close the first handle, or attach again.
    """


class RankError(EbbtideError):
    """Ranks that share a plan do not do the same: some did not come, or was asked for otherwise."""


class CorruptionError(EbbtideError):
    """What came back for backward is not what was saved: gradients would be wrong.

    Raised by the sanitizer only, in the backward that would have used it, before a gradient is made
    of it. Stop training with this plan; `ebbtide verify` says which block and tensor differ.
    """


class MemoryTierError(EbbtideError):
    """The system refused the pinned memory or the disk space that a plan needs.

    Before the first planned step, the plan cannot run: free room, name another folder, or give a
    plan that moves less. In a step, a disk failed: the step can be run again (`docs/disk.md`).
    """


class PinnedMemoryError(MemoryTierError):
    """The system or the driver refused to pin host memory.

    `attach` catches it, warns, and makes the plan again for what can be had, so it is met only
    where the parts are used by themselves. The message names the limit and how to raise it
    (`docs/memory.md`).

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
    """A feature needs packages that come with an extra that is not installed.

    The message has the command that installs them.
    """

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
    """A profiler's file cannot be read as a timeline.

    The message says how to record or export one that can. A file that is only cut or broken in
    places is read as far as it goes, with a note, and is no error.
    """


class ExitCode(IntEnum):
    """What a command's exit status means."""

    DONE = 0
    FAILED = 1
    MISUSE = 2
    NO_PLAN_FITS = 3
