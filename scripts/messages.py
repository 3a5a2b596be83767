"""Find every message of the package's source: what it raises, and what it warns of.

A message is written as it is in the code, with the name of what stands in a place in braces:
`plan {name} is for {model}`. Functions and constants that make messages are followed; where a
place holds one of several texts, each makes a message of its own.
"""

import ast
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

PLAIN_ERRORS = frozenset({"ValueError", "TypeError", "RuntimeError", "AttributeError"})
"""Python's own, that a caller may meet. `AssertionError` is none: it says "bug in ebbtide"."""

INTERNAL = frozenset({"UnsolvedError", "WireError", "_UnknownSizeError", "_MustRunOtherwiseError"})
"""Raised and caught inside: nobody meets them."""

WARNING = "warning"

NO_NAMES = "there are no valid names"
"""What a message says that names the valid names, where there are none."""

_WORDS = re.compile(r"[a-z] [a-z]")
"""What has none is no text, but a number or a name that is worked out."""

_FINDS = ("find_", "read_")
"""A function of such a name shows what its name ends with; any other, what it is given."""

_MOST_TEXTS = 12
_MOST_CALLS_DEEP = 4

Function = ast.FunctionDef | ast.AsyncFunctionDef
Texts = Mapping[str, list[str]]


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Message:
    """One message of one module."""

    kind: str
    """The name of the error's class, or `WARNING`."""
    module: str
    """`ebbtide.plan`."""
    text: str


@dataclass(slots=True, kw_only=True)
class _Module:
    name: str
    tree: ast.Module
    functions: dict[str, Function] = field(default_factory=dict[str, Function])
    nodes: list[tuple[ast.AST, Function | None]] = field(
        default_factory=list[tuple[ast.AST, Function | None]]
    )
    """All, with the function that each is in."""


def find_messages(sources: Mapping[str, str], errors: frozenset[str]) -> list[Message]:
    """Return all messages, each once a module, sorted.

    Args:
        sources: Text of each module by its name: `ebbtide.plan`.
        errors: Names of the package's own classes of errors.
    """
    modules = {name: _read(name, text) for name, text in sources.items()}
    finder = _Finder(modules, errors)
    return sorted({message for module in modules.values() for message in finder.find(module)})


def read_sources(package: Path) -> dict[str, str]:
    """Return the text of each module of a package by its name."""
    return {
        ".".join((package.name, *path.relative_to(package).with_suffix("").parts)): path.read_text(
            encoding="utf-8"
        )
        for path in sorted(package.rglob("*.py"))
    }


def _read(name: str, text: str) -> _Module:
    module = _Module(name=name, tree=ast.parse(text))
    for node, function in _with_functions(module.tree):
        module.nodes.append((node, function))
        if isinstance(node, Function):
            module.functions.setdefault(node.name, node)
    return module


class _Finder:
    def __init__(self, modules: Mapping[str, _Module], errors: frozenset[str]) -> None:
        self._errors = errors
        self._functions: dict[str, Function] = {}
        self._constants: dict[str, ast.expr] = {}
        for module in modules.values():
            for name, function in module.functions.items():
                self._functions.setdefault(name, function)
            for statement in module.tree.body:
                for name, value in _assigned(statement):
                    self._constants.setdefault(name, value)

    def find(self, module: _Module) -> Iterator[Message]:
        """Yield the messages of a module, some more than once."""
        for node, function in module.nodes:
            if not isinstance(node, ast.Call):
                continue
            kind = self._kind(node)
            if not kind:
                continue
            known = {} if function is None else _Locals(function).texts
            scope = _Scope(finder=self, module=module, values=known)
            texts = scope.message(node, kind)
            # Of a function that also passes on what it was given, only what it says itself.
            said = [text for text in texts if _WORDS.search(text)] or texts
            for text in said:
                if NO_NAMES not in text:
                    yield Message(kind=kind, module=module.name, text=text)

    def _kind(self, call: ast.Call) -> str:
        match call.func:
            case ast.Name(id=name) if name in self._errors or name in PLAIN_ERRORS:
                return name
            case ast.Attribute(value=ast.Name(id=name)) if name in self._errors:
                return name
            case ast.Attribute(value=ast.Name(id="log"), attr=("warning" | "error")):
                return WARNING
            case ast.Attribute(value=ast.Name(id="warnings"), attr="warn"):
                return WARNING
            case _:
                return ""

    def function(self, name: str, module: _Module) -> Function | None:
        """Return the function of this name, of the module itself if it has one."""
        return module.functions.get(name) or self._functions.get(name)

    def constant(self, name: str) -> ast.expr | None:
        """Return what a module gives this name, if one does."""
        return self._constants.get(name)


