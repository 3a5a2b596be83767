"""Decide what a compiled block saves and what its backward makes again, by tags on its graph.

AOTAutograd traces forward and backward of a block into one graph, and a partitioner cuts it in
two. Tags on the nodes, those that selective checkpointing leaves there, tell the partitioner what
must be saved and what must be made again: every product and every attention output is a decision
of its own. All that is cheap is made again inside the compiled graph, where it is fused into what
reads it. What is random or not known stays with the partitioner's own rules (design rule 8).

Known weakness: what is made again is fused with other operators than in forward, so in low
precision generated code may round it elsewhere. Gradients then have the bits of the same compiled
code without ebbtide, which need not be those of another partition.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from ebbtide.torch.graphs import GraphFacts, Names, Tensors
from ebbtide.torch.internals import allow_whole_budget, partition_by_min_cut
from ebbtide.torch.ops import facts_of, is_random_call
from ebbtide.torch.rerun import Rerun
from ebbtide.workload import OpKind

DEAR: Final = frozenset({OpKind.MATMUL, OpKind.ATTENTION})
CHEAP: Final = frozenset({OpKind.ELEMENTWISE, OpKind.NORM})

PRIMS: Final = frozenset(
    {"convert_element_type", "iota", "fma", "broadcast_in_dim", "where"}
    | {"inductor_lookup_seed", "inductor_random", "inductor_randint"}
)
"""What decompositions leave of cheap operators, and random numbers that are made from a seed: the
seed is saved, so they come out the same (design rule 8)."""

_ROOT: Final = re.compile(r"L\['\w+'\](?=\.)")
"""How dynamo names the block: after the argument that it is of what is compiled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What a compiled block makes again in its backward, beside all that is cheap."""

    recomputed: frozenset[str] | None
    """Local names of products and attention outputs; None: all of them."""

    def makes_again(self, name: str) -> bool:
        """Return whether the backward makes this product or attention output again."""
        return self.recomputed is None or name in self.recomputed


MINIMAL: Final = Variant(recomputed=None)
"""Saves what a checkpoint would: the block's input, and what must not be run again."""

LEAN: Final = Variant(recomputed=frozenset())
"""Saves every product and attention output that backward needs, and nothing that is cheap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Halves:
    """A graph that was cut, and what is known of it."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    facts: GraphFacts


def cut(joint: fx.GraphModule, inputs: Sequence[Any], variant: Variant, **options: Any) -> Halves:
    """Cut the joint graph of a block into forward and backward.

    Args:
        joint: Forward and backward in one; it is used up.
        inputs: What it was traced with.
        variant: What backward makes again.
        options: For the partitioner, `num_fwd_outputs` among them.
    """
    num_outputs = options["num_fwd_outputs"]
    trial = fx.GraphModule(joint, _copy_of(joint.graph))
    lean = _Tagged(trial, num_outputs, LEAN)
    saved = _saved_nodes(_partition(trial, inputs, options)[0], num_outputs)
    tagged = _Tagged(joint, num_outputs, variant)
    forward, backward = _partition(joint, inputs, options)
    names = tuple(tagged.name_of(name) for name in _saved_nodes(forward, num_outputs))
    return Halves(
        forward=forward,
        backward=backward,
        facts=GraphFacts(names=names, lean=lean.describe(saved)),
    )


def _copy_of(graph: fx.Graph) -> fx.Graph:
    """Copy nodes and their tags, but not what the tags refer to."""
    copied = fx.Graph()
    result: Any = copied.graph_copy(graph, {}, return_output_node=True)
    output, old_output = result
    copied.output(output).meta = dict(old_output.meta)
    return copied


def _partition(
    joint: fx.GraphModule, inputs: Sequence[Any], options: dict[str, Any]
) -> tuple[fx.GraphModule, fx.GraphModule]:
    with allow_whole_budget():  # the tags decide, not a budget that is set for other code
        return partition_by_min_cut(joint, inputs, **options)


def _saved_nodes(forward: fx.GraphModule, num_outputs: int) -> list[str]:
    outputs = _outputs_of(forward.graph)[num_outputs:]
    return [n.name for n in outputs if isinstance(n.meta.get("val"), Tensor)]


def _outputs_of(graph: fx.Graph) -> list[fx.Node]:
    (output,) = (node for node in graph.nodes if node.op == "output")
    return [node for node in output.args[0] if isinstance(node, fx.Node)]


