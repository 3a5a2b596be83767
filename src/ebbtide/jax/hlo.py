"""Read from a compiled program's HLO text how it moves values to and from host memory.

A host value has `S(5)` in its layout. Its copies come in two forms. *Asynchronous*: a start and a
done, of `copy-start`, of `async-start`, or of a fusion or slice under the same sugar
(`fusion-start`, `dynamic-update-slice-start`, `slice-start`), which run on a stream of their own.
*Plain*: `copy`, `dynamic-update-slice` or a fusion around one, which run on the compute stream
and stop it. A pair hides its copy only where the schedule has work between start and done.

The text is read once, line by line, with memory for the names of host values alone.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

HOST_SPACE = "S(5)"
"""XLA's `Layout::kHostMemorySpace`, as layouts print it."""

# Without `%` too: older printers leave it out.
_HEADER = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_NAME = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = ")
_CALLED = re.compile(r"\b(?:calls|to_apply|condition|body)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\b(?:branch_computations|called_computations)=\{([^{}]*)\}")
# A counter's `s32[]` has none: adding to it hides nothing.
_ARRAY = re.compile(r"\[\d")
_BRACKETS = re.compile(r"[()]")
_CALL_MARKS = ("calls=", "to_apply=", "body=", "_computations=")
_BODY = re.compile(r"\bbody=%?([\w.\-]+)")
# From the start of a word, or a long line without an end is searched from each of its letters.
_OPERAND = re.compile(r"(?<![\w.\-])([\w.\-]+)(?=[,)]| |$)")

# `HloRematerialization` clones an instruction under its name and this.
_REMAT = re.compile(r"\.remat(?:\d+)?(?:[._]|$)")

# These hand host values on and move nothing.
_PASSES_ON = frozenset(
    {
        *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "opt-barrier"),
        *("while", "call", "conditional", "after-all", "domain"),
    }
)