class _Locals:
    """What the names of one function are given in it."""

    def __init__(self, function: Function) -> None:
        self.texts: dict[str, list[ast.expr]] = {}
        for node in ast.walk(function):
            if isinstance(node, ast.stmt):
                for name, value in _assigned(node):
                    self.texts.setdefault(name, []).append(value)


@dataclass(slots=True, kw_only=True)
class _Scope:
    """Where a message is written: what names mean there."""

    finder: _Finder
    module: _Module
    values: Mapping[str, list[ast.expr]]
    texts: Texts = field(default_factory=dict[str, list[str]])
    """Arguments of the call that led here."""
    depth: int = 0

    def message(self, call: ast.Call, kind: str) -> list[str]:
        """Return the texts of an error or a warning."""
        if isinstance(call.func, ast.Attribute) and call.func.attr == "for_extra":
            return self._called(call, "for_extra")
        if not call.args:
            return []
        texts = self.of(call.args[0])
        if kind != WARNING or len(call.args) == 1:
            return texts
        return [
            filled
            for text in texts
            for filled in self._fill(text, [self.of(argument) for argument in call.args[1:]])
        ]

    def of(self, node: ast.expr) -> list[str]:
        """Return the texts that an expression can be, or its name in braces."""
        match node:
            case ast.Constant(value=str(text)):
                return [text]
            case ast.Constant(value=value):
                return [str(value)]
            case ast.JoinedStr():
                parts = [self._part(value) for value in node.values]
                return _joined(parts)
            case ast.BinOp(op=ast.Add()):
                return _joined([self.of(node.left), self.of(node.right)])
            case ast.IfExp():
                return [*self.of(node.body), *self.of(node.orelse)][:_MOST_TEXTS]
            case ast.Name(id=name):
                return self._named(name)
            case ast.Call():
                return self._call(node)
            case _:
                return [_place(node)]

    def _part(self, node: ast.expr) -> list[str]:
        """Return the texts of a part of an f-string: words if all that it can be are words."""
        if not isinstance(node, ast.FormattedValue):
            return self.of(node)
        texts = self.of(node.value)
        if isinstance(node.value, ast.Name) and node.value.id in self.texts:
            return texts  # what the caller said, in the caller's names
        is_said = all(_WORDS.search(text) or "{" not in text for text in texts)
        return texts if is_said and len(texts) <= 3 else [_place(node.value)]

    def _named(self, name: str) -> list[str]:
        if name in self.texts:
            return self.texts[name]
        constant = self.finder.constant(name)
        if isinstance(constant, ast.Constant) and name not in self.values:
            return self.of(constant)
        given = self.values.get(name)
        if given is None:
            given = None if constant is None else [constant]
        if given is None or self.depth >= _MOST_CALLS_DEEP:
            return [_place(ast.Name(id=name))]
        inner = _Scope(
            finder=self.finder,
            module=self.module,
            values={known: v for known, v in self.values.items() if known != name},
            texts=self.texts,
            depth=self.depth + 1,
        )
        texts = [text for value in given for text in inner.of(value)]
        is_said = any(map(_WORDS.search, texts))
        return _distinct(texts) if is_said else [_place(ast.Name(id=name))]

    def _call(self, node: ast.Call) -> list[str]:
        match node.func:
            case ast.Attribute(value=value, attr=("rstrip" | "strip" | "format")):
                return self.of(value)
            case ast.Name(id=name) | ast.Attribute(value=ast.Name(id="self"), attr=name):
                return self._called(node, name) or [_place(node)]
            case _:
                return [_place(node)]

    def _called(self, call: ast.Call, name: str) -> list[str]:
        """Return the texts that a function of the package returns; empty if it makes none."""
        function = self.finder.function(name, self.module)
        if function is None or self.depth >= _MOST_CALLS_DEEP:
            return []
        parameters = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
        if parameters and parameters[0] in ("self", "cls"):
            parameters = parameters[1:]
        given = {
            **{p: self.of(a)[:1] for p, a in zip(parameters, call.args, strict=False)},
            **{k.arg: self.of(k.value)[:1] for k in call.keywords if k.arg},
        }
        inner = _Scope(
            finder=self.finder,
            module=self.module,
            values=_Locals(function).texts,
            texts=given,
            depth=self.depth + 1,
        )
        texts: list[str] = []
        for node in ast.walk(function):
            if isinstance(node, ast.Return) and node.value is not None:
                value = node.value
                if isinstance(value, ast.Call) and _name_of(value.func) in ("cls", "Self"):
                    value = value.args[0]
                texts += inner.of(value)
        return _distinct(texts) if any(map(_WORDS.search, texts)) else []

    def _fill(self, text: str, arguments: list[list[str]]) -> Iterator[str]:
        for chosen in itertools.product(*arguments):
            filled = text
            for argument in chosen:
                filled = re.sub(r"%[sdr]", lambda _, a=argument: a, filled, count=1)
            yield filled


