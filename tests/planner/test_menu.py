"""The menu against brute force over all sets of calls, and by hand."""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import combinations, pairwise

import pytest

from ebbtide.block import Activation, BackwardEvent, Block, OpKind
from ebbtide.plan import Decision
from ebbtide.planner.chain import BlockClass, compile_chain
from ebbtide.planner.menu import NEAR_HULL_SHARE, Option, make_menu, make_option
from ebbtide.workload import Outside, Workload
from tests.corpus import CORPUS
from tests.planner.exhaustive import random_workload

KEEP, HOST, DISK, RECOMPUTE = Decision.KEEP, Decision.HOST, Decision.DISK, Decision.RECOMPUTE

OUTSIDE = Outside(resident_bytes=0, turn_bytes=0, turn_ns=0, ends_bytes=0, ends_ns=0)


def made(
    name: str,
    num_bytes: int,
    make_ns: int,
    *inputs: str,
    is_saved: bool = True,
    group: str | None = None,
) -> Activation:
    """An activation; the input of its block if it reads nothing."""
    return Activation(
        name=name,
        op="aten.mm",
        kind=OpKind.MATMUL if inputs else OpKind.INPUT,
        num_bytes=num_bytes,
        inputs=inputs,
        is_saved=is_saved,
        is_replayable=bool(inputs),
        group=group or name,
        make_ns=make_ns,
    )


def compiled(*activations: Activation, pins: Mapping[str, Decision] | None = None) -> BlockClass:
    saved = tuple(activation.name for activation in activations if activation.is_saved)
    block = Block(
        name="b",
        class_name="Layer",
        activations=activations,
        backward=(BackwardEvent(uses=saved, compute_ns=1, held_bytes=0),),
    )
    workload = Workload(model="Model", blocks=(block,), outside=OUTSIDE)
    return compile_chain(workload, pins).classes[0]


def corners(menu: tuple[Option, ...]) -> list[tuple[int, int]]:
    return [(option.num_bytes, option.replay_ns) for option in menu]


# By hand.


def stacked(block: BlockClass, *store_ns: int) -> BlockClass:
    return replace(block, store_ns=store_ns)


def test_what_costs_more_to_store_than_to_make_is_stored_by_the_first_option_alone() -> None:
    # Storing y costs 5 ns and making it 3; storing h costs 4 and making it 10.
    plain = compiled(made("x", 2, 0), made("h", 20, 10, "x"), made("y", 30, 3, "h"))
    block = stacked(plain, 1, 4, 5)
    menu = make_menu(block)
    assert [(o.num_bytes, o.replay_ns, o.store_ns) for o in menu] == [
        (52, 0, 10),
        (22, 3, 5),
        (2, 13, 1),
    ]
    assert [option.spent_ns for option in menu] == [10, 8, 14]


def test_random_menus_with_stores_that_cost_have_the_fastest_of_all_options() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        plain = compile_chain(random_workload(rng, 1, 6)).classes[0]
        rate = rng.randint(1, 9)
        block = stacked(plain, *(rate * num_bytes for num_bytes in plain.num_bytes))
        assert min(option.spent_ns for option in make_menu(block)) <= min(
            option.spent_ns for option in all_options(block)
        ), seed


def test_an_option_for_each_price_of_a_byte() -> None:
    # y frees 30 bytes for 3 ns, h 20 for 10; x cannot be made again.
    block = compiled(made("x", 10, 0), made("h", 20, 10, "x"), made("y", 30, 3, "h"))
    menu = make_menu(block)
    assert corners(menu) == [(60, 0), (30, 3), (10, 13)]
    assert [option.stored for option in menu] == [{0, 1, 2}, {0, 1}, {0}]
    assert [option.replayed for option in menu] == [set(), {2}, {1, 2}]


def test_an_option_above_the_line_between_its_neighbours_is_left_out() -> None:
    # Dropping the small h alone, 2 bytes for 10 ns, is never on the hull: 1 + 2 is both.
    block = compiled(made("x", 10, 0), made("h", 2, 10, "x"), made("y", 30, 3, "x"))
    assert corners(make_menu(block)) == [(42, 0), (12, 3), (10, 13)]


def test_a_call_with_two_outputs_is_paid_once() -> None:
    block = compiled(
        made("x", 10, 0),
        made("out", 20, 8, "x", group="attention"),
        made("lse", 4, 8, "x", group="attention"),
    )
    menu = make_menu(block)
    assert corners(menu) == [(34, 0), (10, 8)]
    assert menu[1].replayed == {1}


def test_what_no_one_saves_is_stored_where_that_is_less() -> None:
    # Wide y is made from thin t, which is not saved and cannot be had from x for less than 100 ns.
    block = compiled(
        made("x", 10, 0, is_saved=False),
        made("t", 5, 100, "x", is_saved=False),
        made("y", 50, 3, "t"),
    )
    menu = make_menu(block)
    assert corners(menu) == [(50, 0), (5, 3)]
    assert [option.stored for option in menu] == [{2}, {1}]


