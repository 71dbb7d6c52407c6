"""Five bugs that users of real engines met in their tiers, and why they are none here: each check also fails.

Each check is a function of the parts. It passes for ours, and fails for a part with the bug.
"""

import threading
from pathlib import Path as Path_
from typing import Any

import pytest

from m1_single_request.errors import EngineDeadError
from m4_radix_cache.mem_cache.allocator import Slots
from m4_radix_cache.mem_cache.hiradix_cache import HiRadixCache
from m4_radix_cache.mem_cache.host_kv_pool import HostKVPool
from tests.m4_radix_cache.engines import MakeEngine, Remembered, greedy, ids, setting
from tests.m4_radix_cache.late_copies import LatePool
from tests.m4_radix_cache.test_tier_states import (
    DoesNotWait,
    FreesWhileLoading,
    KeepsOneModel,
    LoadsWhatItEvicts,
    SoonPrefetched,
    WaitsForOneLayer,
)
from tests.m4_radix_cache.tiered_pair import VOCAB_SIZE, FakeReq, Path, Sizes, Tiered

A: Path = None, tuple(range(12))
B: Path = None, tuple(range(20, 32))
C: Path = None, tuple(range(40, 52))


class Slow(LatePool):
    """No copy goes on before somebody waits for it."""

    def __init__(self, storages: Any, *, rng: Any, **more: Any) -> None:
        class Never:
            def random(self) -> float:
                return 0.99

        super().__init__(storages, rng=Never(), **more)  # type: ignore[arg-type]


def on_host(tiered: Tiered, path: Path) -> Tiered:
    """Put this path on the host only."""
    tiered.insert(path)
    for _ in range(3):
        tiered.begin_step()
    tiered.evict(tiered.allocator.size)
    return tiered


# --- (i) host memory is used again while it is loaded from ------------------------------------------------------------


def check_host_pages_stay_while_they_are_loaded(cache_class: type[HiRadixCache]) -> None:
    tiered = on_host(Tiered(Sizes(num_pages=8, num_host_pages=4), cache_class, Slow), A)
    tiered.start(A)  # the load is under way
    tiered.insert(B)  # to be written, and the host has room for one page
    tiered.read()
    tiered.look()
    assert len(tiered.readers[0].prefix_indices) == 12


def test_host_pages_are_not_used_again_while_they_are_loaded() -> None:
    check_host_pages_stay_while_they_are_loaded(HiRadixCache)
    with pytest.raises(AssertionError):
        check_host_pages_stay_while_they_are_loaded(FreesWhileLoading)


# --- (ii) a reader does not wait --------------------------------------------------------------------------------------


def check_readers_wait(pool_class: type, at_once: bool) -> None:
    tiered = on_host(Tiered(Sizes(), pool_class=pool_class), A)
    tiered.start(A)
    tiered.read(at_once=at_once)
    tiered.look()


class DraftsAtOnce(LatePool):
    """The draft model reads before its KV is there."""

    def wait(self, kv: Any, layer: int | None = None) -> None:
        if kv is not self.storages[0]:
            super().wait(kv, layer)


@pytest.mark.parametrize(
    ("bug", "at_once"), [(DoesNotWait, False), (WaitsForOneLayer, True), (DraftsAtOnce, False), (DraftsAtOnce, True)]
)
def test_each_layer_waits_for_its_kv(bug: type, at_once: bool) -> None:
    check_readers_wait(Slow, at_once)
    with pytest.raises(AssertionError, match="other bytes"):
        check_readers_wait(type("Wrong", (bug, Slow), {}), at_once)


def test_a_layer_waits_for_no_later_one() -> None:
    tiered = on_host(Tiered(Sizes(), pool_class=Slow), A)
    tiered.start(A)
    (job,) = tiered.cache._jobs
    first, second = tiered.storages
    tiered.pool.arriving(first, None).layer(0)
    assert job._done == 1
    tiered.pool.arriving(second, None).layer(0)
    assert job._done == 2 < len(job.layers)


def check_loads_wait_for_the_step_in_flight(pool_class: type) -> None:
    """A page that a retracted request has left may still be written: the load comes after that."""
    tiered = on_host(Tiered(Sizes(), pool_class=pool_class), A)

    def step_in_flight() -> None:
        for planes in tiered.pool._device_layers:
            planes[:] = 0x55

    tiered.pool.before_load = step_in_flight
    tiered.start(A)
    tiered.read()


