"""Contract of the KV manager of m2: who owns which slot."""

import traceback
from random import Random
from typing import Any

from tests.contracts.part import Broken, Part, same
from tests.testbed.bed import make_bed

PART = Part(
    name="slot_cache",
    target="m2_continuous_batching.kv_manager:SlotManager",
    lesson="docs/m2_continuous_batching.md#slotmanager-memory-by-number",
    starter="MySlotManager",
    role="kv_manager",
    variant="m2_continuous_batching-padded",
)

SLOT_LEN = 16


def slots_of(part: Any, num_slots: int, *owners: str) -> Any:
    """A manager with slots of 16 tokens; each of `owners` has reserved one, in this order."""
    manager = part(max_num_seqs=num_slots, max_model_len=SLOT_LEN)
    for owner in owners:
        manager.reserve(owner, 4)
    return manager


def test_each_request_gets_a_slot_of_its_own(part: Any) -> None:
    """The first request gets slot 0, the next slot 1, and so on."""
    manager = slots_of(part, 3)
    got = [manager.reserve(owner, 4) for owner in ("a", "b", "c")]
    same(got, [[0], [1], [2]], on="3 slots; reserve('a', 4), reserve('b', 4), reserve('c', 4)")


def test_a_slot_does_not_grow(part: Any) -> None:
    """A request that has a slot gets no other one, however long it becomes."""
    manager = slots_of(part, 3)
    got = [manager.reserve("a", num_tokens) for num_tokens in (4, 5, 16)]
    hint = "Only what is new is returned: the runner knows the slot already, and it has its full length."
    same(got, [[0], [], []], on="3 slots; reserve('a', 4), reserve('a', 5), reserve('a', 16)", hint=hint)
    same(manager.reserve("b", 4), [1], on="then reserve('b', 4)", hint="a has one slot, so slot 1 is free.")


def test_a_request_needs_a_free_slot(part: Any) -> None:
    """A request without a slot can have one as long as one is free."""
    got = [slots_of(part, 2, *owners).can_hold("c", 4) for owners in ((), ("a",), ("a", "b"))]
    same(got, [True, True, False], on="2 slots, of which none, one and two are in use; can_hold('c', 4)")


def test_an_owner_can_always_go_on(part: Any) -> None:
    """A request with a slot has room until its end, also when no slot is free."""
    manager = slots_of(part, 2, "a", "b")
    hint = "Its own slot has room: a free one is not needed. The scheduler cannot take a running request's place away."
    same(manager.can_hold("a", 5), True, on="2 slots, of a and b; can_hold('a', 5)", hint=hint)


def test_a_slot_has_room_for_max_model_len_tokens(part: Any) -> None:
    """A slot has room for `max_model_len` tokens and not for one more."""
    manager = slots_of(part, 2, "a")
    for name, kind in (("a", "a has a slot"), ("b", "b has none")):
        got = [manager.can_hold(name, num_tokens) for num_tokens in (1, 15, 16, 17)]
        on = f"2 slots of 16 tokens; {kind}; can_hold('{name}', n) for n = 1, 15, 16, 17"
        same(got, [True, True, True, False], on=on, hint="A request of 16 tokens just fits.")


def test_a_released_slot_is_free(part: Any) -> None:
    """A slot that was released is free for another request, and its owner has none any more."""
    manager = slots_of(part, 2, "a", "b")
    manager.release("a")
    same(manager.can_hold("c", 4), True, on="2 slots, of a and b; release('a'); can_hold('c', 4)")
    hint = "Slot 0 is free. The number of owners is no free slot: slot 1 is b's."
    same(manager.reserve("c", 4), [0], on="2 slots, of a and b; release('a'); reserve('c', 4)", hint=hint)
    manager.release("b")
    same(manager.reserve("a", 4), [1], on="then release('b'); reserve('a', 4)", hint="a had been released: it is new.")


def test_the_lowest_free_slot_goes_first(part: Any) -> None:
    """Of several free slots the lowest is given, whatever the order in which they became free."""
    hint = "A decode reads slots 0, 1, 2, ... in place: those in use should lie together."
    for order in (("b", "a", "c"), ("c", "b", "a"), ("a", "c", "b")):
        manager = slots_of(part, 4, "a", "b", "c", "d")
        for owner in order:
            manager.release(owner)
        got = [manager.reserve(owner, 4) for owner in ("e", "f", "g")]
        on = f"slots of a, b, c, d; release {', '.join(order)}; reserve for e, f, g"
        same(got, [[0], [1], [2]], on=on, hint=hint)


