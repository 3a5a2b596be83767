"""The prices of a scan's stack: what keeping a value costs, and what moving it does."""

from dataclasses import replace

from ebbtide.catalog.machines import find_machine
from ebbtide.jax.stacking import charge_moves, kept_ns_per_gib

GIB = 2**30
# What a sum of two large arrays reaches of the data sheet's 4.8e12.
H200_BYTES_PER_S = 4.1e12


def test_an_h200_pays_what_was_timed_there() -> None:
    kept_ns = kept_ns_per_gib(H200_BYTES_PER_S)
    assert 2_000_000 < kept_ns < 3_000_000
    machine = charge_moves(find_machine("h200-pcie5"), H200_BYTES_PER_S)
    slowed_ns = machine.slow_ns(GIB, machine.out_bytes_per_s)
    slowed_ns += machine.slow_ns(GIB, machine.in_bytes_per_s)
    assert 6_500_000 < kept_ns + slowed_ns < 7_500_000


def test_a_machine_is_never_charged_less_than_it_says_nor_more_than_its_copies_take() -> None:
    machine = replace(find_machine("h200-pcie5"), slowdown_ppm=400_000)
    assert charge_moves(machine, H200_BYTES_PER_S) == machine
    assert charge_moves(machine, 1e9).slowdown_ppm == 1_000_000


def test_a_machine_without_a_link_moves_nothing_and_pays_nothing() -> None:
    machine = replace(find_machine("h200-pcie5"), host_bytes=0, out_bytes_per_s=0, in_bytes_per_s=0)
    assert charge_moves(machine, 1e9) == machine