class LoadsAtOnce(LatePool):
    """A load does not wait for the step in flight."""

    def load(self, host_pages: Any, device_pages: Any) -> Any:
        late, self.before_load = self.before_load, lambda: None
        job = super().load(host_pages, device_pages)
        job.wait()
        late()
        return job


def test_a_load_waits_for_the_step_in_flight() -> None:
    check_loads_wait_for_the_step_in_flight(LatePool)
    with pytest.raises(AssertionError, match="other bytes"):
        check_loads_wait_for_the_step_in_flight(LoadsAtOnce)


# --- (iii) a load evicts what it loads --------------------------------------------------------------------------------


def check_loads_with_both_memories_full(cache_class: type[HiRadixCache]) -> None:
    sizes = Sizes(num_pages=6, num_host_pages=3, write_policy="write_back", eviction_policy="lru")
    tiered = on_host(Tiered(sizes, cache_class, Slow), A)
    tiered.insert(B)
    tiered.insert(C)
    assert not tiered.allocator.available_size() and not tiered.pool.available()
    tiered.start(A)
    tiered.read()
    tiered.look()
    assert len(tiered.readers[0].prefix_indices) == 12


def test_a_load_does_not_evict_what_it_loads() -> None:
    check_loads_with_both_memories_full(HiRadixCache)
    with pytest.raises((AssertionError, AttributeError)):
        check_loads_with_both_memories_full(LoadsWhatItEvicts)


# --- (iv) a buffer is missing -----------------------------------------------------------------------------------------


def check_both_models_come_back(pool_class: type) -> None:
    tiered = on_host(Tiered(Sizes(), pool_class=pool_class), A)
    tiered.start(A)
    tiered.read()


def test_the_kv_of_both_models_comes_back() -> None:
    check_both_models_come_back(LatePool)
    with pytest.raises(AssertionError, match="other bytes"):
        check_both_models_come_back(KeepsOneModel)


class ForgetsScales(HostKVPool):
    """The numbers come back, their scales do not."""

    def load(self, host_pages: Slots, device_pages: Slots) -> Any:
        spec = self.storages[0].config.spec
        width = spec.block_size * spec.num_kv_heads * spec.head_dim
        for layer in self._host_layers:
            layer[..., width:] = 0
        return super().load(host_pages, device_pages)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "bfloat16", "int8", "fp8"])
def test_a_hit_on_the_host_has_the_tokens_of_one_on_the_device(make_engine: MakeEngine, kv_cache_dtype: Any) -> None:
    prompt, params = ids(40), greedy(8)

    def answers(pool: type, **tiers: Any) -> list[list[int]]:
        with make_engine(
            {"host_kv_pool": pool}, **setting(tokens=64, kv_cache_dtype=kv_cache_dtype, **tiers)
        ) as engine:
            first = engine.generate(prompt, params)
            engine.generate(ids(40, 100), params)
            again = engine.generate(prompt, params)
            assert bool(engine.stats().num_host_hit_tokens) == bool(tiers)
            return [first.token_ids, again.token_ids]

    tiers = {"host_memory_bytes": 2**20}
    wanted = answers(HostKVPool)
    assert answers(HostKVPool, **tiers) == wanted
    if kv_cache_dtype in ("int8", "fp8"):
        assert answers(ForgetsScales, **tiers) != wanted


# --- S5 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("write_policy", ["write_through", "write_through_selective", "write_back"])
def test_what_comes_back_from_the_host_is_not_computed(
    make_engine: MakeEngine, m1: Remembered, write_policy: Any
) -> None:
    """Only the tail that no page covers is computed; `write_back` writes nothing before the first eviction."""
    prompt, params = ids(42), greedy(6)
    with make_engine(**setting(tokens=64, host_memory_bytes=2**20, write_policy=write_policy)) as engine:
        assert engine.generate(prompt, params).token_ids == m1.generate(prompt, params).token_ids
        assert bool(engine.stats().host_bytes) == (write_policy == "write_through")
        assert engine.generate(prompt, params).token_ids == m1.generate(prompt, params).token_ids
        assert bool(engine.stats().host_bytes) == (write_policy != "write_back")
        engine.generate(ids(42, 100), params)
        before = engine.stats()
        assert before.host_bytes and before.num_evicted_tokens
        assert engine.generate(prompt, params).token_ids == m1.generate(prompt, params).token_ids
        after = engine.stats()
        assert after.num_prompt_tokens - before.num_prompt_tokens == 42 - 40
        assert after.num_host_hit_tokens - before.num_host_hit_tokens == 40


