"""Random operations on the tree and on the block hashes, against a plain list of all that was inserted.

The model knows no tree. It keeps every inserted sequence with its slots, cut where something was evicted; a match is
the longest common prefix with any of them. For the victims it keeps runs: what a node of the tree, or a block, covers
of a sequence, with times and counts. Which run goes first is read off the rules below, over all runs, every time.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from m4_radix_cache.mem_cache.radix_key import RadixKey
from tests.m4_radix_cache.caches import allocator_of, make_cache
from tests.support.amounts import examples

Path = tuple[str | None, tuple[int, ...]]  # a namespace and tokens from the start


@dataclass
class Run:
    """A piece of a sequence, of which whole pieces are evicted."""

    space: str | None
    tokens: tuple[int, ...]
    """All up to its end."""
    start: int
    """Where it begins."""
    number: int
    accessed: int
    created: int
    hits: int = 0
    priority: int = 0

    def has(self, path: Path) -> bool:
        """Whether it is the end of this path, or above its end."""
        return path[0] == self.space and path[1][: len(self.tokens)] == self.tokens


RULES: dict[str, Callable[[Run], Any]] = {
    "lru": lambda run: run.accessed,
    "lfu": lambda run: (run.hits, run.accessed),
    "fifo": lambda run: run.created,
    "slru": lambda run: (1 if run.hits >= 2 else 0, run.accessed),
    "priority": lambda run: (run.priority, run.accessed),
    "block_hash": lambda run: (run.accessed, -len(run.tokens)),
}
"""Who goes first among the runs that nobody has locked and behind which there is nothing."""


@dataclass
class Model:
    """What must be cached, and how it goes."""

    policy: str
    page_size: int
    sequences: list[tuple[Path, list[int]]] = field(default_factory=list)
    locks: list[Path] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    time: int = 0
    num_runs_ever: int = 0

    def match(self, path: Path) -> list[int]:
        """Slots of the longest common prefix with any sequence, in whole pages."""
        best: list[int] = []
        for known, slots in self.sequences:
            length = self._common(known, path)
            if length > len(best):
                best = slots[:length]
        if path[1]:
            self.time += 1
            self._visit(path, len(best), 0)
        return best

    def insert(self, path: Path, slots: list[int], priority: int) -> list[int]:
        """Returns the slots of what was there already."""
        if not path[1]:
            return []
        existing = self.match(path)
        self._visit(path, len(existing), priority)
        self.sequences.append((path, existing + slots[len(existing) :]))
        step = self.page_size if self.policy == "block_hash" else len(path[1])
        for start in range(len(existing), len(path[1]), step):
            self._add(Run(path[0], path[1][: start + step], start, 0, self.time, self.time, priority=priority))
        return existing

    def hit(self, path: Path) -> None:
        for run in self.runs:
            run.hits += run.has(path)

    def lock(self, path: Path) -> None:
        self.locks.append(path)

    def unlock(self, path: Path) -> None:
        self.locks.remove(path)
        if self.policy == "block_hash":  # whoever lets go of a block has used it until now
            self.time += 1
            for run in self.runs:
                if run.has(path) and not self.is_locked(run):
                    run.accessed = self.time

    def evict(self, num_tokens: int) -> tuple[int, list[int]]:
        """How many tokens go, and their slots."""
        freed = []
        while len(freed) < num_tokens and (leaves := [run for run in self.runs if self._is_leaf(run)]):
            victim = min(leaves, key=lambda run: (RULES[self.policy](run), run.number))
            self.runs.remove(victim)
            freed += self._slots_of(victim)
            self.sequences = [self._cut(sequence, victim) for sequence in self.sequences]
        return len(freed), freed

    def is_locked(self, run: Run) -> bool:
        return any(run.has(path) for path in self.locks)

    def size(self, *, locked: bool) -> int:
        return sum(len(run.tokens) - run.start for run in self.runs if self.is_locked(run) == locked)

    def slots(self) -> set[int]:
        return {slot for _, slots in self.sequences for slot in slots}

    def _common(self, known: Path, path: Path) -> int:
        if known[0] != path[0]:
            return 0
        length = 0
        for ours, theirs in zip(known[1], path[1], strict=False):
            if ours != theirs:
                break
            length += 1
        return length // self.page_size * self.page_size

    def _visit(self, path: Path, length: int, priority: int) -> None:
        """Somebody came by on the first `length` tokens. A node in which he stopped is two from now on."""
        for run in list(self.runs):
            common = self._common((run.space, run.tokens), (path[0], path[1][:length]))
            if common <= run.start:
                continue
            run.accessed = self.time
            if common < len(run.tokens):
                upper = Run(run.space, run.tokens[:common], run.start, 0, self.time, self.time, run.hits, run.priority)
                run.start = common
                self._add(upper)
                run = upper
            run.priority = max(run.priority, priority)

    def _add(self, run: Run) -> None:
        self.num_runs_ever += 1
        run.number = self.num_runs_ever
        self.runs.append(run)

    def _is_leaf(self, run: Run) -> bool:
        behind = any(run.has((other.space, other.tokens)) for other in self.runs if other is not run)
        return not behind and not self.is_locked(run)

    def _slots_of(self, run: Run) -> list[int]:
        return next(slots[run.start : len(run.tokens)] for path, slots in self.sequences if run.has(path))

    def _cut(self, sequence: tuple[Path, list[int]], victim: Run) -> tuple[Path, list[int]]:
        (space, tokens), slots = sequence
        return ((space, tokens[: victim.start]), slots[: victim.start]) if victim.has((space, tokens)) else sequence


class Pair:
    """A cache and its model: whatever is done to one is done to the other, and both must say the same."""

    def __init__(self, kind: str, policy: str, page_size: int) -> None:
        self.cache = make_cache(kind, page_size=page_size, num_pages=16, policy=policy)
        self.allocator = allocator_of(self.cache)
        self.page_size = page_size
        self.kind, self.policy = kind, policy
        self.model = Model("block_hash" if kind == "block_hash" else policy, page_size)
        self.handles: list[tuple[Any, Path]] = []  # locked
        self.keys: dict[Path, RadixKey] = {}

    def match(self, path: Path) -> tuple[Any, Path]:
        whole = len(path[1]) // self.page_size * self.page_size
        found = self.cache.match_prefix(self.key(path))
        expected = self.model.match((path[0], path[1][:whole]))
        assert found.device_indices.tolist() == expected
        return found.last_device_node, (path[0], path[1][: len(expected)])

    def match_limited(self, path: Path, limit: int) -> None:
        found = self.cache.match_prefix(self.key(path), limit)
        whole = max(0, min(limit, len(path[1]))) // self.page_size * self.page_size
        assert found.device_indices.tolist() == self.model.match((path[0], path[1][:whole]))

    def insert(self, path: Path, priority: int) -> None:
        """With new slots for everything, as of a request that found nothing; its duplicates are freed."""
        space, tokens = path[0], path[1][: len(path[1]) // self.page_size * self.page_size]
        if len(tokens) > self.allocator.available_size():
            self.evict(len(tokens) - self.allocator.available_size())
        slots = self.allocator.alloc(len(tokens))
        if slots is None:
            return
        existing = self.cache.insert(self.key(path), slots, priority)
        assert existing == len(self.model.insert((space, tokens), slots.tolist(), priority))
        self.allocator.free(slots[:existing])  # raises if the cache freed or kept one of them

    def lock(self, path: Path) -> None:
        node, found = self.match(path)
        self.cache.inc_lock_ref(node)
        self.model.lock(found)
        self.handles.append((node, found))

    def unlock(self, index: int) -> None:
        node, path = self.handles.pop(index % len(self.handles))
        self.cache.dec_lock_ref(node)
        self.model.unlock(path)

    def record_hit(self, index: int) -> None:
        node, path = self.handles[index % len(self.handles)]
        self.cache.record_hit(node)
        self.model.hit(path)

    def start_from(self, path: Path) -> None:
        """A look-up and a hit, without a lock."""
        node, found = self.match(path)
        self.cache.record_hit(node)
        self.model.hit(found)

    def evict(self, num_tokens: int) -> None:
        before, total = self.owned(), self.cache.num_evicted_tokens
        freed, slots = self.model.evict(num_tokens)
        assert self.cache.evict(num_tokens) == freed == self.cache.num_evicted_tokens - total
        assert before - self.owned() == {slot // self.page_size for slot in slots}, "other victims than the rule names"

    def key(self, path: Path) -> RadixKey:
        """Of one request all its life."""
        return self.keys.setdefault(path, RadixKey(path[1], path[0]))

    def reset(self) -> None:
        self.cache.reset()
        self.allocator.clear()
        self.model = Model(self.model.policy, self.page_size)

    def owned(self) -> set[int]:
        return set(self.allocator.owned_pages().tolist())

    def look(self) -> None:
        self.cache.check_invariants()
        sizes = self.cache.evictable_size(), self.cache.protected_size()
        assert sizes == (self.model.size(locked=False), self.model.size(locked=True))
        assert self.allocator.available_size() + sum(sizes) == self.allocator.size, "a slot is lost, or counted twice"
        assert self.owned() == {slot // self.page_size for slot in self.model.slots()}
        for _, path in self.handles:
            assert any(run.has(path) for run in self.model.runs) or not path[1], "what is locked was evicted"


@st.composite
def paths(draw: st.DrawFn, page_size: int) -> Path:
    """Few pages, so that much is shared; some differ in their last token only. Perhaps part of a page at the end."""
    pages = {0: (0,) * page_size, 1: (1,) * page_size, 2: (*(0,) * (page_size - 1), 1)}
    numbers = draw(st.lists(st.sampled_from([0, 0, 1, 2]), max_size=6))
    tail = (0,) * draw(st.integers(0, page_size - 1))
    space = draw(st.sampled_from([None, None, "x"]))
    return space, sum((pages[number] for number in numbers), ()) + tail


def machine(policy: str, page_size: int) -> type[RuleBasedStateMachine]:
    """Everything that can be done, to a tree with this strategy and to block hashes beside it."""
    sequences, indices = paths(page_size), st.integers(0, 9)

    class Machine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.pairs = [Pair("radix", policy, page_size), Pair("block_hash", "lru", page_size)]

        def all(self, verb: str, *arguments: Any) -> None:
            for pair in self.pairs:
                getattr(pair, verb)(*arguments)

        @rule(path=sequences)
        def match(self, path: Path) -> None:
            self.all("match", path)

        @rule(path=sequences, limit=st.integers(-1, 6 * page_size))
        def match_limited(self, path: Path, limit: int) -> None:
            self.all("match_limited", path, limit)

        @rule(path=sequences, priority=st.integers(0, 2))
        def insert(self, path: Path, priority: int) -> None:
            self.all("insert", path, priority)

        @rule(path=sequences, priority=st.integers(0, 2))
        def insert_another(self, path: Path, priority: int) -> None:
            self.all("insert", path, priority)

        @rule(path=sequences)
        def start_from(self, path: Path) -> None:
            self.all("start_from", path)

        @rule(path=sequences)
        def lock(self, path: Path) -> None:
            self.all("lock", path)

        @precondition(lambda self: self.pairs[0].handles)
        @rule(index=indices)
        def unlock(self, index: int) -> None:
            self.all("unlock", index)

        @precondition(lambda self: self.pairs[0].handles)
        @rule(index=indices)
        def record_hit(self, index: int) -> None:
            self.all("record_hit", index)

        @rule(num_tokens=st.integers(0, 8 * page_size))
        def evict(self, num_tokens: int) -> None:
            self.all("evict", num_tokens)

        @precondition(lambda self: not self.pairs[0].handles)
        @rule()
        def reset(self) -> None:
            self.all("reset")

        @invariant()
        def look(self) -> None:
            self.all("look")

        def teardown(self) -> None:
            """Without locks everything can go."""
            for pair in self.pairs:
                while pair.handles:
                    pair.unlock(0)
                pair.evict(pair.allocator.size)
                assert pair.allocator.available_size() == pair.allocator.size

    return Machine


@pytest.mark.sample
@pytest.mark.hypothesis
@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo", "slru", "priority"])
def test_a_plain_list_of_sequences_and_the_caches_agree(policy: str, page_size: int) -> None:
    run_state_machine_as_test(
        machine(policy, page_size), settings=settings(max_examples=examples(40), stateful_step_count=50)
    )
