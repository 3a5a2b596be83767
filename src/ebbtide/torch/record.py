"""What one forward of one block leaves for its backward: stored storages and recipes.

A record is a graph of *nodes* (storages) and *calls* (operators that made them). Views are not
in it: every tensor that is wanted is a layout over a node's storage. A node is stored (kept,
evicted) or made again by replaying its call from its inputs. Records refer to nodes by number,
so there are no reference cycles: a record dies with the last autograd node that saved
something in it (design rule 4), and takes its device copies and places along.

A little longer than most modules: what a node is stored as, and how it is made again and checked,
read the same graph.
"""

import enum
import weakref
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from ebbtide.errors import RuntimeStateError
from ebbtide.plan import Decision
from ebbtide.torch.devices.base import Place
from ebbtide.torch.graphs import GraphFacts
from ebbtide.torch.identity import Layout, bytes_of, clone_storage, have_equal_bits
from ebbtide.torch.internals import is_in_custom_backward, pause_autocast
from ebbtide.torch.settings import Settings
from ebbtide.torch.traffic import MUTATED, Slot, Traffic
from ebbtide.workload import OpKind

FREED: Final = (
    "{name} in {block} was freed between forward and backward, and a recomputation needs it. "
    "Shard whole blocks with FSDP (one group a block), or keep this activation."
)


LET_GO: Final = (
    "what autograd saved in {block} was let go, because its step ran out of memory. Run the step "
    "again, forward and backward."
)


class StorageFreedError(RuntimeError):
    """What a replay reads was freed behind autograd, as FSDP does with parameters."""


class Role(enum.Enum):
    """Where a node's bytes come from, as seen from its block."""

    PARAMETER = "parameter"
    """A parameter or buffer: referenced, never moved (design rule 3)."""
    SHARED = "shared"
    """Made outside the block and not one of its differentiable inputs: masks, tables."""
    INPUT = "input"
    """A differentiable input of the block."""
    DERIVED = "derived"
    """Computed from parameters and constants alone, such as a weight cast by autocast."""
    COMPUTED = "computed"
    """Computed in the block."""


ACTIVATION_ROLES: Final = frozenset({Role.INPUT, Role.COMPUTED})
"""What a plan decides; all else is referenced, or made again from parameters."""


class Outer(NamedTuple):
    """A DTensor over some storage: it counts the writes to it, and its local part does not."""

    alias: Tensor
    version: int
    """When the storage was taken over."""

    @property
    def is_written(self) -> bool:
        """Whether the DTensor was written to since."""
        return self.alias._version != self.version


