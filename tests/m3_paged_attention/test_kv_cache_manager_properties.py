"""Random steps on tiny pools: after forks, copies, swaps and releases each request finds its tokens.

The world below is a KV memory of single values instead of vectors. It makes the moves and writes the tokens as a worker
would, keeps for each request what its tokens must be, and counts blocks in its own way.
"""

from collections import Counter
from itertools import count
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from m1_single_request.tracer import Tracer
from m3_paged_attention.errors import OutOfBlocksError
from m3_paged_attention.kv_cache_manager import KVCacheManager
from m3_paged_attention.kv_cache_spec import KVCacheConfig, KVCacheSpec
from m3_paged_attention.kv_storage import KVStorage
from tests.support.amounts import examples

Tokens = list[int]


class World:
    """A manager, the memory it speaks of, and what every request's tokens must be.

    Its verbs do nothing where a scheduler would not call them, or where the manager refuses.
    """

    def __init__(self, *, block_size: int, num_blocks: int, num_host_blocks: int) -> None:
        self.block_size, self.num_blocks, self.num_host_blocks = block_size, num_blocks, num_host_blocks
        spec = KVCacheSpec(block_size=block_size, num_layers=1, num_kv_heads=1, head_dim=1, dtype=torch.int32)
        config = KVCacheConfig(spec=spec, num_blocks=num_blocks, num_host_blocks=num_host_blocks)
        self.kv = KVCacheManager(kv_cache_config=config, tracer=Tracer())
        self.storage = KVStorage(config, device=torch.device("cpu"))
        self.slots = self.storage.layer(0).key_cache.view(-1)
        self.tokens: dict[str, Tokens] = {}  # of each request, those whose KV is there
        self.coming: dict[str, Tokens] = {}  # those that this step writes behind them
        self.waiting_for: dict[str, tuple[str, int]] = {}  # forks of a prompt that this step writes
        self.thrown_out = False  # whether a request was, in this step
        self.values = count(1)

    # --- verbs --------------------------------------------------------------------------------------------------------

    def admit(self, name: str, num_tokens: int) -> None:
        if name not in self.tokens and self._reserve(name, num_tokens):
            self.tokens[name] = []
            self.coming[name] = [next(self.values) for _ in range(num_tokens)]

    def decode(self, name: str) -> None:
        busy = name in self.coming or name in self.waiting_for
        if name not in self.tokens or busy or self.kv.is_swapped(name):
            return
        if self._reserve(name, len(self.tokens[name]) + 1):
            self.coming[name] = [next(self.values)]

    def decode_all(self) -> None:
        """What they need together is what they take one by one."""
        here = [name for name in self.tokens if name not in {*self.coming, *self.waiting_for, *self.kv.swapped()}]
        needed = self.kv.num_needed_together([(name, len(self.tokens[name]) + 1) for name in here])
        free = self.kv.num_free
        if needed <= free:
            for name in here:
                self.decode(name)
            assert here == [name for name in here if name in self.coming] and self.kv.num_free == free - needed

    def fork(self, parent: str, child: str, num_tokens: int) -> None:
        """Of tokens that are there; or of a prompt that comes in this step, then the child waits for it."""
        if parent not in self.tokens or child in self.tokens or self.kv.is_swapped(parent):
            return
        is_prompt = not self.tokens[parent]
        if parent in self.waiting_for or (is_prompt and parent not in self.coming):
            return
        num_tokens = min(num_tokens, len(self.coming[parent] if is_prompt else self.tokens[parent]))
        free = self.kv.num_free
        self.kv.fork(parent, child, num_tokens)
        assert self.kv.num_free == free, "sharing takes nothing"
        self.tokens[child] = [] if is_prompt else self.tokens[parent][:num_tokens]
        if is_prompt:
            self.waiting_for[child] = (parent, num_tokens)

    def swap_out(self, name: str) -> None:
        if name not in self.tokens or self.kv.is_swapped(name) or name in self.waiting_for:
            return
        before, num_blocks = self.state(), len(self.kv.block_ids(name))
        free_on_host = self.num_host_blocks - sum(map(len, self.kv.swapped().values()))
        assert self.kv.swap_out(name) == (num_blocks <= free_on_host)
        if num_blocks > free_on_host:
            assert self.state() == before
            return
        self.thrown_out = True
        self._drop_step_of(name)

    def swap_in(self, name: str) -> None:
        """A scheduler admits no request in a step that preempts."""
        if name not in self.tokens or not self.kv.is_swapped(name) or self.thrown_out:
            return
        num_blocks, before = len(self.kv.swapped()[name]), self.state()
        assert self.kv.num_needed(name, 1) == num_blocks
        if num_blocks <= self.kv.num_free:
            self.kv.swap_in(name)
            return
        with pytest.raises(OutOfBlocksError):
            self.kv.swap_in(name)
        assert self.state() == before

    def release(self, name: str) -> None:
        self.kv.release(name)
        self.thrown_out = self.thrown_out or name in self.tokens
        if name in self.tokens:
            self._drop_step_of(name)
            del self.tokens[name]

    def step(self) -> None:
        """Make the moves, write the tokens, and look at everything."""
        moves = self.kv.take_moves()
        assert self.kv.touched() <= self.tokens.keys()
        for sources_and_targets in (moves.swap_in, moves.swap_out, moves.copies):
            targets = [target for _, target in sources_and_targets]
            assert len(targets) == len(set(targets))
        assert 0 not in {block_id for pair in moves.copies for block_id in pair}
        self.storage.swap_in(moves.swap_in)
        self.storage.swap_out(moves.swap_out)
        self.storage.copy_blocks(moves.copies)
        written: set[int] = set()
        for name, tokens in self.coming.items():
            start = len(self.tokens[name])
            for position, value in enumerate(tokens, start):
                slot = self.slot(name, position)
                assert slot not in written, "a slot is written twice"
                written.add(slot)
                self.slots[slot] = value
            self.tokens[name] = self.tokens[name] + tokens
        for child, (parent, num_tokens) in self.waiting_for.items():
            self.tokens[child] = self.tokens[parent][:num_tokens]
        self._end_step()
        self.check()

    # --- what must hold -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        kv = self.kv
        kv.check_invariants()
        owned, swapped = kv.owned(), kv.swapped()
        assert sorted([*owned, *swapped]) == sorted(self.tokens)
        holders = Counter(block_id for table in owned.values() for block_id in table)
        assert kv.num_free == self.num_blocks - len(holders)
        assert set(holders) <= set(range(1, self.num_blocks + 1)), "block 0 has no owner"
        assert kv.usage()[1:] == (kv.num_free, len(holders), sum(n > 1 for n in holders.values()))
        on_host = [host_id for table in swapped.values() for host_id in table]
        assert len(on_host) == len(set(on_host)) and set(on_host) <= set(range(self.num_host_blocks))
        host = self.storage.host_blocks.view(self.num_host_blocks, 2, -1)[:, 0] if self.num_host_blocks else None
        held: set[int] = set()
        for name, tokens in self.tokens.items():
            if name in owned:
                slots = [self.slot(name, position) for position in range(len(tokens))]
                held.update(slots)
                assert self.slots[slots].tolist() == tokens, f"{name} does not find its tokens"
            elif host is not None:
                assert host[swapped[name]].view(-1)[: len(tokens)].tolist() == tokens, f"{name} on the host"
        assert kv.num_tokens_held({name: len(tokens) for name, tokens in self.tokens.items()}) == len(held)

    def slot(self, name: str, position: int) -> int:
        block_id = self.kv._tables[name].block_ids[position // self.block_size]
        return block_id * self.block_size + position % self.block_size

    def held(self) -> set[str]:
        return {*self.kv.owned(), *self.kv.swapped()}

    def state(self) -> Any:
        kv = self.kv
        noted = [dict(noted) for noted in (kv._swap_ins, kv._swap_outs, kv._copies)]
        return kv.owned(), kv.swapped(), list(kv.pool._free), list(kv.host_pool._free), noted

    def _reserve(self, name: str, num_tokens: int) -> bool:
        kv, before, index = self.kv, self.state(), (num_tokens - 1) // self.block_size
        needed, free, old = kv.num_needed(name, num_tokens), kv.num_free, kv.owned().get(name, [])
        if name in self.tokens:
            assert needed <= 1 and (kv.in_need([(name, num_tokens)]) or not needed)
            assert kv.is_swapped(name) or kv.num_needed_together([(name, num_tokens)]) == needed
        assert kv.can_hold(name, num_tokens) == (needed <= free)
        if needed > free:
            with pytest.raises(OutOfBlocksError):
                kv.reserve(name, num_tokens)
            assert self.state() == before
            return False
        new = kv.reserve(name, num_tokens)
        assert len(new) == needed == free - kv.num_free
        table = kv.block_ids(name)
        assert table[:index] == [*old, *new][:index] and len(table) == max(len(old), index + 1)
        assert table[index] == [*old[index : index + 1], *new][-1], "the last new id belongs to the last token"
        assert sum(table[index] in other for other in kv.owned().values()) == 1, (
            "no other request may read what is written"
        )
        assert kv.num_needed(name, num_tokens) == 0 and kv.reserve(name, num_tokens) == []
        return True

    def _drop_step_of(self, name: str) -> None:
        """It was preempted: its tokens do not come, and the forks that wait for them are released, too."""
        self.coming.pop(name, None)
        self.waiting_for.pop(name, None)
        for child in [child for child, (parent, _) in self.waiting_for.items() if parent == name]:
            self.release(child)

    def _end_step(self) -> None:
        self.coming, self.waiting_for, self.thrown_out = {}, {}, False


# --- random steps -----------------------------------------------------------------------------------------------------

NAMES = st.sampled_from("abcde")
VERBS = st.one_of(
    st.tuples(st.just("admit"), NAMES, st.integers(1, 9)),
    st.tuples(st.just("fork"), NAMES, NAMES, st.integers(0, 9)),
    st.tuples(st.just("decode"), NAMES),
    st.tuples(st.just("decode"), NAMES),
    st.tuples(st.just("decode_all")),
    st.tuples(st.just("swap_out"), NAMES),
    st.tuples(st.just("swap_in"), NAMES),
    st.tuples(st.just("release"), NAMES),
    st.tuples(st.just("step")),
    st.tuples(st.just("step")),
)


@settings(max_examples=examples(300))
@given(
    block_size=st.sampled_from([1, 2, 4]),
    num_blocks=st.integers(1, 9),
    num_host_blocks=st.integers(0, 5),
    verbs=st.lists(VERBS, min_size=5, max_size=40),
)
def test_each_request_finds_its_tokens(
    block_size: int, num_blocks: int, num_host_blocks: int, verbs: list[tuple[Any, ...]]
) -> None:
    world = World(block_size=block_size, num_blocks=num_blocks, num_host_blocks=num_host_blocks)
    for verb, *arguments in verbs:
        getattr(world, verb)(*arguments)
    world.step()
    drain(world)


def drain(world: World) -> None:
    """Release all requests; nothing is left."""
    for name in list(world.tokens):
        world.release(name)
    world.step()
    assert world.kv.num_free == world.num_blocks and world.held() == set()
    assert len(world.kv.host_pool.allocate(world.num_host_blocks)) == world.num_host_blocks