def test_a_root_of_several_replays_is_stored_once() -> None:
    # x is not saved: storing it frees y and z together, and costs more than it frees for one.
    block = compiled(made("x", 30, 0, is_saved=False), made("y", 20, 2, "x"), made("z", 20, 3, "x"))
    menu = make_menu(block)
    assert corners(menu) == [(40, 0), (30, 5)]
    assert menu[1].stored == {0}


def test_calls_of_one_price_make_a_step_each() -> None:
    # 1 ns a byte for each: between all and nothing lie the two that drop one more.
    block = compiled(
        made("x", 10, 0), made("a", 5, 5, "x"), made("b", 7, 7, "x"), made("c", 9, 9, "x")
    )
    assert corners(make_menu(block)) == [(31, 0), (26, 5), (19, 12), (10, 21)]


def test_the_first_option_stores_all_that_autograd_saves() -> None:
    # y takes no time to make, and is dropped by every option but the first.
    block = compiled(made("x", 10, 0), made("y", 30, 0, "x"), made("z", 20, 2, "x"))
    menu = make_menu(block)
    assert corners(menu) == [(60, 0), (30, 0), (10, 2)]
    assert menu[0].stored == {0, 1, 2}


def test_no_option_is_there_twice() -> None:
    block = compiled(made("x", 4, 0), made("y", 3, 0, "x"))
    assert corners(make_menu(block)) == [(7, 0), (4, 0)]


def test_a_block_without_a_choice_has_one_option() -> None:
    assert corners(make_menu(compiled(made("x", 10, 0)))) == [(10, 0)]
    # Making y again would store x, which is more.
    wide = compiled(made("x", 40, 0, is_saved=False), made("y", 30, 3, "x"))
    assert corners(make_menu(wide)) == [(30, 0)]


@pytest.mark.parametrize("pin", [KEEP, HOST, DISK])
def test_what_is_pinned_to_a_tier_is_never_replayed(pin: Decision) -> None:
    activations = made("x", 10, 0), made("h", 20, 10, "x"), made("y", 30, 3, "h")
    menu = make_menu(compiled(*activations, pins={"y": pin}))
    assert corners(menu) == [(60, 0), (40, 10)]
    assert all(2 in option.stored for option in menu)


def test_what_is_pinned_to_recompute_is_always_replayed() -> None:
    activations = made("x", 10, 0), made("h", 20, 10, "x"), made("y", 30, 3, "h")
    menu = make_menu(compiled(*activations, pins={"h": RECOMPUTE}))
    assert corners(menu) == [(40, 10), (10, 13)]


# Against brute force.


def all_options(block: BlockClass) -> list[Option]:
    """Every set of calls that may run again, and that the pins allow."""
    tiers = {KEEP, HOST, DISK}
    free = [
        number
        for number, call in enumerate(block.calls)
        if call.is_replayable and not tiers & {block.pins[i] for i in call.outputs}
    ]
    options = [
        make_option(block, frozenset(chosen))
        for count in range(len(free) + 1)
        for chosen in combinations(free, count)
    ]
    return [o for o in options if all(block.pins[i] is not RECOMPUTE for i in o.stored)]


def best_points(options: list[Option]) -> list[tuple[int, int]]:
    """(bytes, ns) of the options that no other one beats in both, from fewest bytes on."""
    best: list[tuple[int, int]] = []
    for size, ns in sorted({(option.num_bytes, option.replay_ns) for option in options}):
        if not best or ns < best[-1][1]:
            best.append((size, ns))
    return best


