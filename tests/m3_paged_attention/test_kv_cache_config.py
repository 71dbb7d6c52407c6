"""How many blocks there are: the arithmetic, where the number comes from, and errors that say what would work."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from m1_single_request.errors import ConfigError
from m1_single_request.tracer import Tracer
from m3_paged_attention import LLMEngine, ModelConfig, SchedulerConfig, kv_cache_config
from m3_paged_attention.config import CacheConfig
from m3_paged_attention.events import KVSized
from m3_paged_attention.kv_cache_config import (
    check_cache_config,
    kv_budget,
    longest_request,
    needs_profile,
    size_kv_cache,
)
from m3_paged_attention.kv_cache_spec import KVCacheConfig, KVCacheSpec, MemoryProfile
from tests.support.engines import Recorder

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
MIB, GIB = 2**20, 2**30
LLAMA_7B = KVCacheSpec(block_size=16, num_layers=32, num_kv_heads=32, head_dim=128, dtype=torch.float16)
SMALL = KVCacheSpec(block_size=16, num_layers=4, num_kv_heads=2, head_dim=64, dtype=torch.float32)  # 64 KiB per block
H100 = MemoryProfile(total_bytes=80 * GIB, peak_bytes=16 * GIB)


@pytest.fixture(autouse=True)
def plenty(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """A machine with so many bytes: a terabyte, unless a test sets another number."""

    def set_available(num_bytes: int | None) -> None:
        monkeypatch.setattr(kv_cache_config, "available_memory", lambda device: num_bytes)

    set_available(2**40)
    return set_available


def sized(
    spec: KVCacheSpec = SMALL,
    *,
    mode: Any = "recompute",
    device: torch.device = CPU,
    max_model_len: int = 2048,
    max_num_seqs: int | None = 256,
    num_requests: int = 1,
    swap_space_bytes: int | None = None,
    profile: MemoryProfile | None = None,
    tracer: Tracer | None = None,
    **settings: Any,
) -> KVCacheConfig:
    """What comes of these settings; `num_requests` run at a time."""
    return size_kv_cache(
        spec,
        budget=kv_budget(
            spec,
            size_setting="num_blocks",
            cache_config=CacheConfig(block_size=spec.block_size, **settings),
            device=device,
            max_model_len=max_model_len,
            max_num_seqs=num_requests,
            profile=profile,
        ),
        device=device,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        swap_space_bytes=swap_space_bytes if mode == "swap" else 0,
        size_setting=("num_blocks", 1),
        tracer=tracer or Tracer(),
    )


def sizing_of(**settings: Any) -> KVSized:
    """The event of the sizing."""
    tracer = Tracer()
    recorder = Recorder(tracer)
    sized(tracer=tracer, **settings)
    (event,) = recorder.events("kv_sized")
    return event  # type: ignore[no-any-return]


# --- one block --------------------------------------------------------------------------------------------------------


def test_16384_tokens_of_a_7b_model_take_exactly_8_gib() -> None:
    assert LLAMA_7B.blocks_for(16384) * LLAMA_7B.block_bytes == 8 * GIB
    assert [LLAMA_7B.blocks_for(n) for n in (0, 1, 16, 17, 32)] == [0, 1, 1, 2, 2], "the last block counts whole"
    config = KVCacheConfig(spec=LLAMA_7B, num_blocks=1024)
    assert config.num_blocks * LLAMA_7B.block_size == 16384
    assert config.num_bytes == 8 * GIB + LLAMA_7B.block_bytes, "block 0 comes on top"


# --- where the number comes from --------------------------------------------------------------------------------------


def test_a_budget_in_bytes_is_divided_by_the_bytes_of_a_block_and_block_0_is_taken_off() -> None:
    assert sized(LLAMA_7B, kv_cache_memory_bytes=8 * GIB + LLAMA_7B.block_bytes).num_blocks == 1024
    assert sized(LLAMA_7B, kv_cache_memory_bytes=8 * GIB + LLAMA_7B.block_bytes - 1).num_blocks == 1023


def test_on_a_cpu_the_budget_is_512_mib_unless_something_else_is_said() -> None:
    assert sized().num_bytes == 512 * MIB
    assert sized(max_model_len=2).num_blocks == 256


QWEN3 = {name: dataclasses.replace(LLAMA_7B, num_layers=layers, num_kv_heads=8, dtype=torch.bfloat16)
         for name, layers in (("0.6B", 28), ("1.7B", 28), ("8B", 36), ("VL-2B", 28))}  # fmt: skip


def default_budget(name: str, *, max_model_len: int, max_num_seqs: int = 16, num_shares: int = 1) -> Any:
    """The KV memory of a model on a CPU if no setting names it."""
    return kv_budget(
        QWEN3[name],
        size_setting="num_blocks",
        cache_config=CacheConfig(),
        device=CPU,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        num_shares=num_shares,
    )


@pytest.mark.parametrize(
    ("name", "positions", "seqs", "gib", "tokens"),
    [
        ("0.6B", 40_960, 16, 24, 37_440),  # 4 GiB, in pages of 16 tokens of 112 KiB; block 0 comes on top
        ("8B", 40_960, 16, 24, 29_120),
        ("0.6B", 40_960, 16, 8, 18_720),  # a quarter of the machine's memory
        ("0.6B", 40_960, 16, 1, 4_656),  # 512 MiB, block 0 included
        ("8B", 8192, 1, 64, 8192),  # no more than the requests need
        ("8B", 8192, 3, 64, 24_576),
    ],
)
def test_on_a_cpu_the_default_grows_with_the_requests_up_to_4_gib_or_a_quarter_of_the_memory(
    monkeypatch: pytest.MonkeyPatch, name: str, positions: int, seqs: int, gib: int, tokens: int
) -> None:
    monkeypatch.setattr(kv_cache_config, "physical_memory", lambda: gib * GIB)
    budget = default_budget(name, max_model_len=positions, max_num_seqs=seqs)
    assert longest_request(QWEN3[name], budget) == tokens


@pytest.mark.parametrize("gib", [64, 8])
def test_on_a_cpu_what_the_default_grows_by_is_shared_out(monkeypatch: pytest.MonkeyPatch, gib: int) -> None:
    monkeypatch.setattr(kv_cache_config, "physical_memory", lambda: gib * GIB)
    budgets = [default_budget("0.6B", max_model_len=40_960, num_shares=shares).num_bytes for shares in (1, 2, 8)]
    grown = min(4 * GIB, gib * GIB // 4) - 512 * MIB
    base = 512 * MIB + QWEN3["0.6B"].block_bytes
    assert [budget - base for budget in budgets] == [grown, grown // 2, grown // 8]


def test_on_a_cpu_the_default_is_the_same_and_starts_whatever_else_runs_at_the_moment(
    monkeypatch: pytest.MonkeyPatch, plenty: Callable[[int | None], None]
) -> None:
    """Only tokens take it. What is less than the 512 MiB of a small model is refused as before."""
    monkeypatch.setattr(kv_cache_config, "physical_memory", lambda: 16 * GIB)
    large = {"spec": QWEN3["0.6B"], "max_model_len": 8192, "num_requests": 16}
    whole = sized(**large)
    assert whole.num_bytes > 3 * GIB
    plenty(600 * MIB)
    assert sized(**large) == whole
    assert sized(mode="swap", **large).num_host_blocks == whole.num_blocks
    for named in ({"kv_cache_memory_bytes": whole.num_bytes}, {"num_blocks": whole.num_blocks}):
        with pytest.raises(ConfigError, match=r"of which 600.0 MiB is available"):
            sized(**large, **named)
    with pytest.raises(ConfigError, match=r"of which 600.0 MiB is available"):
        sized(mode="swap", swap_space_bytes=GIB, **large)
    plenty(500 * MIB)
    with pytest.raises(ConfigError, match=r"of which 500.0 MiB is available. Use num_blocks of at most 284$"):
        sized(**large)


def test_no_more_blocks_are_made_than_the_requests_can_fill() -> None:
    assert sized(max_num_seqs=3, max_model_len=33).num_blocks == 3 * 3
    assert sized(max_num_seqs=1, max_model_len=32, kv_cache_memory_bytes=GIB).num_blocks == 2


def test_all_blocks_that_fit_are_made_where_more_than_the_requests_can_use_them() -> None:
    assert sized(max_num_seqs=None, max_model_len=32, kv_cache_memory_bytes=GIB).num_blocks == GIB // (64 * 1024) - 1
    assert "never fill" not in sizing_of(max_num_seqs=None, max_model_len=32).explain()


def test_on_cuda_the_budget_is_a_share_of_the_device_less_all_else() -> None:
    config = sized(LLAMA_7B, device=CUDA, profile=H100, gpu_memory_utilization=0.5, max_num_seqs=10**6)
    assert config.num_blocks == 24 * 128 - 1
    assert sized(LLAMA_7B, device=CUDA, profile=H100, max_num_seqs=10**6).num_blocks == 56 * 128 - 1, "0.9 by itself"


def test_a_profiling_run_is_needed_only_where_a_share_of_the_device_is_the_limit() -> None:
    assert needs_profile(CacheConfig(), CUDA) and needs_profile(CacheConfig(gpu_memory_utilization=0.5), CUDA)
    assert not needs_profile(CacheConfig(num_blocks=1), CUDA)
    assert not needs_profile(CacheConfig(kv_cache_memory_bytes=1), CUDA)
    assert not needs_profile(CacheConfig(), CPU)
    assert sized(device=CUDA, kv_cache_memory_bytes=512 * MIB).num_blocks == 8191


def test_host_blocks_are_as_many_as_the_device_s_or_what_the_swap_space_holds() -> None:
    assert sized(num_blocks=7).num_host_blocks == 0
    assert sized(num_blocks=7, mode="swap").num_host_blocks == 7
    config = sized(num_blocks=7, mode="swap", swap_space_bytes=3 * SMALL.block_bytes - 1)
    assert (config.num_host_blocks, config.num_host_bytes) == (2, 2 * SMALL.block_bytes)
    assert sized(num_blocks=7, mode="swap", swap_space_bytes=9 * SMALL.block_bytes).num_host_blocks == 9


# --- what cannot work -------------------------------------------------------------------------------------------------


def test_a_budget_without_room_for_anything_names_no_length() -> None:
    for num_bytes in (1, SMALL.block_bytes, 2 * SMALL.block_bytes - 1):
        with pytest.raises(ConfigError, match=r"kv_cache_memory_bytes of at least 8,454,144$") as caught:
            sized(kv_cache_memory_bytes=num_bytes)
        assert "max_model_len of at most" not in str(caught.value)
    with pytest.raises(ConfigError) as caught:  # one block of one token: no request is so short
        sized(dataclasses.replace(SMALL, block_size=1), kv_cache_memory_bytes=2 * SMALL.bytes_per_token)
    assert "max_model_len of at most" not in str(caught.value)


@given(
    block_size=st.sampled_from([1, 4, 16, 128]),
    num_bytes=st.integers(1, 40 * SMALL.block_bytes),
    max_model_len=st.integers(2, 1000),
)
def test_what_the_error_names_works_and_one_more_does_not(block_size: int, num_bytes: int, max_model_len: int) -> None:
    spec = dataclasses.replace(SMALL, block_size=block_size)
    try:
        assert sized(spec, kv_cache_memory_bytes=num_bytes, max_model_len=max_model_len).num_bytes <= num_bytes
    except ConfigError as error:
        *_, needed = str(error).split("kv_cache_memory_bytes of at least ")
        enough = int(needed.replace(",", ""))
        assert sized(spec, kv_cache_memory_bytes=enough, max_model_len=max_model_len)
        with pytest.raises(ConfigError):
            sized(spec, kv_cache_memory_bytes=enough - 1, max_model_len=max_model_len)
        if "max_model_len of at most" in str(error):
            longest = int(str(error).split("max_model_len of at most ")[1].split(" or ")[0].replace(",", ""))
            assert sized(spec, kv_cache_memory_bytes=num_bytes, max_model_len=longest)
            with pytest.raises(ConfigError):
                sized(spec, kv_cache_memory_bytes=num_bytes, max_model_len=longest + 1)


def test_too_small_a_share_names_the_one_that_suffices() -> None:
    def on_gpu(share: float, peak_bytes: int = 16 * GIB) -> KVCacheConfig:
        profile = MemoryProfile(total_bytes=80 * GIB, peak_bytes=peak_bytes)
        return sized(LLAMA_7B, device=CUDA, profile=profile, gpu_memory_utilization=share, max_model_len=16384)

    with pytest.raises(ConfigError, match=r"gpu_memory_utilization leaves 0 bytes.* of at least 0\.301$") as caught:
        on_gpu(0.1)
    assert "max_model_len of at most" not in str(caught.value)
    assert on_gpu(0.301).num_blocks >= 1024
    with pytest.raises(ConfigError, match=r"max_model_len of at most 8,176 or gpu_memory_utilization of at least"):
        on_gpu(0.25)
    with pytest.raises(ConfigError, match="a smaller model"):
        on_gpu(0.9, 79 * GIB)


def test_a_share_of_a_gpu_and_swap_space_are_taken_where_they_have_an_effect() -> None:
    check_cache_config(CacheConfig(gpu_memory_utilization=0.5), preemption_mode="recompute", device=CUDA)
    check_cache_config(CacheConfig(swap_space_bytes=100000), preemption_mode="swap", device=CPU)


def test_swap_space_holds_at_least_one_block() -> None:
    with pytest.raises(ConfigError, match="swap_space_bytes=65535 is less than one block: 65,536 bytes"):
        sized(mode="swap", swap_space_bytes=65535)


def test_more_than_the_machine_has_is_refused_before_it_is_asked_for(plenty: Callable[[int | None], None]) -> None:
    plenty(10 * SMALL.block_bytes)
    with pytest.raises(ConfigError, match=r"11 blocks on cpu takes 704.0 KiB of cpu memory.*num_blocks of at most 9$"):
        sized(num_blocks=10)
    assert sized(num_blocks=9).num_blocks == 9
    with pytest.raises(ConfigError, match="num_blocks of at most 9"):
        sized()
    with pytest.raises(ConfigError, match=r"6 blocks on cpu and 5 on the host takes .* num_blocks or swap_space_bytes"):
        sized(num_blocks=5, mode="swap")
    assert sized(num_blocks=5, mode="swap", swap_space_bytes=4 * SMALL.block_bytes).num_host_blocks == 4
    plenty(SMALL.block_bytes)
    with pytest.raises(ConfigError, match=r"Use a smaller num_blocks$"):
        sized(num_blocks=1)
    plenty(None)  # the number is unknown
    assert sized(num_blocks=10**9).num_blocks == 10**9


def test_a_share_of_a_gpu_was_measured_and_is_not_doubted(plenty: Callable[[int | None], None]) -> None:
    plenty(0)
    assert sized(device=CUDA, profile=H100).num_blocks > 0


# --- engines ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cache", "message"),
    [({"num_blocks": 10**15}, "Use num_blocks of at most"), ({"swap_space_bytes": 10**18}, "swap_space_bytes")],
    ids=str,
)
def test_an_engine_refuses_more_memory_than_this_machine_has(
    monkeypatch: pytest.MonkeyPatch, tiny_directory: Path, cache: dict[str, Any], message: str
) -> None:
    monkeypatch.undo()
    model_config = ModelConfig(model=tiny_directory, device="cpu", dtype="float32")
    limits = SchedulerConfig(preemption_mode="swap" if "swap_space_bytes" in cache else "recompute")
    with pytest.raises(ConfigError, match=message):
        LLMEngine(model_config=model_config, cache_config=CacheConfig(**cache), scheduler_config=limits)


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        ({"gpu_memory_utilization": 0.5}, "gpu_memory_utilization=0.5 needs a GPU, and the device is cpu"),
        ({"swap_space_bytes": 2**20}, "swap_space_bytes=1048576 has no effect with preemption_mode='recompute'"),
    ],
    ids=str,
)
def test_a_size_without_effect_is_refused_before_anything_is_loaded(cache: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLMEngine(model_config=ModelConfig(model="/nowhere", device="cpu"), cache_config=CacheConfig(**cache))
