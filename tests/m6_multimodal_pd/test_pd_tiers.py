"""Prefill and decode engines that keep KV in host memory: one engine's answers, and no page is sent without need."""

from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from m1_single_request.request import FinishAbort
from m1_single_request.tracer import Tracer
from m6_multimodal_pd import CacheConfig, ConfigError, DisaggregationConfig, LLMEngine, ModelConfig
from m6_multimodal_pd.disaggregation.decode_scheduler import DecodeScheduler
from m6_multimodal_pd.disaggregation.prefill_scheduler import PrefillScheduler
from m6_multimodal_pd.disaggregation.runtime.messages import Chunk, Decode, Preallocated
from m6_multimodal_pd.overlap import engine_core
from tests.m4_radix_cache.caches import make_cache
from tests.m4_radix_cache.late_copies import LatePool
from tests.m4_radix_cache.reqs import make_req
from tests.m4_radix_cache.tiers import Counting
from tests.m6_multimodal_pd.late_launcher import LateLauncher
from tests.m6_multimodal_pd.pd_engines import Asked, Group, aggregated, check_alike, setting
from tests.m6_multimodal_pd.seeing import asking, messages
from tests.m6_multimodal_pd.test_pd_schedulers import made
from tests.support.engines import greedy


class LoadsFirst(LateLauncher):
    """Its queue has no order with the copies of pages, which a stream has: a step begins when its loads are there."""

    def _compute(self, launched: Any) -> None:
        for kv in self.runner.host_pool.storages:
            self.runner.host_pool.wait(kv)
        super()._compute(launched)


@pytest.fixture
def late_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_core.OverlapEngineCore, "launcher_class", LoadsFirst)
    monkeypatch.setattr(LoadsFirst, "rng", Random(0))


FROM_ONE = type("Cache", (Counting,), {"least_loaded": 1})


def late(num_pages: int, seed: int = 0, failing: float = 0.0) -> dict[str, Any]:
    """Parts of engines with so many pages on the host, whose copies are late."""
    pool = partial(LatePool, num_pages=num_pages, rng=Random(seed), failing=failing)
    return {"host_kv_pool": pool, "tiered_cache": FROM_ONE}


CONVERSATIONS: Asked = {
    f"{turn}{who}": (
        messages(tuple((who, number) for number in range(turn + 1))),
        greedy(8) if who != "c" else greedy(8, temperature=0.8, seed=4),
        {},
    )
    for turn in range(3)
    for who in ("a", "b", "c", 4)
}


@pytest.fixture(scope="module")
def wanted(seeing_directory: Path) -> Any:
    return aggregated(seeing_directory, CONVERSATIONS)


@pytest.mark.sample(1)
@pytest.mark.parametrize("write_policy", ["write_through", "write_through_selective", "write_back"])
@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
@pytest.mark.parametrize(
    ("page_size", "shape", "num_host_pages", "failing"),
    [(1, (1, 1), 400, 0.0), (4, (1, 2), 100, 0.1), (16, (2, 1), 8, 0.0)],
    ids=str,
)
def test_conversations_that_come_back_from_the_host_go_on_alike(
    seeing_directory: Path,
    late_device: None,
    wanted: Any,
    write_policy: str,
    overlap: bool,
    page_size: int,
    shape: tuple[int, int],
    num_host_pages: int,
    failing: float,
) -> None:
    limits = setting(
        6,
        48,
        tokens=240,
        page_size=page_size,
        enable_overlap=overlap,
        host_memory_bytes=1,
        write_policy=write_policy,
    )
    with Group(seeing_directory, *shape, parts=late(num_host_pages, failing=failing), **limits) as group:
        for turn in range(3):
            asked = {rid: own for rid, own in CONVERSATIONS.items() if rid.startswith(str(turn))}
            check_alike({rid: group.run(asked)[rid] for rid in asked}, {rid: wanted[rid] for rid in asked})
        loaded = [engine.core.stats().num_host_hit_tokens for engine in group.engines.values()]
        assert num_host_pages * page_size < 200 or sum(loaded) > 50, loaded