def hull_weights(points: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Weights (of time, of bytes) for which some corner of the points' hull is the least."""
    pairs = combinations(points, 2)
    return [(0, 1), (1, 0), *((more - size, ns - less) for (size, ns), (more, less) in pairs)]


def is_hull(menu: tuple[Option, ...], options: list[Option]) -> bool:
    points, chosen = best_points(options), corners(menu)
    return all(
        min(time * ns + price * size for size, ns in points)
        == min(time * ns + price * size for size, ns in chosen)
        for time, price in hull_weights(points)
    )


def random_class(seed: int, pinned: Callable[[Activation], bool] | None = None) -> BlockClass:
    """A block of up to 8 activations; of those that `pinned` names, some are pinned.

    The outputs of one call are all pinned to tiers, or all to being made again.
    """
    rng = random.Random(seed)
    workload = random_workload(rng, 1, rng.randint(1, 8))
    pins: dict[str, Decision] = {}
    runs_again: dict[str, bool] = {}
    for activation in workload.blocks[0].activations:
        is_replayable = activation.is_replayable
        again = runs_again.setdefault(activation.group, is_replayable and rng.random() < 0.4)
        if pinned is not None and pinned(activation) and rng.random() < 0.4:
            pins[activation.name] = RECOMPUTE if again else rng.choice((KEEP, HOST, DISK))
    return compile_chain(workload, pins).classes[0]


def test_every_corner_of_the_hull_is_on_the_menu() -> None:
    for seed in range(90):
        block = random_class(seed)
        assert is_hull(make_menu(block), all_options(block)), (seed, block)


def test_every_corner_that_pins_allow_is_on_the_menu() -> None:
    for seed in range(90):
        block = random_class(seed, pinned=lambda activation: activation.is_saved)
        assert is_hull(make_menu(block), all_options(block)), (seed, block)


def test_a_pin_on_what_nothing_needs_changes_no_choice() -> None:
    # t is made from y and needed by nothing, so it is never made again, whatever is decided.
    activations = (
        made("x", 10, 0),
        made("y", 30, 3, "x"),
        made("t", 5, 100, "y", is_saved=False),
        made("z", 20, 2, "x"),
    )
    free = make_menu(compiled(*activations))
    assert corners(free) == [(60, 0), (30, 3), (10, 5)]
    assert corners(make_menu(compiled(*activations, pins={"t": RECOMPUTE}))) == corners(free)


def test_a_pin_on_what_is_not_saved_leaves_its_sibling_alone() -> None:
    # One call makes t, which only z reads, and y, which autograd saves.
    activations = (
        made("x", 10, 0),
        made("t", 5, 4, "x", is_saved=False, group="call"),
        made("y", 30, 4, "x", group="call"),
        made("z", 20, 2, "t"),
    )
    free = make_menu(compiled(*activations))
    assert corners(free) == [(60, 0), (10, 6)]
    assert corners(make_menu(compiled(*activations, pins={"t": RECOMPUTE}))) == corners(free)


def test_every_corner_is_there_whatever_is_pinned() -> None:
    for seed in range(120):
        block = random_class(seed, pinned=lambda activation: True)
        assert is_hull(make_menu(block), all_options(block)), (seed, block)


def replays(block: BlockClass, stored: frozenset[int]) -> tuple[set[int], set[int]]:
    """What backward needs and which calls run again, from `stored` alone."""
    needed = {i for i, is_saved in enumerate(block.is_saved) if is_saved}
    run: set[int] = set()
    for number in reversed(range(len(block.calls))):
        if any(i in needed and i not in stored for i in block.calls[number].outputs):
            run.add(number)
            needed.update(block.calls[number].inputs)
    return needed, run


@pytest.mark.parametrize("is_pinned", [False, True])
def test_an_option_has_the_bytes_and_times_of_what_it_stores(is_pinned: bool) -> None:
    for seed in range(60):
        block = random_class(seed, pinned=(lambda a: a.is_saved) if is_pinned else None)
        for option in make_menu(block):
            needed, run = replays(block, option.stored)
            assert option.replayed == run
            assert option.stored <= needed
            assert option.num_bytes == sum(block.num_bytes[i] for i in option.stored)
            assert option.replay_ns == sum(block.calls[n].make_ns for n in run)
            assert all(block.calls[n].is_replayable for n in run)
            for i, pin in enumerate(block.pins):
                assert pin is not RECOMPUTE or i not in option.stored
                assert pin not in (KEEP, HOST, DISK) or i in option.stored


def test_a_menu_goes_down_in_bytes_and_up_in_time_near_the_hull() -> None:
    for seed in range(40):
        block = random_class(seed)
        menu, points = make_menu(block), best_points(all_options(block))
        for left, right in pairwise(menu):
            assert left.num_bytes > right.num_bytes
            assert left.replay_ns <= right.replay_ns
        span_ns = menu[-1].replay_ns - menu[0].replay_ns
        for option in menu:
            for time, price in hull_weights(points):
                least = min(time * ns + price * size for size, ns in points)
                above = time * option.replay_ns + price * option.num_bytes - least
                # On the hull for some weights, or hardly above it.
                if above <= time * NEAR_HULL_SHARE * span_ns:
                    break
            else:
                raise AssertionError(f"{option} is not near the hull of {block}")


@pytest.mark.parametrize("name", ["llama-8b/8k", "gpt2/8k"])
def test_a_models_menu_is_exact(name: str) -> None:
    block = compile_chain(CORPUS[name]).classes[0]
    assert is_hull(make_menu(block), all_options(block))


def test_the_order_of_options_is_the_order_of_prices() -> None:
    (block,) = compile_chain(CORPUS["llama-8b/8k"]).classes
    menu = make_menu(block)
    names = CORPUS["llama-8b/8k"].blocks[0].activations
    # All that is saved, but for what is made again in no time worth the bytes; then the norms.
    dropped = [
        {names[i].name.rsplit("0.", 1)[1] for i in left.stored - right.stored}
        for left, right in pairwise(menu)
    ]
    assert {"mlp.product"} in dropped
    assert menu[-1].stored == {0}
