"""Random operations on the tree with two tiers, with copies that are late, out of order, or fail."""

from typing import Any

import pytest
from hypothesis import Phase, settings, strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from m4_radix_cache.mem_cache.disk_radix_cache import DiskRadixCache
from m4_radix_cache.mem_cache.hiradix_cache import HiRadixCache
from tests.m4_radix_cache.late_copies import LatePool
from tests.m4_radix_cache.tiered_pair import VOCAB_SIZE, Path, Sizes, Tiered
from tests.support.amounts import examples

POLICIES = ("write_through", "write_through_selective", "write_back")


@st.composite
def paths(draw: st.DrawFn, page_size: int) -> Path:
    """Few pages, so that much is shared; one with an image. Perhaps part of a page at the end."""
    image = (*(0,) * (page_size - 1), VOCAB_SIZE + 7)
    pages = {0: (0,) * page_size, 1: (1,) * page_size, 2: (*(0,) * (page_size - 1), 1), 3: image}
    numbers = draw(st.lists(st.sampled_from([0, 0, 1, 2, 3]), max_size=6))
    tail = (0,) * draw(st.integers(0, page_size - 1))
    return draw(st.sampled_from([None, None, "x"])), sum((pages[number] for number in numbers), ()) + tail


def machine(page_size: int, write_policy: str, **parts: Any) -> type[RuleBasedStateMachine]:
    """Everything that can be done to a tree with two tiers."""
    sequences, indices = paths(page_size), st.integers(0, 9)

    class Machine(RuleBasedStateMachine):
        inserted: Bundle[Path] = Bundle("inserted")

        @initialize(
            num_pages=st.sampled_from([7, 10, 20]),
            num_host_pages=st.sampled_from([2, 6, 8, 40]),
            eviction_policy=st.sampled_from(["lru", "lru", "lfu", "fifo", "slru", "priority"]),
            least_loaded=st.sampled_from([1, 1, 10]),
            failing=st.sampled_from([0.0, 0.0, 0.1]),
            seed=st.integers(0, 1000),
        )
        def build(self, **sizes: Any) -> None:
            self.tiered = Tiered(Sizes(page_size=page_size, write_policy=write_policy, **sizes), **parts)

        @rule(path=sequences)
        def match(self, path: Path) -> None:
            self.tiered.match(path)

        @rule(path=sequences, limit=st.integers(-1, 6 * page_size))
        def match_limited(self, path: Path, limit: int) -> None:
            self.tiered.match(path, limit)

        @rule(path=sequences, priority=st.integers(0, 2), target=inserted)
        def insert(self, path: Path, priority: int) -> Path:
            self.tiered.insert(path, priority)
            return path

        @rule(path=inserted, more=sequences, target=inserted)
        def insert_longer(self, path: Path, more: Path) -> Path:
            path = path[0], (*path[1], *more[1])[: 8 * page_size]
            self.tiered.insert(path)
            return path

        @rule(path=sequences, others=st.lists(sequences, max_size=3), at_once=st.booleans(), is_kept=st.booleans())
        def come_back(self, path: Path, others: list[Path], at_once: bool, is_kept: bool) -> None:
            tiered = self.tiered
            tiered.insert(path)
            tiered.start(path)
            tiered.unlock(len(tiered.readers) - 1)
            tiered.evict(tiered.allocator.size)
            for other in others:
                tiered.insert(other)
            tiered.start(path)
            tiered.read(at_once=at_once)
            if not is_kept:
                tiered.unlock(len(tiered.readers) - 1)

        @rule()
        def evict_all(self) -> None:
            self.tiered.evict(self.tiered.allocator.size)

        @rule(path=sequences)
        def start(self, path: Path) -> None:
            self.tiered.start(path)

        @precondition(lambda self: self.tiered.readers)
        @rule(at_once=st.booleans())
        def read(self, at_once: bool) -> None:
            self.tiered.read(at_once=at_once)

        @precondition(lambda self: self.tiered.readers)
        @rule(index=indices)
        def unlock(self, index: int) -> None:
            self.tiered.unlock(index)

        @precondition(lambda self: self.tiered.readers)
        @rule(index=indices)
        def record_hit(self, index: int) -> None:
            self.tiered.record_hit(index)

        @rule(num_tokens=st.integers(0, 8 * page_size))
        def evict(self, num_tokens: int) -> None:
            self.tiered.evict(num_tokens)

        @rule(num_pages=st.integers(0, 3))
        def evict_host(self, num_pages: int) -> None:
            self.tiered.evict_host(num_pages)

        @precondition(lambda self: self.tiered.disk_path)
        @rule(path=sequences, start=st.integers(0, 3))
        def arrive(self, path: Path, start: int) -> None:
            self.tiered.arrive(path, start)

        @precondition(lambda self: self.tiered.disk_path)
        @rule(path=sequences, rid=st.sampled_from("ab"), is_waiting=st.booleans())
        def prefetch(self, path: Path, rid: str, is_waiting: bool) -> None:
            self.tiered.prefetch(path, rid)
            if is_waiting:
                self.tiered.wait_for_disk()

        @precondition(lambda self: self.tiered.disk_path)
        @rule(rid=st.sampled_from("ab"))
        def cancel_prefetch(self, rid: str) -> None:
            self.tiered.cache.cancel_prefetch(rid)

        @rule()
        def begin_step(self) -> None:
            self.tiered.begin_step()

        @precondition(lambda self: not self.tiered.readers)
        @rule()
        def reset(self) -> None:
            self.tiered.reset()

        @invariant()
        def look(self) -> None:
            self.tiered.look()

        def teardown(self) -> None:
            if hasattr(self, "tiered"):
                self.tiered.end()

    return Machine