class Node:
    """One storage at one version.

    Args:
        index: Its number in the record.
        name: The activation.
        role: Where its bytes come from.
        kind: What made it, for planning.
        op: Name of the operator that made it.
        group: Shared by the outputs of one call.
        num_bytes: Bytes of the storage.
        decision: What becomes of it.
        place: Room reserved in a tier, until the storage is evicted.
    """

    __slots__ = (
        "activation", "call", "decision", "group", "index", "is_copy", "is_cut", "is_outside",
        "is_root", "is_shared", "is_unsteady", "kept", "kind", "layout", "memo", "name",
        "num_bytes", "num_left", "num_packs", "num_uses", "op", "outers", "pieces", "place",
        "role", "slot", "source", "until_check", "version", "watched",
    )  # fmt: skip

    def __init__(
        self,
        index: int,
        name: str,
        role: Role,
        kind: OpKind,
        op: str,
        group: str,
        num_bytes: int,
        decision: Decision,
        place: Place | None,
    ) -> None:
        self.index = index
        self.name = name
        self.activation = name
        """What the plan decides for: of a piece, the storage that it is of."""
        self.role = role
        self.kind = kind
        self.op = op
        self.group = group
        self.num_bytes = num_bytes
        self.decision = decision
        self.place = place
        self.call = -1
        """The call that made it; -1 when none may be replayed."""
        self.layout: Layout | None = None
        """Layout of that call's output, while the block is checked: replays must repeat it."""
        self.kept: Tensor | None = None
        """An alias that holds the storage: what is kept, and roots until the block's end."""
        self.version = 0
        self.watched: dict[int, tuple[Tensor, int]] = {}
        """While `kept` is no copy: an alias of each saved tensor by its handle's number, and its
        version. Tensors of one storage may count their versions apart."""
        self.outers: list[Outer] = []
        """While `kept` is no copy: DTensors over the storage."""
        self.source: Tensor | None = None
        """The value that recipes start from, where `kept` may be written to."""
        self.is_shared = True
        """Another block that saves the storage may take this one's slot."""
        self.slot: Slot | None = None
        self.memo: Tensor | None = None
        """The replayed storage, while uses are left."""
        self.num_packs = 0
        self.num_uses = 0
        """Unpacks and replayed calls that will read it in one backward."""
        self.num_left = 0
        self.is_copy = False
        """`kept` is a copy of our own: later writes to the original do not reach it."""
        self.is_outside = False
        """A block wrote to a storage that was made outside of it, and others may write to."""
        self.is_root = False
        """Some call that may be replayed reads it."""
        self.is_unsteady = False
        """It is, or is made again from, a parameter that a hook may update in mid-backward."""
        self.is_cut = False
        """Of such a parameter: some call may read it that gives it no gradient."""
        self.until_check = False
        """The plan keeps it, but this forward is checked, and backward makes it again."""
        self.pieces: dict[Layout, int] | None = None
        """Saved views that cover less than half of it, and how often each was saved."""

    @property
    def is_stored(self) -> bool:
        """Whether it can be had without a replay."""
        return self.kept is not None or self.slot is not None

    @property
    def is_written(self) -> bool:
        """Whether what is kept was written to since, as the counter of some alias tells."""
        assert self.kept is not None, "bug in ebbtide"
        return (
            self.kept._version != self.version
            or any(alias._version != version for alias, version in self.watched.values())
            or any(outer.is_written for outer in self.outers)
        )

    def refuse_written_outer(self) -> None:
        """Raise, as torch does, where a DTensor over what is kept was written to.

        Raises:
            RuntimeError: It was.
        """
        for alias, version in self.outers:
            if alias._version != version:
                raise RuntimeError(
                    MUTATED.format(name=self.name, saved=version, now=alias._version)
                )

    def watch_nothing(self) -> None:
        """Let go of all aliases: later writes to the storage do not matter any more."""
        self.watched.clear()
        self.outers.clear()


class Ref(NamedTuple):
    """A tensor argument of a recorded call."""

    node: int
    layout: Layout


_HOLDS_TENSORS: Final = frozenset({Ref, list})


