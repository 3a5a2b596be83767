"""What is wrong with the flags of a process that offloads: missing, contradictory, unsafe.

Each rule has its public source. `docs/jax-flags.md` lists them.
"""

import enum
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ebbtide.jax.flag_syntax import Argument, ParsedFlags, parse_xla_flags
from ebbtide.jax.flags import (
    ASYNC_LIMIT,
    COMMAND_BUFFER,
    DEFAULT_HOST_LIMIT_GIB,
    HOST_LIMIT,
    LATENCY_HIDING,
    NUM_ASYNC,
    OVERLAP_LIMIT,
    PIPELINING,
    SLOP_FACTOR,
    XLA_FLAGS,
    FlagSet,
)

REMAT3 = "JAX_REMAT3"
OPTIMISATION = "JAX_OPTIMIZATION_LEVEL"
MEMORY_FRACTION = "XLA_CLIENT_MEM_FRACTION"
OLD_MEMORY_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"

WRONG_GRADIENTS = ((0, 11, 0),)
"""Releases shown to read offloaded scan residuals in the wrong order (openxla/xla#46231)."""

SEEN_RIGHT = ((0, 11, 2),)
"""Releases whose gradients were compared on a GPU, an H200, and agreed."""

MISSING_PASSES = ((0, 10, 1),)
"""Releases in whose GPU plugin a user found no collective pipeliner (openxla/xla#44228, open)."""

# A file of flags has some hundred; a name may lead to a device that never ends.
_MOST_FLAGS_BYTES = 2**20

# Below it the scheduler holds so little memory that steps took a fifth longer (unrolled, H200).
_LEAST_SLOP_PERCENT = 20


