"""KV memory by number: which request may have a slot, which one, and that no slot ever has two owners."""

import pytest
from hypothesis import given, strategies as st

from m2_continuous_batching.kv_manager import SlotManager


def slots(num: int = 3, *, length: int = 16) -> SlotManager:
    return SlotManager(max_num_seqs=num, max_model_len=length)


def test_a_request_without_a_slot_has_no_ids() -> None:
    with pytest.raises(KeyError):
        slots().block_ids("stranger")


def test_what_a_caller_does_to_the_answers_changes_no_owner() -> None:
    manager = slots()
    manager.reserve("a", 4).append(7)
    manager.block_ids("a").append(7)
    manager.owned()["a"].append(7)
    assert manager.owned() == {"a": [0]} and manager.block_ids("a") == [0]


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