def test_a_use_that_ends_twice_is_an_error() -> None:
    tiered = on_host(Tiered(Sizes()), A)
    node = tiered.match(A).last_host_node
    tiered.cache._pin(node, 1)
    tiered.cache._pin(node, -1)
    with pytest.raises(AssertionError, match="no such use"):
        tiered.cache._pin(node, -1)


@pytest.mark.parametrize("num_tokens", [8, 12])
def test_few_tokens_on_the_host_are_computed(num_tokens: int) -> None:
    tiered = on_host(Tiered(Sizes(least_loaded=10)), A)
    path = None, A[1][:num_tokens]
    assert tiered.match(path).host_hit_length == (0 if num_tokens < 10 else num_tokens)


# --- copies that fail or are interrupted ------------------------------------------------------------------------------


def test_a_load_that_fails_is_repeated_and_one_that_fails_again_ends_the_engine() -> None:
    tiered = on_host(Tiered(Sizes(), pool_class=Slow), A)
    tiered.pool.copiers["load"].failing = 1.0
    tiered.start(A)
    tiered.read()  # copied by the waiting thread
    tiered.look()
    tiered.unlock(0)
    tiered.evict(tiered.allocator.size)
    tiered.start(A)
    (job,) = tiered.cache._jobs

    def fails(layer: int) -> None:
        raise OSError("unreadable")

    job.copy_layer = fails
    with pytest.raises(EngineDeadError, match="unreadable"):
        tiered.read()
    tiered.cache.reset()  # it is raised once


def test_an_interrupted_wait_loses_no_copy() -> None:
    """A second Ctrl-C while the engine waits: the engine ends, and the copy is waited for before memory is reused."""
    tiered = Tiered(Sizes(), pool_class=Slow)
    tiered.insert(A)
    (job,) = tiered.cache._jobs
    wait = job.wait

    def interrupted(layer: int | None = None) -> None:
        job.wait = wait
        raise KeyboardInterrupt

    job.wait = interrupted
    with pytest.raises(KeyboardInterrupt):
        for _ in range(2):
            tiered.begin_step()
    assert not job.is_done() and [job] == list(tiered.cache._jobs)
    tiered.reset()
    assert job.is_done()


def test_pages_that_the_disk_releases_are_never_counted_out() -> None:
    """Another thread moves them from one list to the other."""
    pool = Tiered(Sizes(num_host_pages=4)).pool
    pages = pool.alloc(2)
    pool.hold(pages)
    pool.free(pages)
    seen: list[int] = []
    threads: list[threading.Thread] = []

    class Watched(set[int]):
        def remove(self, page: int) -> None:
            super().remove(page)
            threads.append(threading.Thread(target=lambda: seen.append(pool.available())))
            threads[-1].start()
            threads[-1].join(0.01)

    pool._leaving = Watched(pool._leaving)
    for page in pages.tolist():
        pool.release(page)
    for thread in threads:
        thread.join()
    assert seen == [4, 4]


def test_what_stands_behind_an_image_is_not_found_behind_the_text_before_it(tmp_path: Path_) -> None:
    """Its number is of this process, so no page behind it has a name; nor may it take that of another one."""
    text, image, more = tuple(range(8)), (VOCAB_SIZE + 1,) * 4, tuple(range(20, 28))
    tiered = Tiered(Sizes(), SoonPrefetched, disk_path=tmp_path)
    tiered.insert((None, text + more))
    tiered.wait_for_disk()
    tiered.reset()
    tiered.insert((None, text + image))
    tiered.prefetch((None, text + image + more), "r")
    assert not tiered.cache.is_waiting(FakeReq("r"))
    tiered.reset()
    tiered.prefetch((None, text + more), "r")
    tiered.wait_for_disk()
    assert tiered.match((None, text + more)).host_hit_length == 16
    tiered.look()
    tiered.end()
