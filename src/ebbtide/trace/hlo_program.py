"""Find what a copy of a compiled JAX program moves, by the name that `ebbtide.jax` gave it.

A profile holds the programs that ran, as XLA's `HloProto`. A copy's instruction says which value
it copies, but a name from `checkpoint_name` is nothing that is run, so the program has none.
`ebbtide.jax` makes each value that it moves under a named scope, which the operation that makes it
carries in its metadata. So a copy is followed back to that operation: through the stack of a scan
in host memory and its slices, through tuples, loops and pipelined iterations.

A value with no such operation, such as the input of the first of unrolled layers, has no name
here; nor has one that might be two.

Field numbers are those of XLA's `hlo.proto` (HloProto, HloModuleProto, HloComputationProto,
HloInstructionProto) and `xla_data.proto` (OpMetadata).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from ebbtide.trace.names import activation_in
from ebbtide.trace.wire import WireError, read_fields, read_numbers, signed, text

# Their first operand, or a part of it, with other dimensions or in another place.
_SAME_VALUE = frozenset(
    {
        *("bitcast", "copy", "copy-start", "copy-done", "reshape", "transpose"),
        *("optimization-barrier", "opt-barrier"),
    }
)
# What these call makes their result.
_CALLS = frozenset({"fusion", "call", "async-start"})
_DONE = frozenset({"async-done", "async-update"})

Path = tuple[int, ...]
"""Which element is meant: of a tuple, of a tuple in it, and so on."""

_MOST_NESTED = 8
_MOST_STEPS = 100_000
"""Tuples in tuples, and values looked at for one copy: a file that is no program could go on for
ever."""


@dataclass(slots=True)
class _Instruction:
    name: str = ""
    opcode: str = ""
    scopes: str = ""
    number: int = 0
    parameter: int = 0
    index: int = 0
    computation: int = 0
    operands: list[int] = field(default_factory=list[int])
    called: list[int] = field(default_factory=list[int])


class HloProgram:
    """The instructions of one program, and which value each hands on."""

    def __init__(self, proto: memoryview) -> None:
        """Read an `HloProto`.

        Raises:
            WireError: It is none.
        """
        self._by_number: dict[int, _Instruction] = {}
        self._by_name: dict[str, _Instruction] = {}
        self._roots: dict[int, int] = {}
        self._callers: dict[int, list[_Instruction]] = {}
        self._found: dict[str, str | None] = {}
        for number, _, module in read_fields(proto):
            if number == 1 and not isinstance(module, int):
                for part, _, value in read_fields(module):
                    if part == 3 and not isinstance(value, int):
                        self._read_computation(value)

    def activation_moved_by(self, name: str) -> str | None:
        """Return the activation that an instruction copies; None: it has no name, or may be two.

        Args:
            name: Of an instruction that copies, slices or updates a slice, or of a fusion of one.
        """
        if name not in self._found:
            start = self._by_name.get(name)
            self._found[name] = None if start is None else self._find(start)
        return self._found[name]

    def _find(self, start: _Instruction) -> str | None:
        makers: set[str] = set()
        views: set[str] = set()
        waiting = list(self._moved_by(start))
        seen = set(waiting)
        while waiting:
            if len(seen) > _MOST_STEPS:
                return None
            number, path = waiting.pop()
            instruction = self._by_number.get(number)
            if instruction is None:
                continue
            found = list(self._from(instruction, path))
            activation = activation_in(instruction.scopes)
            if activation is not None:
                # A view may carry the scopes of what reads it.
                if not found:
                    makers.add(activation)
                elif instruction.opcode in _SAME_VALUE:
                    views.add(activation)
            fresh = [s for s in found if s not in seen and len(s[1]) <= _MOST_NESTED]
            seen.update(fresh)
            waiting += fresh
        names = makers or views
        return names.pop() if len(names) == 1 else None

    def _moved_by(self, start: _Instruction) -> Iterator[tuple[int, Path]]:
        """Yield what an instruction copies, which may be the slice of a stack in host memory."""
        root = start
        for _ in range(len(self._roots)):
            if root.opcode not in _CALLS or not root.called:
                break
            inner = self._by_number.get(self._roots.get(root.called[0], 0))
            if inner is None:
                return
            root = inner
        if root.opcode in ("dynamic-slice", "slice") and root.operands:
            yield root.operands[0], ()
        else:
            yield root.number, ()

    def _from(self, instruction: _Instruction, path: Path) -> Iterator[tuple[int, Path]]:
        """Yield where a value comes from; nothing: it is made here."""
        opcode, operands = instruction.opcode, instruction.operands
        if opcode in _SAME_VALUE and operands:
            # The result of a copy's start is a tuple of where to, where from, and a context.
            yield operands[0], path[1:] if opcode == "copy-start" else path
        elif opcode == "get-tuple-element" and operands:
            yield operands[0], (instruction.index, *path)
        elif opcode == "tuple":
            if path and path[0] < len(operands):
                yield operands[path[0]], path[1:]
        elif opcode == "dynamic-update-slice" and len(operands) > 1:
            yield operands[1], ()
            yield operands[0], ()
        elif opcode == "while" and operands:
            yield operands[0], path
            yield from ((self._roots[c], path) for c in instruction.called if c in self._roots)
        elif opcode in _CALLS:
            yield from ((self._roots[c], path) for c in instruction.called if c in self._roots)
        elif opcode in _DONE and operands:
            yield operands[0], path
        elif opcode == "parameter":
            for caller in self._callers.get(instruction.computation, ()):
                if caller.opcode == "while":
                    yield from self._from(caller, path)
                elif caller.opcode in _CALLS and instruction.parameter < len(caller.operands):
                    yield caller.operands[instruction.parameter], path

    def _read_computation(self, view: memoryview) -> None:
        instructions: list[_Instruction] = []
        number = root = 0
        for part, _, value in read_fields(view):
            if part == 2 and not isinstance(value, int):
                instructions.append(_read_instruction(value))
            elif part == 5:
                number = signed(value)
            elif part == 6:
                root = signed(value)
        self._roots[number] = root
        for instruction in instructions:
            instruction.computation = number
            if instruction.number in self._by_number:
                raise WireError(f"two instructions have the number {instruction.number}")
            self._by_number[instruction.number] = instruction
            self._by_name[instruction.name] = instruction
            for called in instruction.called:
                self._callers.setdefault(called, []).append(instruction)


def _read_instruction(view: memoryview) -> _Instruction:
    read = _Instruction()
    for part, _, value in read_fields(view):
        if part == 1:
            read.name = text(value)
        elif part == 2:
            read.opcode = text(value)
        elif part == 7 and not isinstance(value, int):
            read.scopes = next((text(v) for number, _, v in read_fields(value) if number == 2), "")
        elif part == 9:
            read.parameter = signed(value)
        elif part == 13:
            read.index = signed(value)
        elif part == 35:
            read.number = signed(value)
        elif part == 36:
            read.operands += read_numbers(value)
        elif part == 38:
            read.called += read_numbers(value)
    return read
