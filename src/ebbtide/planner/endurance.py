"""What a disk bears: bytes written a day, as its makers rate it in drive writes per day.

Nothing is written twice in a step, so a limit on the bytes of a day is one on those of a step:
what may be written while the fastest step there could be runs. A slower step writes as much and
takes longer, so a plan's bytes a day are never more than they are said to be. The optimizer's time
is left out for the same reason.
"""

DAY_NS = 24 * 60 * 60 * 10**9


def most_bytes_in_step(bytes_per_day: int, step_ns: int) -> int:
    """Return the bytes that steps of `step_ns` may each write."""
    return bytes_per_day * step_ns // DAY_NS


def bytes_per_day(num_bytes: int, step_ns: int) -> int:
    """Return what one day writes of steps that write `num_bytes` each; 0 for steps of 0 ns."""
    return num_bytes * DAY_NS // step_ns if step_ns > 0 else 0
