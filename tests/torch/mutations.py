"""Take the design rules out of the source, one at a time, and see which tests die.

Run it with `python -m tests.torch.mutations`; with words, only mutations whose description has
one of them. It prints a table and exits with 1 if a mutation survives. It takes minutes, so
pytest does not collect it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGE = Path("src/ebbtide/torch")
TESTS = tuple(
    f"tests/torch/{name}.py"
    for name in (
        "test_traffic",
        "test_tiers",
        "test_identity",
        "test_record",
        "test_rules",
        "test_anchors",
        "test_script",
        "test_parameters",
    )
)
# The small model and one schedule are enough, and ten times as fast as all.
CHOSEN = "not llama and not (every_schedule and (eager or random))"
MAX_DEAD = 3
TIMEOUT_S = 600

ANOTHER_INPUT = "return Role.INPUT, self._input_name"
CACHED = 'stream = self.__dict__.setdefault("_cached", self._device.current_stream())'
ASKED = "stream = self._device.current_stream()  # design rule 6"


class Mutation(NamedTuple):
    """One rule taken out."""

    rule: int
    what: str
    file: str
    old: str
    """Must occur once in the file."""
    new: str


# fmt: off
MUTATIONS = (
    Mutation(1, "a fetched row is used without a wait", "traffic.py",
             "self._device.wait(copies.back_stream, copies.fetched)  # design rule 1",
             "pass"),
    Mutation(1, "a source goes without a fence", "traffic.py",
             "self._device.wait(copies.source_stream, copies.copied_out)",
             "pass"),
    Mutation(1, "a source is fenced on the stream that happens to be current", "traffic.py",
             "self._device.wait(copies.source_stream, copies.copied_out)",
             "self._device.wait(self._device.current_stream(), copies.copied_out)"),
    Mutation(1, "a source is let go at once", "traffic.py",
             "self._order[slot.index] = slot",
             "self._order[slot.index] = slot\n        slot.watched = slot.copies.leaving = None"),
    Mutation(1, "a fetch that was refused leaves memory that was never filled", "traffic.py",
             "back = self._device.allocate(copies.num_bytes)",
             "back = copies.back = self._device.allocate(copies.num_bytes)\n"
             "        copies.back_is_waited = True"),
    Mutation(1, "a fetch waits for no copy", "traffic.py",
             "after = (copies.last_copy,)",
             "after = ()"),
    Mutation(1, "a fetch does not wait for earlier fetches", "traffic.py",
             "after = (copies.last_copy,)",
             "after = (copies.copied_out,)"),
    Mutation(1, "a place is given back without its last copy", "traffic.py",
             "self.give_back(dead.place, dead.last_copy)",
             "self.give_back(dead.place, None)"),
    Mutation(1, "a place is given back with its evict alone", "traffic.py",
             "self.give_back(dead.place, dead.last_copy)",
             "self.give_back(dead.place, dead.copied_out)"),
    Mutation(1, "an evict does not wait for the place's last owner", "traffic.py",
             "stream=stream, after=self.tiers.events_before_reuse(place)",
             "stream=stream, after=()"),
    Mutation(1, "a place in front of the reused part forgets its last copy", "tiers.py",
             "if start < first:",
             "if False:"),
    Mutation(1, "a place behind the reused part forgets its last copy", "tiers.py",
             "if end < stop:",
             "if False:"),
    Mutation(1, "a dropped fetch goes without a fence", "traffic.py",
             "fetch still writes to.\n"
             "            try:\n"
             "                self._device.wait(copies.back_stream, copies.fetched)",
             "fetch still writes to.\n"
             "            try:\n"
             "                pass"),
    Mutation(1, "who settles does not wait on its own stream", "traffic.py",
             "self._device.wait(current, copies.copied_out)",
             "pass"),
    Mutation(1, "a write in place does not wait for the copy of its target", "tape.py",
             "self.record.traffic.settle(node.slot)",
             "pass"),
    Mutation(1, "a storage that was written to is evicted all the same", "record.py",
             "return  # it was written to since autograd saved it",
             "pass  # it was written to since autograd saved it"),
    Mutation(1, "a copy for another stream does not wait for the owner", "traffic.py",
             "self._device.wait(stream, owner)",
             "pass"),
    Mutation(1, "the owner does not wait for a copy for another stream", "traffic.py",
             "self._device.wait(owner, stream)",
             "pass"),
    Mutation(2, "a layout comes back contiguous", "identity.py",
             "view.set_(owner.untyped_storage(), self.offset, self.shape, self.stride)",
             "view.set_(owner.untyped_storage(), self.offset, self.shape, "
             "_dense_stride(self.shape))"),
    Mutation(2, "a layout comes back at offset 0", "identity.py",
             "view.set_(owner.untyped_storage(), self.offset, self.shape, self.stride)",
             "view.set_(owner.untyped_storage(), 0, self.shape, self.stride)"),
    Mutation(2, "the conjugate bit is lost", "identity.py",
             "if self.is_conj:",
             "if False:"),
    Mutation(2, "the negative bit is lost", "identity.py",
             "if self.is_neg:",
             "if False:"),
    Mutation(2, "expanded dimensions are materialised", "identity.py",
             "tuple(1 if s == 0 else n for n, s in",
             "tuple(n for n, s in"),
    Mutation(2, "a slice is taken from offset 0", "identity.py",
             "view.set_(owner.untyped_storage(), self.offset, self.compact_shape, self.stride)",
             "view.set_(owner.untyped_storage(), 0, self.compact_shape, self.stride)"),
    Mutation(2, "a slice comes back contiguous", "identity.py",
             "row.as_strided(self.compact_shape, self.stride, offset)",
             "row.as_strided(self.compact_shape, _dense_stride(self.compact_shape), offset)"),
    Mutation(2, "a slice comes back with another alignment", "identity.py",
             "offset = self.offset % (ALIGNMENT_BYTES // self.dtype.itemsize)",
             "offset = 0"),
    Mutation(3, "parameters move", "tape.py",
             'return Role.PARAMETER, "parameter"',
             ANOTHER_INPUT),
    Mutation(3, "shared tables move", "tape.py",
             'return Role.SHARED, "shared"',
             ANOTHER_INPUT),
    Mutation(3, "identity is an address", "identity.py",
             "return storage_address(tensor.untyped_storage())",
             "return tensor.untyped_storage().data_ptr()"),
    Mutation(3, "overlapping slices of a storage all move", "tape.py",
             "if 2 * sum(piece.num_bytes for piece in node.pieces) < node.num_bytes:",
             "if True:"),
    Mutation(3, "a storage that two blocks save moves twice", "traffic.py",
             "if found is not None:\n            self.tiers.give_back",
             "if False:\n            self.tiers.give_back"),
    Mutation(3, "a storage that was written to since is taken for the old one", "traffic.py",
             "or slot.version != watched._version:",
             "or False:"),
    Mutation(3, "a slot of a part of a storage serves another block", "nodes.py",
             "node.is_shared = owner",
             "node.is_shared = True or owner"),
    Mutation(3, "a slot of what is written to next serves what is saved then", "tape.py",
             "self.record.traffic.unshare(node.slot)",
             "pass"),
    Mutation(3, "one part's version stands for all of the storage's", "record.py",
             "node.watched.get(handle.number, (node.kept, 0))",
             "(node.kept, 0)"),
    Mutation(3, "a storage of which another part was written to is evicted", "record.py",
             "alias._version != version for alias, version in self.watched.values()",
             "False for _ in self.watched"),
    Mutation(3, "a write to another part of what is leaving is not noted", "traffic.py",
             "((slot.watched, slot.version), *slot.others)",
             "((slot.watched, slot.version),)"),
    Mutation(3, "recipes start from small buffers themselves", "nodes.py",
             "and self._may_be_written(node, tensor):",
             "and False:"),
    Mutation(3, "a parameter is known by a storage that it stood on before", "parameters.py",
             "return tensor if tensor is not None and _key_of(tensor) == key else None",
             "return tensor"),
    Mutation(11, "a script takes over other numbers", "follow.py",
             "return not isinstance(given, Tensor) and is_same_number(known, given)",
             "return True"),
    Mutation(11, "a script takes over the other sign of zero", "script.py",
             "return left == right and (left != 0.0 or str(left) == str(right))",
             "return left == right"),
    Mutation(11, "a script takes over other tensors", "follow.py",
             "self._nodes.by_storage.get(storage_address(tensor.untyped_storage())) is node",
             "True"),
    Mutation(11, "a script takes over other layouts", "follow.py",
             "and layout.is_of(tensor)\n        )",
             ")"),
    Mutation(11, "a script takes over other operators", "tape.py",
             "if step.func is func:",
             "if step.func is not None:"),
    Mutation(4, "handles are kept in a global list", "tape.py",
             "node.num_packs += 1",
             "node.num_packs += 1\n"
             "            torch.__dict__.setdefault(\"kept\", []).append(handle)"),
    Mutation(4, "the runtime holds the last record", "runtime.py",
             "self._restoring = weakref.ref(record)",
             "self._restoring = lambda: record"),
    Mutation(4, "the first backward uses a slot up", "record.py",
             "node.num_left = node.num_uses\n        if node.slot is not None:",
             "node.num_left = node.num_uses\n"
             "        node.slot = None\n        if node.slot is not None:"),
    Mutation(4, "one graph's backward fetches for another", "traffic.py",
             "self.forward_pass = Pass()\n        if",
             "if"),
    Mutation(4, "the second backward of a graph fetches nothing ahead", "traffic.py",
             "self._waiting = deque(self._slots)",
             "self._waiting = deque(self._slots if self._waiting is None else ())"),
    Mutation(5, "passes without gradients are recorded", "runtime.py",
             "not torch.is_grad_enabled() or torch.is_inference_mode_enabled():\n"
             "            return\n        if self._forward",
             "False:\n            return\n        if self._forward"),
    Mutation(6, "an evict is queued behind a cached stream", "traffic.py",
             f"{ASKED}\n        # Design rule 1: the place",
             f"{CACHED}\n        # Design rule 1: the place"),
    Mutation(6, "a use is queued behind a cached stream", "traffic.py",
             f"slot.is_used = True\n        copies = slot.copies\n        {ASKED}",
             f"slot.is_used = True\n        copies = slot.copies\n        {CACHED}"),
    Mutation(6, "a fetch is queued behind a cached stream", "traffic.py",
             f"{ASKED}\n        back = ",
             f"{CACHED}\n        back = "),
    Mutation(6, "memory of one stream is used on another", "traffic.py",
             "if stream != owner:",
             "if False:"),
    Mutation(7, "the host tier grows over its cap", "tiers.py",
             "num_bytes = min(num_bytes, self.host_cap_bytes)",
             "pass"),
    Mutation(7, "the host tier grows in mid-step", "tiers.py",
             "self._refused_bytes[tier] += num_bytes\n            return None",
             "self._refused_bytes[tier] += num_bytes\n"
             "            self.grow_to_demand()\n            return None"),
    Mutation(7, "what the system refused is asked for again", "tiers.py",
             "self.host_cap_bytes = self.host_bytes",
             "pass"),
    Mutation(8, "random operators run again", "ops.py",
             "kind = OpKind.RANDOM\n",
             "kind, is_replayable = OpKind.ELEMENTWISE, True\n"),
    Mutation(10, "bytes out have no bound", "traffic.py",
             "while self._leaving and self._out_bytes + num_bytes > self._max_out:",
             "while False:"),
    Mutation(10, "bytes fetched ahead have no bound", "traffic.py",
             "if self._in_bytes + slot.num_bytes > self._max_in:",
             "if False:"),
    Mutation(10, "nothing gives way to a fetch that cannot wait", "traffic.py",
             "while self._ahead and self._in_bytes + num_bytes > self._max_in:",
             "while False:"),
    Mutation(10, "the fetches of an unfinished backward are forgotten", "traffic.py",
             "while self._ahead:",
             "self._ahead.clear()\n        while self._ahead:"),
    Mutation(10, "a plan's evictions are let go at the turn", "traffic.py",
             "rank = self.anchors.call_ranks.get(group)",
             "rank = None"),
    Mutation(10, "a plan's evictions are let go a call too late", "tape.py",
             "self._policy.reach(names[position][2])",
             "pass"),
    Mutation(10, "evictions are let go in the order in which they started", "traffic.py",
             "heapq.heappush(self._releases, (rank, slot",
             "self._releases.append((rank, slot"),
    Mutation(10, "what is to stay until the turn's end goes at its start", "traffic.py",
             "self._release_up_to(self.anchors.turn_start_rank)",
             "self.settle_all()"),
    Mutation(10, "sources are held into backward", "traffic.py",
             "if self.anchors.has_releases:\n            self._settle_leaving()\n"
             "        if self.anchors.has_fetches",
             "if self.anchors.has_fetches"),
    Mutation(10, "a checked pass fetches ahead at the plan's moments", "traffic.py",
             "if forward_pass.is_checked:",
             "if False:"),
    Mutation(10, "a checked pass fetches ahead as the bytes allow", "traffic.py",
             "elif not slot.forward_pass.is_checked:",
             "else:"),
    Mutation(10, "a pass holds sources of the one before", "traffic.py",
             "self._settle_leaving()  # what an earlier pass",
             "pass  # what an earlier pass"),
    Mutation(10, "a plan's fetches start as soon as there is room", "traffic.py",
             "if slot.fetch_rank > self._reached:",
             "if False:"),
    Mutation(10, "a plan's fetches start when they are needed", "traffic.py",
             "self._reached = max(self._reached, rank)",
             "pass"),
    Mutation(10, "within a moment the first row evicted comes first", "traffic.py",
             "(slot.fetch_rank, -slot.index)",
             "(slot.fetch_rank, slot.index)"),
    Mutation(10, "a block in which a moment lies is left alone", "runtime.py",
             "return False  # a moment of the plan lies in it",
             "pass  # a moment of the plan lies in it"),
    Mutation(11, "an unknown subclass is not counted", "tape.py",
             'self._policy.keep_unknown(f"subclass {type(tensor).__name__}")',
             "pass"),
    Mutation(11, "what comes back different is not found", "record.py",
             "if not have_equal_bits(restored, tensor) or not (",
             "if not ("),
    Mutation(11, "a slice that came back different is kept as if it were whole", "record.py",
             "if node.index in self._pieces.values():",
             "if False:"),
)
# fmt: on


def mutated(project: Path, mutation: Mutation) -> str:
    """Return the text of the file that a mutation changes, changed.

    Raises:
        ValueError: The old text does not occur there exactly once.
    """
    text = (project / PACKAGE / mutation.file).read_text(encoding="utf-8")
    if text.count(mutation.old) != 1:
        raise ValueError(
            f"mutation {mutation.what!r}: its old text occurs {text.count(mutation.old)} times in "
            f"{mutation.file}, and must occur once. Bring the mutation up to date:\n{mutation.old}"
        )
    return text.replace(mutation.old, mutation.new)


def copy_project(source: Path, target: Path) -> None:
    """Copy what the tests need to run."""
    for name in ("src", "tests"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source / name, target / name, ignore=ignored)
    shutil.copy(source / "pyproject.toml", target)


def run_tests(project: Path, mutation: Mutation | None) -> tuple[str, ...]:
    """Run the tests in a copy of the project, mutated unless `mutation` is None.

    Returns:
        The tests that failed, without their parameters: the first few.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy_project(project, Path(folder))
        if mutation is not None:
            changed = Path(folder) / PACKAGE / mutation.file
            changed.write_text(mutated(project, mutation), encoding="utf-8")
        done = subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-q", "--tb=no", "-rfE"),
                *("-p", "no:cacheprovider", "-k", CHOSEN, f"--maxfail={MAX_DEAD}", *TESTS),
            ],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": f"{folder}/src", "PYTHONDONTWRITEBYTECODE": "1"},
            timeout=TIMEOUT_S,
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode not in (0, 1) or "\nERROR " in done.stdout:
        raise RuntimeError(f"the tests could not be run:\n{done.stdout}\n{done.stderr}")
    names = re.findall(r"^FAILED \S+?::(\w+)", done.stdout, flags=re.MULTILINE)
    print(f"{len(names)} failed:", "none" if mutation is None else mutation.what, file=sys.stderr)
    return tuple(dict.fromkeys(names))


def main(words: list[str]) -> int:
    """Print the table; return 1 if a mutation survived, or if the tests fail by themselves."""
    chosen = [m for m in MUTATIONS if not words or any(word in m.what for word in words)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as threads:
        # One copy for all, so that an edit in the meantime changes nothing.
        copy_project(ROOT, Path(folder))
        for mutation in chosen:
            mutated(Path(folder), mutation)  # so that an outdated one fails at once
        control, *dead = threads.map(partial(run_tests, Path(folder)), [None, *chosen])
    if control:
        print("the tests fail without a mutation:", *control)
        return 1
    print("| rule | mutation | tests that died |\n| --- | --- | --- |")
    for mutation, names in zip(chosen, dead, strict=True):
        died = ", ".join(f"`{name}`" for name in names) or "**none: it survived**"
        print(f"| {mutation.rule} | {mutation.what} | {died} |")
    num_killed = sum(1 for names in dead if names)
    print(f"\n{num_killed} of {len(chosen)} mutations were killed.")
    return 0 if num_killed == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