@pytest.mark.sample(1)
@pytest.mark.hypothesis
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("write_policy", POLICIES)
def test_pages_are_where_they_must_be_and_have_their_bytes(write_policy: str, page_size: int) -> None:
    run_state_machine_as_test(
        machine(page_size, write_policy), settings=settings(max_examples=examples(60), stateful_step_count=50)
    )


class SoonPrefetched(DiskRadixCache):
    """The disk is asked for single pages, too."""

    least_prefetched = 1


@pytest.mark.sample(1)
@pytest.mark.hypothesis
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("write_policy", POLICIES)
def test_pages_from_a_disk_have_their_bytes(write_policy: str, page_size: int, tmp_path: Any) -> None:
    """The directory outlives each example."""
    run_state_machine_as_test(
        machine(page_size, write_policy, cache_class=SoonPrefetched, disk_path=tmp_path),
        settings=settings(max_examples=examples(60), stateful_step_count=50),
    )


# --- the machine notices ----------------------------------------------------------------------------------------------


class EvictsUnderCopies(HiRadixCache):
    """Its memory is given to others while a copy reads or writes it."""

    def _settle(self, node: Any) -> None:
        pass


class FreesWhileLoading(HiRadixCache):
    """Host pages are free as soon as a load has begun (SGLang issue 31427)."""

    def load_back(self, req: Any) -> None:
        nodes = [node for node in self._path(req.last_host_node or self.root) if not len(node.value)]
        super().load_back(req)
        for node in nodes:
            if len(node.value):
                self._forget_host_pages(node)


class LoadsWhatItEvicts(HiRadixCache):
    """To make room it evicts from the host what it is about to load (SGLang issue 27108)."""

    def _pin(self, node: Any, delta: int) -> None:
        pass


class ForgetsItsCounts(HiRadixCache):
    """A split counts the child on the device twice."""

    def _split(self, node: Any, num_bytes: int, rid: str | None) -> Any:
        upper = super()._split(node, num_bytes, rid)
        upper.parent.num_on_device += len(node.value) > 0
        return upper


class WritesAtOnce(HiRadixCache):
    """It writes what an eviction might need."""

    def _insert(self, key: Any, value: Any, priority: int) -> Any:
        existing, leaf = super()._insert(key, value, priority)
        self._write(self._unbacked(leaf), None)
        return existing, leaf


class DoesNotWait(LatePool):
    """A layer is read although its pages are on their way (SGLang issue 22811)."""

    def wait(self, kv: Any, layer: int | None = None) -> None:
        if layer is not None:
            super().wait(kv, 0)


class WaitsForOneLayer(LatePool):
    """A step in one call begins when its first layer is there."""

    def wait(self, kv: Any, layer: int | None = None) -> None:
        super().wait(kv, layer or 0)


class KeepsOneModel(LatePool):
    """The KV of the draft model stays behind (Mooncake issue 2236)."""

    def load(self, host_pages: Any, device_pages: Any) -> Any:
        self._host_layers[0][:] = 0
        return super().load(host_pages, device_pages)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("part", "write_policy"),
    [
        ({"cache_class": EvictsUnderCopies}, "write_through"),
        ({"cache_class": FreesWhileLoading}, "write_through"),
        ({"cache_class": LoadsWhatItEvicts}, "write_back"),
        ({"cache_class": ForgetsItsCounts}, "write_through"),
        ({"cache_class": WritesAtOnce}, "write_back"),
        ({"pool_class": DoesNotWait}, "write_through"),
        ({"pool_class": WaitsForOneLayer}, "write_back"),
        ({"pool_class": KeepsOneModel}, "write_through"),
    ],
    ids=lambda value: next(iter(value.values())).__name__ if isinstance(value, dict) else value,
)
def test_a_tree_that_errs_is_noticed(part: dict[str, Any], write_policy: str) -> None:
    without_shrinking = settings(
        max_examples=100, stateful_step_count=50, phases=[Phase.generate], print_blob=False, report_multiple_bugs=False
    )
    with pytest.raises((AssertionError, AttributeError, KeyError)):
        run_state_machine_as_test(machine(4, write_policy, **part), settings=without_shrinking)