def test_pages_that_the_decode_side_has_on_its_host_are_not_sent_again(seeing_directory: Path) -> None:
    first, second = messages((("a", 1),)), messages((("a", 1), (2,)))
    others: Asked = {f"o{number}": (asking(number, number + 1, 3), greedy(20), {}) for number in range(4)}
    asked: Asked = {"one": (first, greedy(6), {}), **others, "two": (second, greedy(6), {})}
    with Group(seeing_directory, **setting(8, 32, tokens=128, page_size=4, host_memory_bytes=2**22)) as group:
        for rid, own in asked.items():
            group.run({rid: own})
        check_alike({"two": group.last["two"]}, aggregated(seeing_directory, {"two": asked["two"]}))
        (decode,) = (engine.core for engine in group.of_role("decode"))
        start = group.wire.relayed(Preallocated)[-1].start
        command = group.wire.commands(Decode)[-1]
        assert start > 20 and decode.stats().num_host_hit_tokens > 20
        sent = sum(chunk.num_pages for chunk in group.wire.relayed(Chunk) if chunk.room == command.room)
        assert sent == -(-len(command.job.prompt_token_ids) // 4) - start // 4
        group.check_flushed()


@pytest.mark.exhaustive
def test_the_directory_of_a_group_is_counted_once(seeing_directory: Path, tmp_path: Path) -> None:
    config, limits = ModelConfig(model=seeing_directory, device="cpu", dtype="float32"), setting(4, 64)
    memory = CacheConfig(page_size=4, host_memory_bytes=2**22, disk_path=tmp_path, max_total_tokens=512)
    with LLMEngine(model_config=config, **limits | {"cache_config": memory}) as engine:
        engine.generate(list(range(5, 45)), greedy(8))
    size = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    group = DisaggregationConfig(prefill=1, decode=1, transport="in_process")
    with LLMEngine(model_config=config, disaggregation_config=group, **limits | {"cache_config": memory}) as engine:
        engine.generate([5, 6, 7], greedy(1))  # both engines have started; less than a page
        assert size and engine.stats().disk_bytes == size
        for tier in ("", 0, 1, True, b"host"):
            with pytest.raises(ConfigError, match="is not configured"):
                engine.flush_cache(tier)  # type: ignore[arg-type]


@pytest.mark.parametrize("role", [PrefillScheduler, DecodeScheduler])
def test_who_leaves_a_queue_waits_for_no_disk(role: Any) -> None:
    """Its id may come again; and an engine that receives KV reads none."""
    cache, calls = make_cache(), list[str]()
    cache.prefetch = lambda req: calls.append(f"read for {req.rid}")
    cache.cancel_prefetch = lambda rid: calls.append(f"forget {rid}")
    scheduler = made(role, cache, Tracer())
    req = make_req(1, [5, 6, 7])
    scheduler.add_request(req)
    asked, forgotten = f"read for {req.rid}", f"forget {req.rid}"
    assert calls == [asked, forgotten][: 1 + (role is DecodeScheduler)]
    scheduler.finish_requests([req.rid], FinishAbort())
    scheduler.update_from_output(None, None)
    assert calls[:2] == [asked, forgotten]


@pytest.mark.sample(2)
@pytest.mark.parametrize("is_large", [True, False], ids=["with room on the host", "without"])
@pytest.mark.parametrize("write_policy", ["write_through", "write_back"])
def test_a_retracted_request_comes_back_from_the_host(
    seeing_directory: Path, is_large: bool, write_policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pages are not sent again; without room on the host they are computed again."""
    monkeypatch.setattr("m6_multimodal_pd.disaggregation.decode_scheduler.NUM_RESERVED_TOKENS", 1)
    asked: Asked = {f"r{number}": (asking(number, 3), greedy(40), {}) for number in range(5)}
    limits = {"tokens": 160, "page_size": 4, "host_memory_bytes": 1, "write_policy": write_policy}
    with Group(seeing_directory, parts=late(400 if is_large else 1), **setting(8, 64, **limits)) as group:
        check_alike(group.run(asked), aggregated(seeing_directory, asked))
        (decode,) = (engine.core for engine in group.of_role("decode"))
        stats = decode.stats()
        assert stats.num_retractions and not group.num_retries
        assert (stats.num_host_hit_tokens > stats.num_prompt_tokens) == is_large, stats
        assert (stats.num_prompt_tokens > 40) != is_large
        for command in group.wire.commands(Decode):
            chunks = [chunk for chunk in group.wire.relayed(Chunk) if chunk.room == command.room]
            pages = [page for c in chunks for page in range(c.first_page, c.first_page + c.num_pages)]
            assert len(pages) == len(set(pages))
