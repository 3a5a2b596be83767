"""Every wait of the runtime, what it waits for, and the test that dies when it is taken out.

Run it with `python -m tests.torch.waits`; with words, only waits whose description has one of
them. Each wait is taken out of a copy of the source, and the tests named for it are run there:
one of them must fail. It prints the table of `docs/lifetimes.md`, and exits with 1 if a wait was
missed by nobody. It takes minutes, so pytest does not collect it; `test_waits` compares the table
with the source and with the document.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.torch.mutations import PACKAGE, ROOT, TIMEOUT_S, Mutation, copy_project, mutated

TRAFFIC = "tests/torch/test_traffic.py"
ANCHORS = "tests/torch/test_anchors.py"
RULES = "tests/torch/test_rules.py"
RECORD = "tests/torch/test_record.py"
TRAPS = "tests/torch/test_traps.py"
TIERS = "tests/torch/test_tiers.py"
CPU = "tests/torch/devices/test_cpu.py"
CUDA = "tests/torch/devices/test_cuda.py"
PINNED = "tests/torch/devices/test_pinned.py"
DISK = "tests/memory/test_disk.py"
FOLDERS = "tests/memory/test_disk_folders.py"
SANITIZER = "tests/torch/test_sanitizer.py"

COULD_NOT_RUN = 70
"""Exit code of a child in which pytest itself failed."""


class Wait(NamedTuple):
    """One wait."""

    rule: int
    where: str
    """The function that waits."""
    what: str
    """Who waits for what."""
    file: str
    """Under `src/ebbtide/torch`."""
    old: str
    """Must occur once in the file."""
    new: str
    dies: str
    """The test that fails without it."""


WAITS = (
    Wait(
        1,
        "Traffic.evict",
        "an evict, for the copies of the last owner of its place",
        "traffic.py",
        "stream=stream, after=self.tiers.events_before_reuse(place)",
        "stream=stream, after=()",
        f"{TRAFFIC}::test_any_order_of_calls_on_any_streams_gives_the_right_bytes",
    ),
    Wait(
        6,
        "Traffic.evict",
        "an evict, for what made its source on the stream that is current then",
        "traffic.py",
        "                source, place, stream=stream, after=self.tiers",
        '                source, place, stream="another", after=self.tiers',
        f"{TRAFFIC}::test_an_evict_is_queued_behind_the_stream_that_is_current_then",
    ),
    Wait(
        10,
        "Traffic.evict",
        "an evict, until there is room in what may be in flight",
        "traffic.py",
        "while self._leaving and self._out_bytes + num_bytes > self._max_out:",
        "while False:",
        f"{TRAFFIC}::test_bytes_out_never_exceed_the_bound",
    ),
    Wait(
        1,
        "Traffic._await_back",
        "compute, for the fetch of what it reads",
        "traffic.py",
        "self._device.wait(copies.back_stream, copies.fetched)  # design rule 1",
        "pass",
        f"{TRAFFIC}::test_a_row_comes_back_with_its_bytes",
    ),
    Wait(
        1,
        "Traffic._fetch",
        "a fetch, for its evict and for earlier fetches",
        "traffic.py",
        "after = (copies.last_copy,)",
        "after = ()",
        f"{TRAFFIC}::test_any_order_of_calls_on_any_streams_gives_the_right_bytes",
    ),
    Wait(
        1,
        "Traffic._fetch",
        "a fetch, for earlier fetches, so that who gets the place waits for all",
        "traffic.py",
        "after = (copies.last_copy,)",
        "after = (copies.copied_out,)",
        f"{TRAFFIC}::test_a_place_waits_for_every_fetch_of_its_last_owner",
    ),
    Wait(
        6,
        "Traffic._fetch",
        "a fetch, for the last owner of the memory that it writes to",
        "traffic.py",
        "self._device.copy(copies.place, back, stream=stream, after=after)",
        'self._device.copy(copies.place, back, stream="another", after=after)',
        f"{TRAFFIC}::test_a_fetch_is_ready_on_the_stream_that_asked_for_it",
    ),
    Wait(
        1,
        "Traffic._fence_leaving",
        "the owner of an evicted source, before its memory is let go",
        "traffic.py",
        "self._device.wait(copies.source_stream, copies.copied_out)",
        "pass",
        f"{TRAFFIC}::test_a_source_is_held_until_it_settles_and_not_longer",
    ),
    Wait(
        1,
        "Traffic._fence_back",
        "the owner of what a fetch still writes to, before it is dropped",
        "traffic.py",
        "fetch still writes to.\n            try:\n"
        "                self._device.wait(copies.back_stream, copies.fetched)",
        "fetch still writes to.\n            try:\n                pass",
        f"{TRAFFIC}::test_a_slot_that_dies_gives_everything_back_in_each_life",
    ),
    Wait(
        1,
        "Traffic.settle",
        "whoever settles from another stream, for the copy",
        "traffic.py",
        "self._device.wait(current, copies.copied_out)",
        "pass",
        f"{TRAFFIC}::test_a_settled_row_may_be_written_to_on_any_stream",
    ),
    Wait(
        6,
        "Traffic._copy_across",
        "who reads another stream's memory, for its owner",
        "traffic.py",
        "self._device.wait(stream, owner)",
        "pass",
        f"{TRAFFIC}::test_a_leaving_row_is_copied_for_another_stream",
    ),
    Wait(
        6,
        "Traffic._copy_across",
        "the owner of memory, for who read it on another stream",
        "traffic.py",
        "self._device.wait(owner, stream)",
        "pass",
        f"{TRAFFIC}::test_a_row_fetched_for_one_stream_is_copied_for_another",
    ),
    Wait(
        1,
        "Traffic.bury",
        "who gets a dead slot's place, for the slot's last copy",
        "traffic.py",
        "self.give_back(dead.place, dead.last_copy)",
        "self.give_back(dead.place, None)",
        f"{TRAFFIC}::test_any_order_of_calls_on_any_streams_gives_the_right_bytes",
    ),
    Wait(
        1,
        "Traffic.bury",
        "the owner of a dead slot's source, for its evict",
        "traffic.py",
        "if dead.leaving is not None and dead.lost is None:",
        "if False:",
        f"{TRAFFIC}::test_a_slot_that_dies_gives_everything_back_in_each_life",
    ),
    Wait(
        1,
        "Traffic.bury",
        "the owner of a dead slot's fetched copy, for its fetch",
        "traffic.py",
        "                self._fence_back(dead)\n",
        "                pass\n",
        f"{TRAFFIC}::test_a_slot_that_dies_gives_everything_back_in_each_life",
    ),
    Wait(
        1,
        "Traffic.release",
        "a slot that is let go while it leaves, for its evict",
        "traffic.py",
        "        self.settle(slot)\n        copies = slot.copies\n        if copies.back is not",
        "        copies = slot.copies\n        if copies.back is not",
        f"{RECORD}::test_a_check_brings_what_was_evicted_the_whole_way",
    ),
    Wait(
        10,
        "Traffic.start_turn",
        "the turn, for all evicts: the logits' peak comes next",
        "traffic.py",
        "        else:\n            self.settle_all()\n        if self._trim",
        "        if self._trim",
        f"{RULES}::test_sources_are_held_until_their_copies_passed_and_no_longer",
    ),
    Wait(
        10,
        "Traffic.start_turn",
        "the turn, for what the plan lets go before it",
        "traffic.py",
        "            self._release_up_to(self.anchors.turn_start_rank)\n",
        "",
        f"{ANCHORS}::test_a_source_is_let_go_on_the_side_of_the_turn_that_its_plan_names",
    ),
    Wait(
        10,
        "Traffic.start_pass",
        "a forward, for what the one before was to hold",
        "traffic.py",
        "self._settle_leaving()  # what an earlier pass",
        "pass  # what an earlier pass",
        f"{ANCHORS}::test_the_next_pass_holds_no_source_of_the_one_before",
    ),
    Wait(
        10,
        "Traffic.start_backward",
        "backward, for what was held until the turn's end",
        "traffic.py",
        "if self.anchors.has_releases:\n            self._settle_leaving()\n"
        "        if self.anchors.has_fetches",
        "if self.anchors.has_fetches",
        f"{ANCHORS}::test_a_source_is_let_go_on_the_side_of_the_turn_that_its_plan_names",
    ),
    Wait(
        10,
        "Traffic.reach_call",
        "a call, for what its plan lets go before it",
        "traffic.py",
        "            self._release_up_to(rank)\n",
        "            pass\n",
        f"{ANCHORS}::test_a_row_is_let_go_at_its_moment_whatever_the_order_of_eviction",
    ),
    Wait(
        10,
        "Traffic._drop_ahead",
        "the turn, for fetches of a backward that stopped half-way",
        "traffic.py",
        "        while self._ahead:\n            self._drop_farthest()",
        "        self._ahead.clear()",
        f"{TRAFFIC}::test_the_bound_holds_when_a_backward_stopped_half_way",
    ),
    Wait(
        1,
        "Tape._part_with",
        "a write in place, for the copy of what it overwrites",
        "tape.py",
        "self.record.traffic.settle(node.slot)",
        "pass",
        f"{RULES}::test_a_write_in_place_waits_for_the_copy_of_what_it_overwrites",
    ),
    Wait(
        11,
        "Record.evict",
        "a checked block, for each evict: no later write may reach its copy",
        "record.py",
        "            self.traffic.settle(node.slot)",
        "            pass",
        f"{TRAPS}::test_an_unseen_write_is_found_however_late_its_copy_would_run",
    ),
    Wait(
        11,
        "Record._comes_back",
        "a check, for the whole way of what was evicted",
        "record.py",
        "            self.traffic.release(node.slot)  # so that",
        "            pass  # so that",
        f"{RECORD}::test_a_check_brings_what_was_evicted_the_whole_way",
    ),
    Wait(
        1,
        "Tiers.give_back",
        "the next owner of a place, for the last copy of this one",
        "tiers.py",
        "        if last_copy is not None:",
        "        if False:",
        f"{TIERS}::test_the_next_owner_waits_for_the_last_copy_and_the_one_after_does_not",
    ),
    Wait(
        1,
        "Tiers.events_before_reuse",
        "the owner of a place in front of one that is reused",
        "tiers.py",
        "if start < first:",
        "if False:",
        f"{TIERS}::test_an_event_is_split_among_the_owners_of_its_parts",
    ),
    Wait(
        1,
        "Tiers.events_before_reuse",
        "the owner of a place behind one that is reused",
        "tiers.py",
        "if end < stop:",
        "if False:",
        f"{TIERS}::test_an_event_is_split_among_the_owners_of_its_parts",
    ),
    Wait(
        7,
        "HostRegion.close",
        "memory that goes back to the system, for the device",
        "tiers.py",
        "        self._unpin()\n",
        "        pass\n",
        f"{TRAFFIC}::test_close_gives_the_host_memory_back_behind_the_copies",
    ),
    Wait(
        7,
        "CudaDriver.unregister",
        "pages that are unpinned, for all copies of the device",
        "devices/pinned.py",
        "        torch.cuda.synchronize(self._device)\n",
        "",
        f"{PINNED}::test_copies_of_the_device_pass_before_its_pages_are_unpinned",
    ),
    Wait(
        1,
        "CpuDevice.wait",
        "compute, for a copy on a thread",
        "devices/cpu.py",
        "        error = event.exception()\n",
        "        error = event.exception() if is_done else None\n",
        f"{CPU}::test_an_evict_does_not_block_and_a_wait_does",
    ),
    Wait(
        1,
        "CpuDevice.copy",
        "a fetch from disk, for the evict to it",
        "devices/cpu.py",
        "        for event in after:\n            self.wait(stream, event)\n",
        "",
        f"{CPU}::test_a_fetch_waits_for_its_evict",
    ),
    Wait(
        1,
        "CpuDevice.copy",
        "an evict to disk, for the copies of the place's last owner",
        "devices/cpu.py",
        "            futures.wait([event for event in after if isinstance(event, Future)])\n",
        "",
        f"{CPU}::test_an_evict_waits_for_the_copies_of_the_last_owner_of_its_place",
    ),
    Wait(
        1,
        "DiskStore",
        "the end of a copy, for every request that it is made of",
        "../memory/disk.py",
        "            if self._num_left:\n                return",
        "            if self.future.done():\n                return",
        f"{FOLDERS}::test_a_folder_that_fails_is_named_and_the_buffer_is_held_until_all_parts_are_done",
    ),
    Wait(
        1,
        "DiskStore.close",
        "a store that closes its files, for requests that run",
        "../memory/disk.py",
        "self._threads.shutdown(wait=True)",
        "self._threads.shutdown(wait=False)",
        f"{DISK}::test_closing_waits_for_copies_that_run_and_fails_those_that_wait",
    ),
    Wait(
        1,
        "Sanitizer._poison_place",
        "poison for a dead place, for the place's last copy",
        "sanitizer.py",
        "event = device.copy(row, place, stream=stream, after=(last_copy,))",
        "event = device.copy(row, place, stream=stream, after=())",
        f"{SANITIZER}::test_poison_waits_for_the_copies_of_another_stream",
    ),
    Wait(
        1,
        "Sanitizer._let_poison_go",
        "rows of poison, for the copies that read them",
        "sanitizer.py",
        "            traffic.device.wait(stream, event)\n",
        "",
        f"{SANITIZER}::test_a_correct_runtime_passes_and_no_bit_changes",
    ),
)


def dies(project: Path, wait: Wait) -> bool:
    """Return whether the test of a wait fails in a copy of the project without that wait.

    Raises:
        RuntimeError: It could not be run.
    """
    mutation = Mutation(wait.rule, wait.what, wait.file, wait.old, wait.new)
    with tempfile.TemporaryDirectory() as folder:
        copy_project(project, Path(folder))
        changed = Path(folder) / PACKAGE / wait.file
        changed.write_text(mutated(project, mutation), encoding="utf-8")
        has_failed = fails(Path(folder), (wait.dies,))
    print("died:" if has_failed else "SURVIVED:", wait.what, file=sys.stderr)
    return has_failed


def fails(project: Path, tests: tuple[str, ...]) -> bool:
    """Run tests in a copy of the project, and return whether one of them fails.

    In a fork: importing torch takes longer than most of these tests.
    """
    child = multiprocessing.get_context("fork").Process(target=_run_tests, args=(project, tests))
    child.start()
    child.join(TIMEOUT_S)
    if child.exitcode not in (0, 1):
        child.kill()
        raise RuntimeError(f"the tests could not be run, exit code {child.exitcode}: {tests}")
    return child.exitcode == 1


def _run_tests(project: Path, tests: tuple[str, ...]) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] in ("tests", "ebbtide")]:
        del sys.modules[name]
    os.chdir(project)
    sys.path[:0] = [str(project / "src"), str(project)]
    sys.dont_write_bytecode = True
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    options = ("-q", "--tb=no", "-x", "-p", "no:cacheprovider")
    code = COULD_NOT_RUN
    try:
        code = int(pytest.main([*options, *tests]))
    finally:
        os._exit(code)


def row_of(wait: Wait) -> str:
    """Return a wait's line in the table of `docs/lifetimes.md`."""
    test = wait.dies.rpartition("::")[2]
    return f"| {wait.rule} | `{wait.where}` | {wait.what} | `{test}` |"


def main(words: list[str]) -> int:
    """Print the table; return 1 if a wait was missed by nobody, or if tests fail by themselves."""
    chosen = [w for w in WAITS if not words or any(word in w.what + w.where for word in words)]
    print("with torch", torch.__version__)
    with tempfile.TemporaryDirectory() as folder:
        copy_project(ROOT, Path(folder))
        if fails(Path(folder), tuple(dict.fromkeys(wait.dies for wait in chosen))):
            print("the tests fail with every wait in its place")
            return 1
        dead = [dies(Path(folder), wait) for wait in chosen]
    print("| rule | where | who waits, and for what | test that dies |\n| --- | --- | --- | --- |")
    for wait, has_died in zip(chosen, dead, strict=True):
        print(row_of(wait), "" if has_died else "**it survived**")
    print(f"\n{sum(dead)} of {len(chosen)} waits were missed when they were taken out.")
    return 0 if all(dead) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