class Call(NamedTuple):
    """One recorded operator call: enough to run it again."""

    func: Any
    run: Any
    """Calls it, directly where there is such a way (`OpFacts.direct`)."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[int, ...]
    """Nodes that it reads, each once."""
    outputs: tuple[int, ...]
    """Nodes that it makes, by position; -1 where an output is no new storage."""


@runtime_checkable
class ReplayWatch(Protocol):
    """Somebody who measures what replays take."""

    def note_peak(self, record: "Record") -> None:
        """Note that a call was replayed: what it read and made is on the device."""
        ...


class Record:
    """The nodes and calls of one forward of one block."""

    def __init__(
        self,
        block: str,
        traffic: Traffic | None,
        *,
        is_checked: bool = False,
        device_type: str = "cpu",
    ) -> None:
        self.block = block
        self.is_checked = is_checked
        self.traffic = traffic
        self.forward_pass = None if traffic is None else traffic.forward_pass
        self.nodes: list[Node | None] = []
        self.calls: list[Call | None] = []
        self.siblings: list[weakref.ref[Record]] = []
        """The records of the same forward of the model, this one too."""
        self.graphs: list[GraphFacts] = []
        """The compiled graphs that the forward ran, where something is known of them."""
        self.is_sealed = False
        """The block's forward has ended."""
        self.has_let_go = False
        self.freed: set[int] = set()
        """Nodes of which a check found that a parameter which they are made from was freed."""
        self.num_replayed_calls = 0
        self.watch: ReplayWatch | None = None
        self._pieces: dict[tuple[int, Layout], int] = {}
        self.settings = Settings(device_type)
        """Those of the block's start; what is replayed is computed under them."""

    def node(self, index: int) -> Node:
        """Return the node with this number."""
        found = self.nodes[index]
        assert found is not None, "bug in ebbtide: a node that is needed was dropped"
        return found

    # -- forward -------------------------------------------------------------------------------

    def evict(self, node: Node) -> None:
        """Send a node to its reserved place; without one it stays kept."""
        if node.slot is not None or node.place is None or node.kept is None:
            return
        if node.is_written:
            return  # it was written to since autograd saved it: `restore` says so, as torch does
        assert self.traffic is not None, "bug in ebbtide"
        place, node.place = node.place, None
        node.slot = self.traffic.evict(
            node.name,
            bytes_of(node.kept),
            place,
            node.kept,
            node.activation,
            # An equal version of a local part does not tell that nobody wrote to it.
            is_shared=node.is_shared and not node.outers,
        )
        for alias, _ in node.watched.values():
            if alias is not node.kept:
                self.traffic.watch(node.slot, alias)
        for outer in node.outers:
            self.traffic.watch_alias(node.slot, *outer)
        node.kept = None
        node.watch_nothing()
        if self.is_checked:
            # The copy must hold the value at save time, or a later write that the dispatcher
            # does not see could pass the check by chance.
            self.traffic.settle(node.slot)

    def seal(self, num_uses: Sequence[int] | None = None) -> None:
        """End the forward: evict what waited, count uses, drop what backward cannot need.

        Args:
            num_uses: Of each node, where the record holds what backward needs and nothing else;
                None: to be worked out.
        """
        has_pieces = False
        for node in list(self.nodes):
            if node is not None and node.pieces and node.slot is None:
                has_pieces = True
                self._seal_pieces(node)
        if num_uses is None or has_pieces:
            needed = self._needed_calls(is_after_check=True)
            self._count_uses(needed)
            self.calls = [c if i in needed else None for i, c in enumerate(self.calls)]
        else:
            for node, num in zip(self.nodes, num_uses, strict=True):
                if node is not None:
                    node.num_uses = node.num_left = num
        for index, node in enumerate(self.nodes):
            if node is None:
                continue
            is_needed = node.num_uses > 0
            if is_needed and node.place is not None and node.kept is not None:
                self.evict(node)
            if node.place is not None:
                assert self.traffic is not None, "bug in ebbtide"
                self.traffic.tiers.give_back(node.place, None)
                node.place = None
            if not is_needed:
                self.nodes[index] = None
        if self.is_checked:
            self._count_uses(self._needed_calls(is_after_check=False))
        self.is_sealed = True

    def _count_uses(self, needed: AbstractSet[int]) -> None:
        num_uses = [0] * len(self.nodes)
        for index in needed:
            call = self.calls[index]
            assert call is not None
            for i in call.inputs:
                num_uses[i] += 1
        for node, num in zip(self.nodes, num_uses, strict=True):
            if node is not None:
                node.num_uses = node.num_left = num + node.num_packs

    def _needed_calls(self, *, is_after_check: bool) -> set[int]:
        """Return the calls that backward replays; after a check more, since less is kept."""

        def is_there(node: Node) -> bool:
            return node.is_stored and not (is_after_check and node.until_check)

        needed: set[int] = set()
        todo = [n for n in self.nodes if n is not None and n.num_packs and not is_there(n)]
        while todo:
            node = todo.pop()
            assert node.call >= 0, f"bug in ebbtide: {node.name} is neither stored nor replayable"
            if node.call in needed:
                continue
            needed.add(node.call)
            call = self.calls[node.call]
            assert call is not None
            todo += [n for n in map(self.node, call.inputs) if not is_there(n)]
        return needed

    def _seal_pieces(self, node: Node) -> None:
        """Evict saved views that cover little of a storage as dense copies."""
        kept, pieces = node.kept, node.pieces
        if kept is None or not pieces or node.is_root or node.is_written:
            self.evict(node)
            return
        places = self._take_pieces(node, pieces)
        if places is None:
            self.evict(node)
            return
        for number, (layout, place) in enumerate(zip(pieces, places, strict=True)):
            piece = Node(
                len(self.nodes), f"{node.name}[{number}]", node.role, node.kind, node.op,
                node.group, layout.num_bytes, node.decision, place,
            )  # fmt: skip
            piece.kept, piece.num_packs = layout.pack_compact(kept), pieces[layout]
            piece.activation = node.activation
            self.nodes.append(piece)
            self.evict(piece)
            self._pieces[node.index, layout] = piece.index
        node.num_packs = 0
        node.kept = None
        node.watch_nothing()

    def _take_pieces(self, node: Node, pieces: dict[Layout, int]) -> list[Place | None] | None:
        """Change the room that is reserved for a node into room for its pieces.

        None for a piece without bytes. Returns None, and leaves things as they were, when the
        tier is too split to hold every piece.
        """
        assert self.traffic is not None and node.place is not None, "bug in ebbtide"
        tiers, tier = self.traffic.tiers, node.place.tier
        tiers.give_back(node.place, None)
        node.place = None
        places: list[Place | None] = []
        for layout in pieces:
            place = tiers.take(tier, layout.num_bytes) if layout.num_bytes else None
            if place is None and layout.num_bytes:
                for taken in places:
                    if taken is not None:
                        tiers.give_back(taken, None)
                node.place = tiers.take(tier, node.num_bytes)
                return None
            places.append(place)
        return places

    # -- backward ------------------------------------------------------------------------------

    def restore(self, handle: "Handle") -> Tensor:
        """Return the saved tensor: the same bits in the same layout (design rule 2).

        Raises:
            RuntimeError: It was written to after it was saved, as torch itself says.
            RuntimeStateError: All was let go.
        """
        node, layout = self.holder_of(handle), handle.layout
        if node.index != handle.node:  # a piece: a copy of our own, that nobody else writes to
            tensor = layout.unpack_compact(self._storage_of(node))
        else:
            # The version of the very tensor that was saved, as torch does.
            alias, _ = node.watched.get(handle.number, (node.kept, 0))
            if alias is not None and alias._version != handle.version and not node.is_copy:
                raise RuntimeError(
                    MUTATED.format(name=node.name, saved=handle.version, now=alias._version)
                )
            node.refuse_written_outer()
            owner = self._storage_of(node)
            is_last = node.num_left <= 1 and self.is_sealed
            if not is_last and alias is None and is_in_custom_backward():
                # It may write to what it saved, and the bytes are needed again.
                owner = clone_storage(owner)
            tensor = layout.over(owner if alias is None or node.is_copy else alias)
        if self.is_sealed:
            self._use(node)
        else:
            self.drop_device_copies()  # a gradient inside the block: no uses are counted yet
        return tensor

    def drop_device_copies(self) -> None:
        """Let go of fetched and replayed storages; a later unpack makes them again."""
        for node in self.nodes:
            if node is not None:
                self._drop(node)

    def let_go(self) -> None:
        """Drop all that is held, on the device and in the tiers: no backward comes any more."""
        self.drop_device_copies()
        self.has_let_go = True
        for node in self.nodes:
            if node is not None:  # a frame of an error may hold it
                node.kept = node.source = node.slot = None
                node.watch_nothing()
        self.nodes.clear()
        self.calls.clear()

    def replayed_bytes(self, in_use: AbstractSet[int]) -> int:
        """Return the bytes of replayed activations that are there, or that are `in_use`."""
        return sum(
            node.num_bytes
            for node in self.nodes
            if node is not None
            and (node.memo is not None or (node.index in in_use and not node.is_stored))
            and node.role in ACTIVATION_ROLES
        )

    def check(self, real: list[tuple["Handle", Tensor]]) -> list[Node]:
        """Compare what backward would get with the real tensors, bit for bit; empties `real`.

        Waits for the device. Real tensors are let go once they were compared, small ones of what
        was evicted first, so that little more is held than the real tensors alone. What comes
        back different is kept at once: recipes that start from it lie behind it, and are checked
        with what is kept. Returns those nodes.
        """
        by_node = self._take_by_node(real)
        wrong: list[Node] = []
        for index in sorted(by_node, key=self._order_in_check):
            node, of_node = self.node(index), by_node.pop(index)
            if node.kept is None and not self._comes_back(node, of_node):
                self.drop_device_copies()
                self._keep_instead(node, of_node)
                wrong.append(node)
        self.drop_device_copies()
        return wrong

    def check_roots(self, roots: list[tuple[Node, Tensor]]) -> list[Node]:
        """Compare what recipes start from, and nobody saved, with the real storage of now.

        Code that the dispatcher does not see may have written to it since. Its copy was made at
        once here; later ones run beside the block, and may come after such a write. So what differs
        is kept, and the recipes that start from it are compared after it. Empties `roots`; returns
        what differs.
        """
        wrong: list[Node] = []
        for node, tensor in roots:
            slot = node.slot
            # A write that was seen waited for the copy.
            if slot is None or node.num_packs or tensor._version != slot.version:
                continue
            assert self.traffic is not None, "bug in ebbtide"
            self.traffic.release(slot)  # so that the bytes make the whole way
            if not torch.equal(self.traffic.bytes_of(slot), bytes_of(tensor)):
                node.kept, node.version, node.slot = tensor, tensor._version, None
                node.decision = Decision.KEEP
                wrong.append(node)
            else:
                self.traffic.release(slot)
        roots.clear()
        return wrong

    def _take_by_node(
        self, real: list[tuple["Handle", Tensor]]
    ) -> dict[int, list[tuple["Handle", Tensor]]]:
        """Empty `real` into lists by node; of its own, so that no variable holds the last one."""
        by_node: dict[int, list[tuple[Handle, Tensor]]] = {}
        for handle, tensor in real:
            by_node.setdefault(self.holder_of(handle).index, []).append((handle, tensor))
        real.clear()
        return by_node

    def _order_in_check(self, index: int) -> tuple[bool, int, int]:
        node = self.node(index)
        is_away = node.slot is not None
        return not is_away, node.num_bytes if is_away else 0, index

    def _comes_back(self, node: Node, real: Sequence[tuple["Handle", Tensor]]) -> bool:
        if node.slot is not None:
            assert self.traffic is not None, "bug in ebbtide"
            self.traffic.release(node.slot)  # so that the bytes make the whole way
        for handle, tensor in real:
            if tensor._version != handle.version:
                return False  # what was saved is no more: `restore` says so
            try:
                restored = self.restore(handle)
            except StorageFreedError:
                self.freed.add(node.index)
                return False
            is_piece = node.index != handle.node
            if not have_equal_bits(restored, tensor) or not (
                is_piece or Layout.of(restored) == handle.layout
            ):
                return False
        return True

    def end_check(self) -> None:
        """Let go of what the plan keeps and backward can make again.

        A checked forward holds real tensors beside what it stores, so it takes more memory than
        the plan says, unless earlier blocks hold less.
        """
        for node in self.nodes:
            if node is not None and node.until_check and node.decision is Decision.KEEP:
                node.until_check = False
                if node.kept is not None and not node.is_copy:
                    node.kept, node.decision = None, Decision.RECOMPUTE
                    node.watch_nothing()
        self._count_uses(self._needed_calls(is_after_check=False))

    def _keep_instead(self, node: Node, real: Sequence[tuple["Handle", Tensor]]) -> None:
        """Hold the real tensors for a node that could not be brought back (design rule 11)."""
        kept = real[0][1]
        if node.index in self._pieces.values():
            kept = Layout.of(kept).pack_compact(kept)
        else:
            node.watched = {h.number: (tensor, h.version) for h, tensor in real}
        node.kept, node.version, node.slot = kept, kept._version, None
        node.decision = Decision.KEEP

    def holder_of(self, handle: "Handle") -> Node:
        """Return the node that holds the bytes of a saved tensor."""
        if self.has_let_go:
            raise RuntimeStateError(LET_GO.format(block=self.block))
        if not self._pieces:
            return self.node(handle.node)
        return self.node(self._pieces.get((handle.node, handle.layout), handle.node))

    def _storage_of(self, node: Node) -> Tensor:
        """Return a tensor over the node's storage, making it if need be."""
        if node.kept is not None:
            if node.kept.untyped_storage().nbytes() < node.num_bytes:
                raise StorageFreedError(FREED.format(name=node.name, block=self.block))
            return node.kept
        if node.slot is not None:
            assert self.traffic is not None, "bug in ebbtide"
            return self.traffic.bytes_of(node.slot)
        if node.memo is None:
            self._replay(node)
        assert node.memo is not None, "bug in ebbtide"
        return node.memo

    def _replay(self, wanted: Node) -> None:
        todo, needed = [wanted], set[int]()
        while todo:
            node = todo.pop()
            if node.is_stored or node.memo is not None or node.call in needed:
                continue
            needed.add(node.call)
            call = self.calls[node.call]
            assert call is not None, "bug in ebbtide: a call that is needed was dropped"
            todo += map(self.node, call.inputs)
        # What autocast casts are calls of their own.
        with pause_autocast(), self.settings.in_force():
            self._run_all(sorted(needed), wanted)
        self.num_replayed_calls += len(needed)

    def _run_all(self, indices: Sequence[int], wanted: Node) -> None:
        nodes = self.nodes
        for index in indices:
            call = self.calls[index]
            assert call is not None
            outputs = self._run(call)
            for output, i in zip(outputs, call.outputs, strict=True):
                node = None if i < 0 else nodes[i]
                if node is None or node.is_stored or (self.is_sealed and node.num_uses == 0):
                    continue
                assert node.layout is None or Layout.of(output) == node.layout, (
                    f"bug in ebbtide: a replay changed the layout of {node.name}"
                )
                node.memo = output
            if self.watch is not None:
                self.watch.note_peak(self)
            for i in call.inputs:
                node = nodes[i]
                assert node is not None, "bug in ebbtide: a node that is needed was dropped"
                if node is not wanted and self.is_sealed:
                    node.num_left -= 1
                    if node.num_left <= 0:
                        self._drop(node)

    def _run(self, call: Call) -> Sequence[Any]:
        _, run, args, kwargs, _, _ = call
        args = [self._argument(a) if type(a) in _HOLDS_TENSORS else a for a in args]
        if kwargs:
            kwargs = {k: self._argument(a) for k, a in kwargs.items()}
        result = run(*args, **kwargs)
        return result if isinstance(result, tuple | list) else (result,)

    def _argument(self, argument: Any) -> Any:
        if type(argument) is Ref:
            node = self.node(argument.node)
            if node.memo is not None:
                return argument.layout.over(node.memo)
            if node.source is not None:
                return argument.layout.over(node.source)
            if node.kept is not None and node.kept._version != node.version:
                raise RuntimeError(
                    MUTATED.format(name=node.name, saved=node.version, now=node.kept._version)
                )
            node.refuse_written_outer()
            return argument.layout.over(self._storage_of(node))
        if isinstance(argument, list):
            return [self._argument(a) for a in argument]
        return argument

    def _use(self, node: Node) -> None:
        node.num_left -= 1
        if node.num_left <= 0:
            self._drop(node)

    def _drop(self, node: Node) -> None:
        node.memo = None
        node.num_left = node.num_uses
        if node.slot is not None:
            assert self.traffic is not None, "bug in ebbtide"
            self.traffic.release(node.slot)


class Handle(NamedTuple):
    """What autograd holds in place of a saved tensor."""

    record: Record
    node: int
    layout: Layout
    version: int
    number: int
    """Counts the handles of its node."""