# What takes time on the compute stream, so that a copy can hide beside it.
_COMPUTES = frozenset(
    {
        *("fusion", "custom-call", "dot", "convolution", "while", "call", "conditional"),
        *("reduce", "sort", "scatter", "gather"),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """Copies between device and host memory of one direction, in one place."""

    num_hidden: int = 0
    """Start and done with work between them."""
    num_bare: int = 0
    """Start and done with no work between them: compute waits for the copy."""
    num_plain: int = 0
    """On the compute stream."""
    plain_names: tuple[str, ...] = ()
    """Some of the latter."""

    @property
    def num_copies(self) -> int:
        """All of them."""
        return self.num_hidden + self.num_bare + self.num_plain


@dataclass(frozen=True, slots=True, kw_only=True)
class HloTransfers:
    """What a program's text says about host memory."""

    has_host_space: bool
    """Whether any value lies in host memory."""
    out_in_loop: Copies
    """Device to host, in bodies of loops and what they call."""
    in_in_loop: Copies
    """Host to device, there."""
    out_elsewhere: Copies
    """Device to host, outside of loops."""
    in_elsewhere: Copies
    """Host to device, there."""
    num_remat_clones: int
    """Instructions that XLA itself cloned to save memory."""
    num_lines: int
    """Lines read."""


# Enough to find the place; a loop of a large model has some hundred.
_MOST_NAMES = 4


@dataclass(slots=True)
class _Tally:
    num_hidden: int = 0
    num_bare: int = 0
    num_plain: int = 0
    plain_names: list[str] = field(default_factory=list[str])

    def add(self, other: "_Tally") -> None:
        self.num_hidden += other.num_hidden
        self.num_bare += other.num_bare
        self.num_plain += other.num_plain
        self.plain_names = (self.plain_names + other.plain_names)[:_MOST_NAMES]

    def freeze(self) -> Copies:
        return Copies(
            num_hidden=self.num_hidden,
            num_bare=self.num_bare,
            num_plain=self.num_plain,
            plain_names=tuple(self.plain_names),
        )


@dataclass(slots=True)
class _Computation:
    out: _Tally = field(default_factory=_Tally)
    into: _Tally = field(default_factory=_Tally)
    # Computations that run as instructions of this one: bodies, branches, calls.
    runs: set[str] = field(default_factory=set[str])
    num_remat_clones: int = 0


@dataclass(slots=True)
class _Module:
    computations: dict[str, _Computation] = field(default_factory=dict[str, _Computation])
    bodies: set[str] = field(default_factory=set[str])
    # What lies inside of a fusion or an async wrapper is no instruction of the schedule.
    wrapped: set[str] = field(default_factory=set[str])
    has_host_space: bool = False
    num_lines: int = 0


def lines_of(text: str) -> Iterator[str]:
    """Yield the lines of a text without making a list of them."""
    start = 0
    while start < len(text):
        end = text.find("\n", start)
        end = len(text) if end < 0 else end
        yield text[start:end]
        start = end + 1


def read_transfers(lines: Iterable[str]) -> HloTransfers:
    """Read what the HLO text of a compiled, scheduled module says about host memory.

    Args:
        lines: The lines of `compiled.as_text()`.

    Returns:
        Counts. Lines that are not understood count as no copy.
    """
    module = _read_module(lines)
    in_loop = _reachable(module, module.bodies)
    tallies = {(where, way): _Tally() for where in (True, False) for way in ("out", "into")}
    num_remat_clones = 0
    for name, computation in module.computations.items():
        num_remat_clones += computation.num_remat_clones
        if name not in module.wrapped:
            tallies[name in in_loop, "out"].add(computation.out)
            tallies[name in in_loop, "into"].add(computation.into)
    return HloTransfers(
        has_host_space=module.has_host_space,
        out_in_loop=tallies[True, "out"].freeze(),
        in_in_loop=tallies[True, "into"].freeze(),
        out_elsewhere=tallies[False, "out"].freeze(),
        in_elsewhere=tallies[False, "into"].freeze(),
        num_remat_clones=num_remat_clones,
        num_lines=module.num_lines,
    )


def _read_module(lines: Iterable[str]) -> _Module:
    module = _Module()
    current: _Computation | None = None
    # Names are unique in a module, but not all printers keep to it between computations.
    host_names: set[str] = set()
    starts: dict[str, int] = {}
    num_work = 0
    for line in lines:
        module.num_lines += 1
        if current is None or not line.startswith(" "):
            header = _HEADER.match(line)
            if header:
                current = module.computations.setdefault(header[1], _Computation())
                host_names, starts, num_work = set(), {}, 0
            elif line.startswith("}"):
                current = None
            continue
        named = _NAME.match(line)
        if named is None:
            continue
        name = named[1]
        kind, opcode, rest = _split_instruction(line, named.end())
        if ".remat" in name and _REMAT.search(name):
            current.num_remat_clones += 1
        if any(mark in rest for mark in _CALL_MARKS):
            _note_calls(module, current, opcode, rest)
        is_host = HOST_SPACE in kind
        module.has_host_space |= is_host
        if is_host:
            host_names.add(name)
        num_work += opcode in _COMPUTES and _ARRAY.search(kind) is not None
        if not host_names or opcode in _PASSES_ON:
            continue
        _note_copy(current, name, opcode, rest, is_host, host_names, starts, num_work)
    return module


def _note_copy(
    current: _Computation,
    name: str,
    opcode: str,
    rest: str,
    is_host: bool,
    host_names: set[str],
    starts: dict[str, int],
    num_work: int,
) -> None:
    """Count the instruction if it moves something between device and host memory."""
    operands = _operands(rest)
    reads_host = any(operand in host_names for operand in operands)
    if not (is_host or reads_host):
        return
    tally = current.out if is_host else current.into
    if opcode.endswith("-start"):
        starts[name] = num_work
    elif opcode.endswith("-update"):
        starts[name] = min((starts[o] for o in operands if o in starts), default=num_work)
    elif opcode.endswith("-done"):
        begun = [starts[operand] for operand in operands if operand in starts]
        if begun and num_work == min(begun):
            tally.num_bare += 1
        else:
            # Without a start here it began in the iteration before, which hides it.
            tally.num_hidden += 1
    elif opcode in ("fusion", "copy") or opcode.endswith("slice"):
        tally.num_plain += 1
        if len(tally.plain_names) < _MOST_NAMES:
            tally.plain_names.append(name)


def _split_instruction(line: str, start: int) -> tuple[str, str, str]:
    """Split after the `=` into the result's type, the opcode, and what follows its bracket."""
    if start < len(line) and line[start] == "(":
        # Layouts such as {1,0:T(8,128)S(5)} have brackets of their own, which are balanced.
        end = start + 2 + _closing(line[start + 1 :])
    else:
        end = line.find(" ", start)
        end = len(line) if end < 0 else end
    bracket = line.find("(", end)
    if bracket < 0:
        return line[start:end], "", ""
    return line[start:end], line[end:bracket].strip(), line[bracket + 1 :]


def _closing(text: str) -> int:
    """Return where the bracket that was opened before `text` closes."""
    depth = 1
    for bracket in _BRACKETS.finditer(text):
        depth += 1 if bracket[0] == "(" else -1
        if not depth:
            return bracket.start()
    return len(text)


def _operands(rest: str) -> list[str]:
    """Return the names between the opcode's brackets, with or without their types."""
    inside = rest[: _closing(rest)]
    if "%" in inside:
        return re.findall(r"%([\w.\-]+)", inside)
    return _OPERAND.findall(inside)


def _note_calls(module: _Module, current: _Computation, opcode: str, rest: str) -> None:
    called = _CALLED.findall(rest)
    for branches in _BRANCHES.findall(rest):
        called += [name.strip().removeprefix("%") for name in branches.split(",")]
    if not called:
        return
    if opcode in ("while", "call", "conditional"):
        current.runs.update(called)
        if opcode == "while":
            module.bodies.update(_BODY.findall(rest))
    else:
        module.wrapped.update(called)


def _reachable(module: _Module, roots: set[str]) -> set[str]:
    seen: set[str] = set()
    waiting = list(roots)
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += module.computations.get(name, _Computation()).runs
    return seen
