"""Pages for a driver to pin: what Linux says of them, and what a forked process sees."""

import gc
import mmap
import os
import sys
import weakref
from pathlib import Path

import pytest

from ebbtide.memory.pages import HostPages, Mapping, PageWishes, read_mapping

MIB = 2**20

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux says of its mappings")


def status_of_child(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@linux
def test_pages_are_huge_and_hidden_from_forks() -> None:
    pages = HostPages(8 * MIB)
    assert pages.wishes == PageWishes(
        takes_huge_pages=True, is_hidden_from_forks=True, numa_node=None
    )
    mapping = read_mapping(pages.address)
    assert mapping is not None
    assert {"hg", "dc"} <= mapping.flags
    # Private, so that they are no shared memory, and not touched by mapping them.
    assert "sh" not in mapping.flags
    assert mapping.resident_bytes < 8 * MIB


@linux
def test_touched_pages_are_resident_and_go_when_they_are_discarded() -> None:
    pages = HostPages(8 * MIB)
    pages.memory[:] = b"\x01" * (8 * MIB)
    full = read_mapping(pages.address)
    assert full is not None and full.resident_bytes >= 8 * MIB
    view = memoryview(pages.memory)
    pages.discard()
    empty = read_mapping(pages.address)
    assert empty is not None and empty.resident_bytes <= full.resident_bytes - 8 * MIB
    assert view[0] == 0


@linux
def test_a_forked_process_does_not_see_the_mapping() -> None:
    pages = HostPages(4 * MIB)
    assert read_mapping(pages.address) is not None
    child = os.fork()
    if child == 0:
        os._exit(7 if read_mapping(pages.address) is None else 1)
    assert status_of_child(child) == 7


@linux
def test_a_forked_process_never_unmaps_what_it_did_not_map() -> None:
    """Its addresses are free there, and may be somebody else's by the time the pages die."""
    pages = HostPages(4 * MIB)
    memory = weakref.ref(pages.memory)
    child = os.fork()
    if child == 0:
        del pages
        gc.collect()
        os._exit(7 if memory() is not None else 1)
    assert status_of_child(child) == 7
    del pages
    assert memory() is None


@linux
def test_pages_go_back_with_their_last_user() -> None:
    pages = HostPages(4 * MIB)
    address, view = pages.address, memoryview(pages.memory)
    del pages
    assert read_mapping(address) is not None
    view[0] = 1
    view.release()
    del view
    mapping = read_mapping(address)
    assert mapping is None or "hg" not in mapping.flags


@linux
def test_more_than_there_is_is_refused_in_the_words_of_the_system() -> None:
    with pytest.raises(OSError, match="Cannot allocate memory"):
        HostPages(2**47)


@pytest.mark.parametrize("num_bytes", [0, -1])
def test_no_bytes_are_refused(num_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"num_bytes is {num_bytes}; it must be 1 or more"):
        HostPages(num_bytes)


@linux
def test_a_system_without_such_advice_gives_ordinary_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 250)
    monkeypatch.setattr(mmap, "MADV_DONTFORK", 251)
    pages = HostPages(4 * MIB)
    assert pages.wishes == PageWishes(
        takes_huge_pages=False, is_hidden_from_forks=False, numa_node=None
    )
    pages.memory[4 * MIB - 1] = 3
    mapping = read_mapping(pages.address)
    assert mapping is not None and not {"hg", "dc"} & mapping.flags


def test_a_mapping_is_found_by_an_address_inside_it(tmp_path: Path) -> None:
    smaps = tmp_path / "smaps"
    smaps.write_text(
        "1000-3000 rw-p 00000000 00:00 0 [heap]\n"
        "Rss:                   8 kB\n"
        "AnonHugePages:         0 kB\n"
        "VmFlags: rd wr mr mw me ac\n"
        "7f0000000000-7f0000400000 rw-p 00000000 00:00 0 \n"
        "Size:               4096 kB\n"
        "Rss:                2052 kB\n"
        "AnonHugePages:      2048 kB\n"
        "VmFlags: rd wr mr mw me dc ac hg\n"
    )
    assert read_mapping(0x7F0000000000, smaps) == Mapping(
        flags=frozenset({"rd", "wr", "mr", "mw", "me", "dc", "ac", "hg"}),
        resident_bytes=2052 * 1024,
        huge_bytes=2048 * 1024,
    )
    assert read_mapping(0x2FFF, smaps) == Mapping(
        flags=frozenset({"rd", "wr", "mr", "mw", "me", "ac"}), resident_bytes=8192, huge_bytes=0
    )
    assert read_mapping(0x3000, smaps) is None
    assert read_mapping(0x1000, tmp_path / "none") is None