@enum.unique
class Concern(enum.Enum):
    """What kind of thing is wrong."""

    MISSING = "missing"
    """A flag without which copies are exposed."""
    CONTRADICTORY = "contradictory"
    """Set to what undoes another, or to two things in two places."""
    DUPLICATE = "duplicate"
    """Given more than once with other values; the last counts."""
    UNKNOWN = "unknown"
    """XLA does not know it, or cannot read it, and ends the process."""
    IGNORED = "ignored"
    """XLA or jax never looks at it."""
    UNSAFE = "unsafe"
    """Known to give wrong results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagFinding:
    """One thing that is wrong with the environment."""

    concern: Concern
    name: str
    """The flag, variable or package that it is about."""
    message: str
    """What was found and what it does."""
    change: str
    """What to set."""
    source: str
    """Where it is known from; empty: it follows from how flags are read."""
    is_serious: bool
    """Whether offloading is slow or unsafe with it, or the process does not start."""


def check_flags(
    environ: Mapping[str, str],
    jaxlib_version: str | None,
    *,
    wanted: FlagSet | None = None,
    is_scanned: bool = True,
    find_unknown: Callable[[Iterable[str]], tuple[str, ...]] | None = None,
) -> tuple[FlagFinding, ...]:
    """Find what is wrong with an environment for a step that offloads on a GPU.

    Args:
        environ: The variables, such as `os.environ`. Nothing else is read but a file that
            `XLA_FLAGS` may name.
        jaxlib_version: Such as "0.11.2"; None: not installed, and nothing is said of versions.
        wanted: What `xla_flags` chose for a plan, to be compared with; None: what any plan needs.
        is_scanned: Whether layers are a `scan`; unrolled ones need fewer flags.
        find_unknown: Which of some names the installed XLA does not know; None: nothing is.

    Returns:
        The serious ones first, each kind in a fixed order; the same arguments give the same.
    """
    parsed = parse_xla_flags(environ.get(XLA_FLAGS, ""), _read_file)
    findings = [
        *_judge_version(jaxlib_version, is_scanned),
        *_judge_syntax(parsed),
        *_judge_names(parsed, find_unknown),
        *_judge_duplicates(parsed),
        *_judge_settings(parsed, environ, is_scanned),
        *(_compare_with(wanted, parsed, environ) if wanted else ()),
        *_judge_variables(environ),
    ]
    return tuple(sorted(findings, key=lambda finding: not finding.is_serious))


def _read_file(name: str) -> str | None:
    try:
        with Path(name).open("rb") as file:
            content = file.read(_MOST_FLAGS_BYTES)
    except (OSError, ValueError):
        # A NUL is in no name of a file.
        return None
    return content.decode("utf-8", errors="replace")


def _judge_version(version: str | None, is_scanned: bool) -> Iterable[FlagFinding]:
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", version or "")
    if version is None or numbers is None or not is_scanned:
        return
    release = (int(numbers[1]), int(numbers[2]), int(numbers[3]))
    if release in WRONG_GRADIENTS:
        yield FlagFinding(
            concern=Concern.UNSAFE,
            name="jaxlib",
            message=(
                f"jaxlib {version} gives wrong gradients without an error where a scan's "
                "residuals are offloaded: it reads the host stack forwards"
            ),
            change="Install jaxlib 0.11.2 or newer, or unroll the layers",
            source="openxla/xla#46231, fixed by #46308",
            is_serious=True,
        )
    elif release < min(SEEN_RIGHT):
        yield FlagFinding(
            concern=Concern.UNSAFE,
            name="jaxlib",
            message=(
                f"nobody has published that jaxlib {version} has right gradients where a scan's "
                "residuals are offloaded; 0.11.0 has not"
            ),
            change="Run ebbtide.jax.verify on this GPU, or install jaxlib 0.11.2",
            source="openxla/xla#46231",
            is_serious=False,
        )
    if release in MISSING_PASSES:
        yield FlagFinding(
            concern=Concern.IGNORED,
            name=PIPELINING,
            message=f"the GPU plugin of jaxlib {version} may have no collective pipeliner",
            change="Look at the copies with ebbtide.jax.check_engagement after compiling",
            source="openxla/xla#44228",
            is_serious=False,
        )


def _judge_syntax(parsed: ParsedFlags) -> Iterable[FlagFinding]:
    if parsed.missing_file:
        yield FlagFinding(
            concern=Concern.UNKNOWN,
            name=XLA_FLAGS,
            message=(
                f"{parsed.missing_file!r} does not start with '-', so XLA takes it for the name of "
                "a file with flags; there is none, and the process ends"
            ),
            change="Begin each flag with --",
            source="xla/parse_flags_from_env.cc",
            is_serious=True,
        )
    if parsed.ignored:
        yield FlagFinding(
            concern=Concern.IGNORED,
            name=XLA_FLAGS,
            message=(
                f"XLA stops reading at {parsed.ignored!r}, which does not start with '-', and says "
                "nothing"
            ),
            change="Separate flags by spaces alone, and begin each with --",
            source="xla/parse_flags_from_env.cc",
            is_serious=True,
        )


def _judge_names(
    parsed: ParsedFlags, find_unknown: Callable[[Iterable[str]], tuple[str, ...]] | None
) -> Iterable[FlagFinding]:
    names = {argument.name for argument in parsed.arguments}
    # A single dash, and a `--` alone, are unknown to any XLA.
    unknown = {name for name in names if name.startswith("-") or not name}
    if find_unknown is not None:
        unknown.update(find_unknown(sorted(names - unknown)))
    for name in sorted(unknown):
        is_tpu = name.startswith("xla_tpu_")
        yield FlagFinding(
            concern=Concern.UNKNOWN,
            name=name,
            message=f"XLA does not know the flag {name or '--'!r} and ends the process",
            change=(
                "Leave it out: it is for TPUs, and belongs in LIBTPU_INIT_ARGS there"
                if is_tpu
                else "Leave it out, or look for its present name"
            ),
            source="xla/parse_flags_from_env.cc",
            is_serious=True,
        )


def _judge_duplicates(parsed: ParsedFlags) -> Iterable[FlagFinding]:
    values: dict[str, list[str]] = {}
    for argument in parsed.arguments:
        values.setdefault(argument.name, []).append(_shown(argument))
    for name, given in values.items():
        if len(set(given)) > 1:
            yield FlagFinding(
                concern=Concern.DUPLICATE,
                name=name,
                message=f"it is given {len(given)} times: {', '.join(given)}; the last counts",
                change=f"Give it once: --{name}={given[-1]}",
                source="",
                is_serious=False,
            )


def _judge_settings(
    parsed: ParsedFlags, environ: Mapping[str, str], is_scanned: bool
) -> Iterable[FlagFinding]:
    level = environ.get(OPTIMISATION, "").strip().upper()
    is_optimised = level in ("O1", "O2", "O3", "1", "2", "3")
    hiding, pipelining = parsed.last(LATENCY_HIDING), parsed.last(PIPELINING)
    is_hiding = hiding.is_true if hiding else is_optimised
    for name in (LATENCY_HIDING, PIPELINING):
        given = parsed.last(name)
        if given is not None and (given.value or "true").lower() not in ("true", "false", "1", "0"):
            yield _unreadable(given, "true or false")
    if not is_hiding:
        yield FlagFinding(
            concern=Concern.CONTRADICTORY if hiding else Concern.MISSING,
            name=LATENCY_HIDING,
            message="without the latency-hiding scheduler copies stand beside their users",
            change=f"Set --{LATENCY_HIDING}=true",
            source="openxla/xla#18139",
            is_serious=True,
        )
    if is_scanned:
        yield from _judge_loops(parsed, pipelining, is_optimised, level)
    yield from _judge_limits(parsed, is_hiding)


def _judge_loops(
    parsed: ParsedFlags, pipelining: Argument | None, is_optimised: bool, level: str
) -> Iterable[FlagFinding]:
    if pipelining is None or not pipelining.is_true:
        yield FlagFinding(
            concern=Concern.CONTRADICTORY if pipelining else Concern.MISSING,
            name=PIPELINING,
            message="a scan's copies are not moved to the next iteration, so little hides them",
            change=f"Set --{PIPELINING}=true; its default has changed between releases",
            source="openxla/xla#32297, #37979, #45393",
            is_serious=True,
        )
    elif is_optimised:
        yield FlagFinding(
            concern=Concern.UNSAFE,
            name=OPTIMISATION,
            message=(
                f"{OPTIMISATION}={level} pipelines collectives too; with pipelined offloading a "
                "27B model's loss stopped falling"
            ),
            change=f"Leave {OPTIMISATION} out and set --{LATENCY_HIDING}=true alone",
            source="openxla/xla#37979",
            is_serious=True,
        )
    buffers = parsed.last(COMMAND_BUFFER)
    if buffers is None or buffers.value:
        yield FlagFinding(
            concern=Concern.CONTRADICTORY if buffers else Concern.MISSING,
            name=COMMAND_BUFFER,
            message=(
                "in command buffers a scan's host slices run on the compute stream: 749 ms a step "
                "where 669 and, with better names, 477 were had without"
            ),
            change=f"Set --{COMMAND_BUFFER}= with nothing after it",
            source="measured on an H200, jax 0.11.2",
            is_serious=True,
        )


def _judge_limits(parsed: ParsedFlags, is_hiding: bool) -> Iterable[FlagFinding]:
    for name in (ASYNC_LIMIT, OVERLAP_LIMIT, SLOP_FACTOR):
        given = parsed.last(name)
        if given is not None and _number(given) is None:
            yield _unreadable(given, "a whole number")
    limit = parsed.last(ASYNC_LIMIT)
    num_async = _number(limit) if limit else 2
    if num_async is not None and num_async < 4:
        yield FlagFinding(
            concern=Concern.CONTRADICTORY if limit else Concern.MISSING,
            name=ASYNC_LIMIT,
            message=f"{num_async} asynchronous operations may be in flight, host copies included",
            change=f"Set --{ASYNC_LIMIT}={NUM_ASYNC}",
            source="openxla/xla#33269",
            is_serious=False,
        )
    overlap = parsed.last(OVERLAP_LIMIT)
    num_overlap = _number(overlap) if overlap else 1
    if is_hiding and num_overlap is not None and num_overlap > 1:
        yield FlagFinding(
            concern=Concern.UNSAFE,
            name=OVERLAP_LIMIT,
            message=(
                f"with {num_overlap} collectives at once and the latency-hiding scheduler, a value "
                "that is fetched was read before its copy ended"
            ),
            change=f"Set --{OVERLAP_LIMIT}=1",
            source="marin-community/marin#8753, #8317",
            is_serious=True,
        )
    slop = parsed.last(SLOP_FACTOR)
    percent = _number(slop) if slop else None
    if percent is not None and percent < _LEAST_SLOP_PERCENT:
        yield FlagFinding(
            concern=Concern.CONTRADICTORY,
            name=SLOP_FACTOR,
            message=(
                f"the scheduler may plan with {percent} % of memory; at 5 % unrolled steps took "
                "640 ms where 523 were had"
            ),
            change=f"Leave --{SLOP_FACTOR} at 95, or at the budget's share of memory",
            source="measured on an H200, jax 0.11.2",
            is_serious=False,
        )


def _compare_with(
    wanted: FlagSet, parsed: ParsedFlags, environ: Mapping[str, str]
) -> Iterable[FlagFinding]:
    for setting in wanted.variables:
        if setting.name != HOST_LIMIT:
            continue
        text = environ.get(HOST_LIMIT, str(DEFAULT_HOST_LIMIT_GIB))
        limit_gib = int(text) if re.fullmatch("[0-9]{1,18}", text) else 0
        if limit_gib < int(setting.value):
            yield FlagFinding(
                concern=Concern.MISSING if HOST_LIMIT not in environ else Concern.CONTRADICTORY,
                name=HOST_LIMIT,
                message=f"XLA may pin {text} GiB, and the plan needs {setting.value}",
                change=f"Set {HOST_LIMIT}={setting.value}",
                source=setting.source,
                is_serious=True,
            )
    for setting in wanted.flags:
        given = parsed.last(setting.name)
        if setting.name == SLOP_FACTOR and given and given.value != setting.value:
            yield FlagFinding(
                concern=Concern.CONTRADICTORY,
                name=SLOP_FACTOR,
                message=f"it is {given.value}, and the plan was made for {setting.value}",
                change=f"Set --{SLOP_FACTOR}={setting.value}",
                source=setting.source,
                is_serious=False,
            )


def _judge_variables(environ: Mapping[str, str]) -> Iterable[FlagFinding]:
    if environ.get(REMAT3, "").strip().lower() in ("1", "true", "t", "yes", "y", "on"):
        yield FlagFinding(
            concern=Concern.CONTRADICTORY,
            name=REMAT3,
            message=(
                "the coming remat never calls a policy that is a function, and sees no names "
                "inside custom derivatives: what they would save is recomputed, without a word"
            ),
            change=f"Unset {REMAT3}, or use named policies alone",
            source="jax-ml/jax, jax/_src/ad_checkpoint.py",
            is_serious=True,
        )
    new, old = environ.get(MEMORY_FRACTION), environ.get(OLD_MEMORY_FRACTION)
    if new is not None and old is not None and new != old:
        yield FlagFinding(
            concern=Concern.CONTRADICTORY,
            name=OLD_MEMORY_FRACTION,
            message=f"{MEMORY_FRACTION} is {new} and its old name {OLD_MEMORY_FRACTION} is {old}",
            change=f"Unset {OLD_MEMORY_FRACTION}",
            source="jax documentation, GPU memory allocation",
            is_serious=False,
        )


def _unreadable(argument: Argument, wanted: str) -> FlagFinding:
    return FlagFinding(
        concern=Concern.UNKNOWN,
        name=argument.name,
        message=f"XLA cannot read {str(argument)!r} and ends the process",
        change=f"Give {wanted}",
        source="tsl/util/command_line_flags.cc",
        is_serious=True,
    )


def _number(argument: Argument) -> int | None:
    text = argument.value or ""
    # XLA's own is a number of 32 or 64 bits.
    return int(text) if re.fullmatch(r"[ \t-\r]*[-+]?[0-9]{1,18}", text) else None


def _shown(argument: Argument) -> str:
    return "true" if argument.value is None else argument.value