def _distinct(texts: list[str]) -> list[str]:
    return list(dict.fromkeys(texts))[:_MOST_TEXTS]


def _joined(parts: list[list[str]]) -> list[str]:
    """Return every way to join one text of each part."""
    joined = itertools.islice(itertools.product(*parts), _MOST_TEXTS)
    return ["".join(chosen) for chosen in joined]


def _place(node: ast.AST) -> str:
    """Return the name of a place in a message: that of what is shown there."""
    name = _name_of(node).strip("_")
    return f"{{{(name.lower() if name.isupper() else name) or '...'}}}"


def _name_of(node: ast.AST) -> str:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=("__name__" | "splitlines")):
            return _name_of(value)
        case ast.Attribute(attr=name):
            return name.lstrip("_")
        case ast.Subscript(value=value, slice=ast.Constant(value=str(key))):
            return key if key.isidentifier() else _name_of(value)
        case ast.Subscript(value=value) | ast.FormattedValue(value=value):
            return _name_of(value)
        case ast.Call(func=ast.Name(id=name)) if name.startswith(_FINDS):
            return name.split("_", 1)[1]
        case ast.Call(args=[first, *_]) if _name_of(first):
            return _name_of(first)
        case ast.Call(func=function):
            return _name_of(function)
        case ast.BinOp(left=left) | ast.BoolOp(values=[left, *_]) | ast.IfExp(body=left):
            return _name_of(left)
        case ast.GeneratorExp(elt=made) | ast.ListComp(elt=made):
            return _name_of(made)
        case _:
            return ""


def _assigned(statement: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    match statement:
        case ast.Assign(targets=targets, value=value):
            yield from ((t.id, value) for t in targets if isinstance(t, ast.Name))
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
            yield name, value
        case _:
            pass


def _with_functions(tree: ast.AST) -> Iterator[tuple[ast.AST, Function | None]]:
    """Yield every node with the function that it is in."""
    waiting: list[tuple[ast.AST, Function | None]] = [(tree, None)]
    while waiting:
        node, function = waiting.pop()
        yield node, function
        inner = node if isinstance(node, Function) else function
        waiting += [(child, inner) for child in ast.iter_child_nodes(node)]
