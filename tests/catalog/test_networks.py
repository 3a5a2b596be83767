"""How fast ranks reach one another, worked out by hand for domains of 8."""

import pytest

from ebbtide.catalog.accelerators import ACCELERATORS
from ebbtide.catalog.machines import MACHINES
from ebbtide.catalog.networks import INNER_SHARE, NETWORKS, OUTER_SHARE, Dimension, Network

NETWORK = Network(
    domain=8, inner_bytes_per_s=400 * 10**9, outer_bytes_per_s=50 * 10**9, source="invented"
)
INNER, OUTER = 400 * INNER_SHARE, 50 * OUTER_SHARE


def group(*sizes: tuple[int, int]) -> list[Dimension]:
    return [Dimension(stride=stride, size=size) for stride, size in sizes]


@pytest.mark.parametrize(
    ("ranks", "ring", "exchange"),
    [
        # All in one domain.
        (group((1, 8)), INNER, INNER),
        (group((1, 4), (4, 2)), INNER, INNER),
        # 16 ranks next to each other: 8 cards share a ring; of 15 others 8 are far.
        (group((1, 16)), INNER, OUTER * 15 / 8),
        # Every fourth device: 2 in a domain.
        (group((4, 8)), 2 * OUTER, OUTER * 7 / 6),
        # One in each domain.
        (group((8, 4)), OUTER, OUTER),
        (group((1, 2), (8, 4)), 2 * OUTER, OUTER * 7 / 6),
    ],
)
def test_what_leaves_a_domain_goes_through_the_cards_of_those_in_it(
    ranks: list[Dimension], ring: float, exchange: float
) -> None:
    assert NETWORK.ring_bytes_per_ns(ranks) == pytest.approx(ring)
    assert NETWORK.exchange_bytes_per_ns(ranks) == pytest.approx(exchange)


def test_cards_never_make_a_ring_faster_than_the_links_within() -> None:
    assert 8 * OUTER > INNER
    assert NETWORK.ring_bytes_per_ns(group((1, 64))) == INNER


def test_every_machine_has_a_network_and_its_source() -> None:
    assert set(NETWORKS) == set(MACHINES) == set(ACCELERATORS)
    for network in NETWORKS.values():
        assert network.source.endswith(".")
        assert network.inner_bytes_per_s >= network.outer_bytes_per_s
    # 900 GB/s of an H100's NVLink and 1.8 TB/s of a GB200's are totals of both directions.
    assert NETWORKS["h100-pcie5"].inner_bytes_per_s == 450 * 10**9
    assert NETWORKS["gb200-nvl72"].inner_bytes_per_s == 900 * 10**9
