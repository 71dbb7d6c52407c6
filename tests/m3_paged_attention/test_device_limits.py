"""Limits of a step by the memory of a GPU and the KV of the model, and engines whose memory is faked."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

import m3_paged_attention
import m4_radix_cache
import m5_chunked_prefill_spec
import m6_multimodal_pd
from m1_single_request.trace_readers import Records
from m3_paged_attention.device_limits import GIB, DeviceLimits, limits_of
from m3_paged_attention.events import KVSized, StepLimits
from tests.support.devices import GPUMemory
from tests.support.engines import greedy, ids

KIB = 2**10
QWEN3_06B, QWEN3_8B, LLAMA_7B, TINY = 112 * KIB, 144 * KIB, 512 * KIB, 4 * KIB
"""Bytes of KV per token."""
PACKAGES = [m3_paged_attention, m4_radix_cache, m5_chunked_prefill_spec, m6_multimodal_pd]


@pytest.mark.parametrize(
    ("gib", "bytes_per_token", "max_model_len", "seqs", "tokens"),
    [
        (8, QWEN3_06B, 40_960, 72, 2048),  # a laptop's GPU: 8 GiB / (1,024 x 112 KiB) = 73.1
        (8, LLAMA_7B, 4096, 16, 2048),  # it has no room for the model at all, and says so when it is loaded
        (24, QWEN3_8B, 40_960, 168, 2048),
        (40, QWEN3_8B, 40_960, 256, 4096),
        (79.2, QWEN3_8B, 40_960, 512, 8192),  # H100
        (179, QWEN3_8B, 40_960, 512, 16_384),  # B200
    ],
)
def test_limits_of_gpus(gib: float, bytes_per_token: int, max_model_len: int, seqs: int, tokens: int) -> None:
    total = int(gib * GIB)
    limits = limits_of(total, bytes_per_token=bytes_per_token, max_model_len=max_model_len)
    assert limits == DeviceLimits(max_num_seqs=seqs, max_num_batched_tokens=tokens, total_bytes=total)


@given(
    total=st.integers(2**28, 2**38),
    more=st.integers(0, 2**38),
    bytes_per_token=st.integers(1, 2**22),
    max_model_len=st.integers(2, 10**6),
)
def test_every_step_has_room_for_all_requests_and_a_larger_gpu_for_no_fewer(
    total: int, more: int, bytes_per_token: int, max_model_len: int
) -> None:
    smaller, larger = (
        limits_of(each, bytes_per_token=bytes_per_token, max_model_len=max_model_len) for each in (total, total + more)
    )
    assert 16 <= smaller.max_num_seqs <= larger.max_num_seqs <= 512 and smaller.max_num_seqs % 8 == 0
    assert 2048 <= smaller.max_num_batched_tokens <= larger.max_num_batched_tokens <= 16_384


def built(
    package: Any, directory: Path, limits: dict[str, int] | None = None, speculative: Any = None, **cache: Any
) -> tuple[Any, Records]:
    """An engine with default sizes, and its trace."""
    records = Records()
    more = {} if speculative is None else {"speculative_config": speculative}
    engine = package.LLMEngine(
        model_config=package.ModelConfig(model=directory, device="cpu", dtype="float32"),
        scheduler_config=package.SchedulerConfig(**(limits or {})),
        cache_config=package.CacheConfig(**cache),
        trace_config=package.TraceConfig(readers=(records,)),
        **more,
    )
    return engine, records


@pytest.mark.parametrize("package", PACKAGES)
def test_an_engine_takes_its_limits_from_the_device_and_traces_them(
    package: Any, tiny_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = 36 * 2**20
    GPUMemory(monkeypatch, total=total, peak=2**20)
    engine, records = built(package, tiny_directory)
    with engine:
        ((_, limits),) = records.of(StepLimits)
        scheduler = engine.engine_core.scheduler
        assert (limits.max_num_seqs, limits.max_num_batched_tokens) == (
            scheduler.max_num_seqs,
            scheduler.max_num_batched_tokens,
        )
        ((_, sized),) = records.of(KVSized)
        fitting = total // (256 * sized.bytes_per_token) // 8 * 8
        assert 16 < limits.max_num_seqs == fitting < 256 and limits.max_num_batched_tokens == 2048
        assert limits.total_bytes == total and "36.0 MiB" in limits.explain()
        prompts = [ids(4, 7 * number) for number in range(40)]
        engine.generate_batch(prompts, greedy(3))
        assert engine.stats().num_steps < 3 * 40 / 16, "more than 16 of them ran at a time"


@pytest.mark.parametrize("package", PACKAGES[2:])
def test_with_drafts_fewer_requests_run_so_that_a_step_has_no_more_rows(
    package: Any, tiny_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    GPUMemory(monkeypatch, total=36 * 2**20, peak=2**20)
    found = {}
    for num_drafts in (0, 2, 30):
        drafts = {"method": "ngram", "num_speculative_tokens": num_drafts} if num_drafts else {}
        engine, records = built(package, tiny_directory, speculative=package.SpeculativeConfig(**drafts))
        with engine:
            found[num_drafts] = records.of(StepLimits)[0][1].max_num_seqs
    assert found[2] == found[0] // 3 // 8 * 8 and found[30] == 16


@pytest.mark.parametrize("package", PACKAGES)
def test_limits_that_are_named_stay(package: Any, tiny_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    GPUMemory(monkeypatch, total=72 * 2**20)
    engine, records = built(package, tiny_directory, {"max_num_seqs": 3, "max_num_batched_tokens": 300})
    with engine:
        ((_, limits),) = records.of(StepLimits)
        assert (limits.max_num_seqs, limits.max_num_batched_tokens) == (3, 300)
        assert engine.engine_core.scheduler.max_num_seqs == 3


@pytest.mark.parametrize("package", PACKAGES)
def test_on_a_cpu_the_limits_are_what_they_were(package: Any, tiny_directory: Path) -> None:
    engine, records = built(package, tiny_directory, kv_cache_memory_bytes=2**22)
    with engine:
        assert not records.of(StepLimits) and engine.engine_core.scheduler.max_num_seqs == 16
        assert engine.engine_core.scheduler.max_num_batched_tokens == (2048 if package in PACKAGES[:2] else 128)


def test_an_engine_alone_leaves_other_programs_their_memory(
    tiny_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mib = 2**20
    GPUMemory(monkeypatch, total=64 * mib, peak=3 * mib, others=(20 * mib,))
    engine, records = built(
        m3_paged_attention, tiny_directory, {"max_num_seqs": 1_000, "max_num_batched_tokens": 1_000}
    )
    with engine:
        ((_, sized),) = records.of(KVSized)
        assert sized.budget_bytes == int(64 * mib * 0.9) - 23 * mib
        assert (sized.total_bytes, sized.peak_bytes) == (64 * mib, 23 * mib)
        assert dataclasses.asdict(sized)["gpu_memory_utilization"] == 0.9