def test_a_request_without_a_slot_can_be_released(part: Any) -> None:
    """To release a request without a slot does nothing."""
    manager = slots_of(part, 2, "a")
    manager.release("stranger")
    same(dict(manager.owned()), {"a": [0]}, on="2 slots, one of a; release('stranger'); owned()")
    manager.release("a")
    manager.release("a")
    same(dict(manager.owned()), {}, on="then release('a') twice; owned()")


def test_a_question_changes_nothing(part: Any) -> None:
    """`can_hold` reserves nothing."""
    manager = slots_of(part, 2, "a")
    for _ in range(3):
        manager.can_hold("b", 4)
    hint = "The scheduler asks for requests that then wait. Only `reserve` gives a slot."
    same(dict(manager.owned()), {"a": [0]}, on="2 slots, one of a; can_hold('b', 4) three times; owned()", hint=hint)
    same(manager.can_hold("c", 4), True, on="2 slots, one of a; can_hold('b', 4); can_hold('c', 4)", hint=hint)


def test_the_slots_of_a_request_are_known(part: Any) -> None:
    """`block_ids` are the slots of one request, `owned` those of all; a request without a slot is a KeyError."""
    manager = slots_of(part, 3, "a", "b")
    same(manager.block_ids("b"), [1], on="3 slots, two of a and b; block_ids('b')")
    same(dict(manager.owned()), {"a": [0], "b": [1]}, on="3 slots, two of a and b; owned()")
    try:
        got = manager.block_ids("c")
    except KeyError:
        return
    raise Broken("3 slots, two of a and b; block_ids('c')", KeyError, got, "c has no slot.")


def test_answers_belong_to_the_caller(part: Any) -> None:
    """What a caller does to the lists that it gets changes no owner."""
    manager = slots_of(part, 3)
    manager.reserve("a", 4).append(7)
    manager.block_ids("a").append(7)
    manager.owned()["a"].append(7)
    hint = "Return new lists, not those in which you keep the owners."
    got = (dict(manager.owned()), manager.block_ids("a"))
    on = "the caller appends 7 to reserve('a', 4), block_ids('a') and owned()['a']; owned(), block_ids('a')"
    same(got, ({"a": [0]}, [0]), on=on, hint=hint)


def test_it_is_right_after_many_changes(part: Any) -> None:
    """After any reservations and releases each slot has at most one owner, and the lowest free one is given."""
    rng = Random(1)
    for _ in range(15):
        num_slots = rng.randrange(1, 5)
        manager, owners, done = slots_of(part, num_slots), dict[str, int](), [f"{num_slots} slots"]
        for _ in range(40):
            name, num_tokens = rng.choice("abcdef"), rng.choice((1, 7, 16, 17))
            hint = f"Before this call the owners of slots are {owners}; a slot has room for {SLOT_LEN} tokens."
            if rng.random() < 0.4:
                done.append(f"release('{name}')")
                manager.release(name)
                owners.pop(name, None)
            else:
                can = num_tokens <= SLOT_LEN and (name in owners or len(owners) < num_slots)
                done.append(f"can_hold('{name}', {num_tokens})")
                on = "; ".join([done[0], "...", *done[1:][-8:]])
                same(manager.can_hold(name, num_tokens), can, on=on, hint=hint)
                if not can:
                    continue
                free = min(set(range(num_slots)) - set(owners.values()), default=0)
                done.append(f"reserve('{name}', {num_tokens})")
                on = "; ".join([done[0], "...", *done[1:][-8:]])
                same(manager.reserve(name, num_tokens), [] if name in owners else [free], on=on, hint=hint)
                owners.setdefault(name, free)
            on = "; ".join([done[0], "...", *done[1:][-8:]])
            owned = {owner: [slot] for owner, slot in owners.items()}
            same(dict(manager.owned()), owned, on=f"{on}; owned()", hint=hint)


def test_requests_run_to_their_end(part: Any) -> None:
    """With the scheduler of m2 and a model that is a rule, every request ends with its own tokens."""
    rng = Random(1)
    for _ in range(5):
        bed = make_bed(max_num_seqs=rng.choice((1, 2, 3)), max_model_len=SLOT_LEN, kv_manager_class=part)
        try:
            for _ in range(14):
                if rng.random() < 0.6:
                    bed.add(rng.randrange(1, 12), max_tokens=rng.randrange(1, 6))
                bed.step()
            bed.drain(limit=200)
        except AssertionError as error:
            if isinstance(error, Broken):
                raise
            got = str(error) or traceback.extract_tb(error.__traceback__)[-1].line
            on = f"{len(bed.requests)} requests, {len(bed.steps)} steps; in the last one"
            hint = "The test-bed reads all decisions, and what stands in each slot. The behaviours before name a call."
            raise Broken(on, "each running request has a slot of its own", got, hint) from error
