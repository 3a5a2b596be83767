"""What to do: nothing, checkpointing, or offloading, and of what."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from ebbtide.estimate.strategies import Row, Status, Strategy

WORTH = 0.02
"""Of a step's time: what offloading must gain over checkpointing to be worth its host memory."""

NUM_NAMES_SHOWN = 4


@enum.unique
class Advice(enum.Enum):
    """What to do."""

    NOTHING = "nothing"
    CHECKPOINT = "checkpointing"
    OFFLOAD = "offload"
    TOO_LARGE = "too large"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The end of every answer."""

    advice: Advice
    """What to do."""
    moved: tuple[str, ...]
    """What to move, most bytes first; empty unless the advice is to offload."""
    sentence: str
    """For people."""


def judge(rows: Sequence[Row]) -> Verdict:
    """Return what the rows of one question come to."""
    by = {row.strategy: row for row in rows}
    keep, remat, ours = by[Strategy.KEEP], by[Strategy.REMAT], by[Strategy.EBBTIDE]
    if keep.status is Status.FITS:
        return _say(Advice.NOTHING, "everything fits: nothing has to be run again or moved")
    if ours.status is Status.OOM and remat.status is Status.OOM:
        named = by[Strategy.OFFLOAD]
        if named.status is Status.FITS:
            return _say(Advice.OFFLOAD, _offload(named, None), named)
        least = min((row for row in (ours, remat) if row.peak_bytes), key=lambda r: r.peak_bytes)
        return _say(
            Advice.TOO_LARGE,
            f"nothing fits: {least.peak_bytes / 2**30:.1f} GiB at least. Use more devices or "
            "degrees, a smaller batch or context, or a smaller optimizer state",
        )
    if ours.status is Status.FITS and ours.moved:
        gain = remat.step_ns / ours.step_ns - 1
        if remat.status is Status.OOM or gain >= WORTH:
            return _say(Advice.OFFLOAD, _offload(ours, remat), ours)
    if remat.status is Status.FITS:
        gain = remat.step_ns / ours.step_ns - 1 if ours.step_ns else 0.0
        text = "checkpointing is enough"
        if gain >= WORTH:
            text += (
                f", and a plan that runs less again is {gain:.1%} faster without moving anything"
            )
        elif ours.moved:
            text += f": moving activations gains {max(gain, 0):.1%} over it"
        return _say(Advice.CHECKPOINT, text)
    return _say(
        Advice.CHECKPOINT,
        "full checkpointing does not fit, and a plan that keeps less at the peak does; nothing "
        "has to be moved",
    )


def _offload(row: Row, remat: Row | None) -> str:
    names = ", ".join(name.lstrip(".:") for name in list(row.moved)[:NUM_NAMES_SHOWN])
    text = f"offload {sum(row.moved.values()) / 2**30:.1f} GiB, most of it {names}"
    if remat is None or remat.status is Status.OOM:
        return text + ": checkpointing alone does not fit"
    return text + f": {remat.step_ns / row.step_ns - 1:.1%} faster than checkpointing"


def _say(advice: Advice, sentence: str, row: Row | None = None) -> Verdict:
    moved = () if row is None else tuple(name.lstrip(".:") for name in row.moved)
    return Verdict(advice=advice, moved=moved, sentence=sentence)
