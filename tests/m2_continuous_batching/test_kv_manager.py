"""KV memory by number: who may have a slot, which one, and that no slot ever has two owners."""

import pytest
from hypothesis import given, strategies as st

from m2_continuous_batching.kv_manager import SlotManager


def slots(num: int = 3, *, length: int = 16) -> SlotManager:
    return SlotManager(max_num_seqs=num, max_model_len=length)


def test_the_lowest_free_slot_goes_first() -> None:
    manager = slots()
    assert [manager.reserve(name, 4) for name in "abc"] == [[0], [1], [2]]
    manager.release("b")
    manager.release("a")
    assert manager.reserve("d", 4) == [0]
    assert manager.reserve("e", 4) == [1]
    assert manager.owned() == {"c": [2], "d": [0], "e": [1]}


def test_a_second_reservation_gives_nothing_new() -> None:
    manager = slots()
    manager.reserve("a", 4)
    assert manager.reserve("a", 9) == [] == manager.reserve("a", 4)
    assert manager.owned() == {"a": [0]} and manager.block_ids("a") == [0]


def test_a_newcomer_can_be_held_as_long_as_a_slot_is_free() -> None:
    manager = slots(2)
    assert manager.can_hold("a", 16)
    manager.reserve("a", 1)
    assert manager.can_hold("b", 1)
    manager.reserve("b", 1)
    assert not manager.can_hold("c", 1)
    manager.release("a")
    assert manager.can_hold("c", 1)


def test_an_owner_can_always_grow_to_the_end_of_its_slot() -> None:
    manager = slots(1)
    manager.reserve("a", 3)
    assert manager.can_hold("a", 16) and not manager.can_hold("a", 17)


def test_nobody_can_be_held_who_is_longer_than_a_slot() -> None:
    manager = slots(length=8)
    assert manager.can_hold("a", 8) and not manager.can_hold("a", 9)


def test_asking_changes_nothing() -> None:
    manager = slots(1)
    for name in "abc":
        assert manager.can_hold(name, 1)
    assert manager.owned() == {}


def test_a_release_is_harmless_where_nothing_is_owned() -> None:
    manager = slots()
    manager.release("nobody")
    manager.reserve("a", 4)
    manager.release("a")
    manager.release("a")
    assert manager.owned() == {}
    assert manager.reserve("a", 4) == [0], "it may come again"


def test_whoever_owns_nothing_has_no_ids() -> None:
    with pytest.raises(KeyError):
        slots().block_ids("nobody")


def test_what_a_caller_does_to_the_answers_changes_no_owner() -> None:
    manager = slots()
    manager.reserve("a", 4).append(7)
    manager.block_ids("a").append(7)
    manager.owned()["a"].append(7)
    assert manager.owned() == {"a": [0]} and manager.block_ids("a") == [0]


def test_the_invariants_notice_a_slot_that_does_not_exist() -> None:
    manager = slots()
    manager.reserve("a", 4)
    manager.reserve("b", 4)
    manager.check_invariants()
    manager.num_slots = 1
    with pytest.raises(AssertionError):
        manager.check_invariants()


@given(
    num=st.integers(1, 4),
    verbs=st.lists(st.tuples(st.sampled_from(["reserve", "release"]), st.sampled_from("abcdef"), st.integers(1, 10))),
)
def test_slots_are_owned_by_one_and_the_lowest_goes_first(num: int, verbs: list[tuple[str, str, int]]) -> None:
    manager, model = slots(num, length=8), dict[str, int]()
    for verb, name, num_tokens in verbs:
        if verb == "release":
            manager.release(name)
            model.pop(name, None)
            continue
        can = num_tokens <= 8 and (name in model or len(model) < num)
        assert manager.can_hold(name, num_tokens) == can
        if can:
            free = min(set(range(num)) - set(model.values()), default=None)
            expected = [] if name in model else [free]
            assert manager.reserve(name, num_tokens) == expected
            if expected and free is not None:
                model[name] = free
        manager.check_invariants()
        assert manager.owned() == {name: [slot] for name, slot in model.items()}