class _Tagged:
    """A joint graph whose forward nodes have names and tags."""

    def __init__(self, joint: fx.GraphModule, num_outputs: int, variant: Variant) -> None:
        (output,) = (node for node in joint.graph.nodes if node.op == "output")
        self._forward = _ancestors(output.args[0][:num_outputs])
        self._nodes: dict[str, fx.Node] = {node.name: node for node in joint.graph.nodes}
        self._names: dict[fx.Node, str] = {}
        self._groups: dict[fx.Node, str] = {}
        nodes = [n for n in joint.graph.nodes if n in self._forward and n.op == "call_function"]
        alone = _modules_of_one_product(nodes)
        names = Names()
        for node in nodes:
            if not (_is_view(node) or _is_part(node)):
                self._name(node, alone, names)
        for node in nodes:
            tag = self._tag(node, variant)
            if tag is not None:
                node.meta["recompute"] = tag

    def name_of(self, node_name: str) -> str:
        """Return the local name of the storage of a node; "" for what the graph is given."""
        node = self._nodes.get(node_name)
        return "" if node is None else self._names.get(_owner(node), "")

    def describe(self, saved: Sequence[str]) -> tuple[Tensors, ...]:
        """Describe the storages of these nodes, in the order in which they are made."""
        owners = {_owner(self._nodes[name]) for name in saved}
        known = {owner: self._names[owner] for owner in self._names if owner in owners}
        return tuple(self._tensors(owner, name, known) for owner, name in known.items())

    def _tensors(self, owner: fx.Node, name: str, known: dict[fx.Node, str]) -> Tensors:
        call = _call_of(owner)
        read, reads_input = _made_from(call, known)
        return Tensors(
            name=name,
            op=_op_name(call),
            kind=_kind(call),
            num_bytes=_num_bytes(owner),
            inputs=tuple(n for node, n in known.items() if node in read),
            reads_input=reads_input,
            group=self._groups[owner],
            rerun=Rerun.of(call) if _kind(call) in DEAR else None,
        )

    def _name(self, node: fx.Node, alone: AbstractSet[str], names: Names) -> None:
        path = _path_of(node)
        is_alone = _kind(node) is OpKind.MATMUL and path in alone
        group = names.unique(path if is_alone else f"{path}:{_op_name(node).strip('_')}")
        parts = [user for user in node.users if _is_part(user)]
        if not parts:
            self._names[node] = self._groups[node] = group
        for part in parts:
            self._names[part] = f"{group}.{part.args[1]}"
            self._groups[part] = group

    def _tag(self, node: fx.Node, variant: Variant) -> CheckpointPolicy | None:
        call = _call_of(node)
        kind = _kind(call)
        if kind in DEAR:
            parts = [node] if node is not call else [u for u in call.users if _is_part(u)]
            names = [self._names[part] for part in parts or [call]]
            if any(variant.makes_again(name) for name in names):
                return CheckpointPolicy.MUST_RECOMPUTE
            return CheckpointPolicy.MUST_SAVE
        if kind in CHEAP or _is_view(call):
            return CheckpointPolicy.MUST_RECOMPUTE
        return None


def _ancestors(outputs: Sequence[Any]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    waiting = [node for node in outputs if isinstance(node, fx.Node)]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _modules_of_one_product(nodes: Sequence[fx.Node]) -> set[str]:
    """Return the paths of modules in whose code one product is run, such as linear layers."""
    num_products: dict[str, int] = {}
    for node in nodes:
        if _kind(node) is OpKind.MATMUL:
            path = _path_of(node)
            num_products[path] = num_products.get(path, 0) + 1
    return {path for path, num in num_products.items() if num == 1 and path}


def _path_of(node: fx.Node) -> str:
    """Return the path below the block of the module whose code ran a node; "" for the block's."""
    stack = node.meta.get("nn_module_stack") or {}
    path = next(reversed(list(stack.values())), ("", None))[0]
    root = _ROOT.match(path)
    return "" if root is None else path[root.end() :]


def _is_part(node: fx.Node) -> bool:
    return node.target is operator.getitem


def _call_of(node: fx.Node) -> fx.Node:
    """Return the call of which a node is an output."""
    return node.all_input_nodes[0] if _is_part(node) else node


def _is_view(node: fx.Node) -> bool:
    """Return whether a node stands on the storage of what it reads."""
    if node.op != "call_function" or _is_part(node):
        return False
    facts = facts_of(node.target)
    # Once functions are traced, nothing can tell this one from a view.
    return facts.is_view or facts.name == "_unsafe_view"


def _owner(node: fx.Node) -> fx.Node:
    """Return the node that makes the storage on which a node stands."""
    while _is_view(node):
        node = node.all_input_nodes[0]
    return node


def _kind(node: fx.Node) -> OpKind:
    if node.op != "call_function":
        return OpKind.OPAQUE
    facts = facts_of(node.target)
    if is_random_call(facts, node.args, node.kwargs):
        return OpKind.RANDOM
    is_prim = getattr(node.target, "namespace", "") == "prims"
    if is_prim and facts.kind is OpKind.OPAQUE and facts.name in PRIMS:
        return OpKind.ELEMENTWISE
    return facts.kind


def _op_name(node: fx.Node) -> str:
    name = facts_of(node.target).name
    return name if name.isidentifier() else "call"


def _num_bytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return 0
    num_bytes: Any = value.untyped_storage().nbytes()
    if isinstance(num_bytes, torch.SymInt):
        hint = num_bytes.node.hint
        return 0 if hint is None else int(hint)
    return int(num_bytes)


def _made_from(call: fx.Node, known: dict[fx.Node, str]) -> tuple[set[fx.Node], bool]:
    """Return what a call is made from of what is saved, and whether of what the graph is given."""
    found: set[fx.Node] = set()
    seen: set[fx.Node] = set()
    reads_input = False
    waiting = list(call.all_input_nodes)
    while waiting:
        node = _owner(waiting.pop())
        if node in seen:
            continue
        seen.add(node)
        if node in known:
            found.add(node)
        elif node.op == "placeholder":
            reads_input = True
        else:
            waiting += node.all_input_nodes
    return found, reads_input
