"""The public face as a user writes it. mypy reads this file; nothing runs it.

Every `assert_type` is what a user's editor shows. Every `type: ignore` marks a mistake that the types must catch: if
they stop catching it, mypy reports the comment as unused.
"""

from pathlib import Path
from typing import Any, assert_type

from m1_single_request import (
    PARTS,
    ChromeTraceReader,
    CompletionOutput,
    ConsoleReader,
    EngineStats,
    JsonlReader,
    LLMEngine,
    Logprob,
    ModelConfig,
    RequestMetrics,
    RequestOutput,
    RequestStream,
    SamplingParams,
    TraceConfig,
    Tracer,
    TraceReader,
    TraceRecord,
)
from m2_continuous_batching import (
    PARTS as M2_PARTS,
    EngineStats as BatchStats,
    LLMEngine as BatchEngine,
    SchedulerConfig,
)
from m3_paged_attention import (
    PARTS as M3_PARTS,
    CacheConfig,
    EngineStats as BlockStats,
    KVCapacityError,
    LLMEngine as PagedEngine,
    ModelConfig as OwnModelConfig,
    SchedulerConfig as PagedSchedulerConfig,
)
from m4_radix_cache import (
    PARTS as M4_PARTS,
    CacheConfig as PrefixCacheConfig,
    EngineStats as CacheStats,
    LLMEngine as RadixEngine,
    SchedulerConfig as PolicySchedulerConfig,
)
from m6_multimodal_pd import (
    PARTS as M6_PARTS,
    EngineStats as SeeingStats,
    InvalidMediaError,
    LLMEngine as SeeingEngine,
    MultimodalConfig,
    SchedulerConfig as PieceSchedulerConfig,
    SpeculativeConfig,
)


def whole_answers(engine: LLMEngine) -> None:
    """`generate`, `generate_batch` and `chat` return finished outputs."""
    params = SamplingParams(max_tokens=8, temperature=0.7, stop=["."], logit_bias={3: -1.0}, logprobs=2)
    assert_type(engine.generate("text", params), RequestOutput)
    assert_type(engine.generate([1, 2, 3]), RequestOutput)
    assert_type(engine.generate_batch(["one", [2, 3]], params), dict[str, RequestOutput])
    assert_type(engine.generate_batch(["one", "two"], [params, SamplingParams()]), dict[str, RequestOutput])
    assert_type(engine.generate_batch(["one", "two"], params, progress=True), dict[str, RequestOutput])
    messages = [{"role": "user", "content": "What is a KV cache?"}]
    assert_type(engine.chat(messages, params, chat_template_kwargs={"enable_thinking": False}), RequestOutput)
    assert_type(engine.chat_prompt(messages), list[int])


def as_it_comes(engine: LLMEngine) -> None:
    """`stream` iterates over outputs; `step` reports what `add_request` queued."""
    with engine.stream("text", SamplingParams(seed=1), request_id="mine") as outputs:
        assert_type(outputs, RequestStream)
        for output in outputs:
            assert_type(output, RequestOutput)
    request_id = engine.add_request("text")
    assert_type(request_id, str)
    while engine.has_unfinished_requests():
        assert_type(engine.step(), dict[str, RequestOutput])
    assert_type(engine.abort_request(request_id), bool)
    assert_type(engine.stats(), EngineStats)


def outputs(output: RequestOutput) -> None:
    """What stands in an output."""
    assert_type(output.text, str)
    assert_type(output.token_ids, tuple[int, ...])
    assert_type(output.finish_reason, str | None)
    assert_type(output.outputs, tuple[CompletionOutput, ...])
    assert_type(output.outputs[0].stop_reason, int | str | None)
    assert_type(output.outputs[0].logprobs, tuple[dict[int, Logprob], ...] | None)
    assert_type(output.metrics, RequestMetrics)
    assert_type(output.metrics.time_to_first_token, float | None)
    assert_type(output.error, BaseException | None)


class Counter:
    """A reader of the trace needs no base class: `read` and `close` make it one."""

    def __init__(self) -> None:
        self.kinds: list[str] = []

    def read(self, record: TraceRecord) -> None:
        """Keep the event's kind."""
        self.kinds.append(record.event.kind)

    def close(self) -> None:
        """Nothing to write."""


def configured() -> None:
    """An engine with a configuration, parts of its own and readers."""
    parts: dict[str, Any] = PARTS | {"sampler": PARTS["sampler"]}
    model, trace = ModelConfig(model=Path("somewhere"), dtype="bfloat16"), TraceConfig(console="summary")
    with LLMEngine(model_config=model, trace_config=trace, parts=parts) as engine:
        assert_type(engine, LLMEngine)
        assert_type(engine.tracer, Tracer)
        readers: list[TraceReader] = [Counter(), ConsoleReader(), JsonlReader("a.jsonl"), ChromeTraceReader("a.json")]
        for reader in readers:
            engine.tracer.attach(reader)
    assert_type(LLMEngine("somewhere"), LLMEngine)


def batched() -> None:
    """m2's engine has m1's face and one more configuration."""
    limits = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=512, execution="per_request")
    parts: dict[str, Any] = M2_PARTS | {"kv_manager": M2_PARTS["kv_manager"]}
    with BatchEngine("somewhere", scheduler_config=limits, parts=parts) as engine:
        assert_type(engine, BatchEngine)
        assert_type(engine.generate_batch([[1], [2]], progress=False), dict[str, RequestOutput])
        assert_type(engine.generate_batch([[1], [2]], progress=None), dict[str, RequestOutput])
        whole_answers(engine)
        as_it_comes(engine)
        stats = engine.stats()
        if isinstance(stats, BatchStats):
            assert_type(stats.padded_tokens, int)
            assert_type(stats.kv_bytes_reserved, int)
    assert_type(SchedulerConfig().max_num_batched_tokens, int | None)


def paged() -> None:
    """m3's engine has m1's face, too; its model configuration names the kernels, and there is one for the memory."""
    model = OwnModelConfig(model="somewhere", attention_backend="torch", load_format="dummy")
    limits = PagedSchedulerConfig(max_num_seqs=8, preemption_mode="swap")
    cache = CacheConfig(block_size=32, num_blocks=100, swap_space_bytes=2**20)
    parts: dict[str, Any] = M3_PARTS | {"preemption": M3_PARTS["preemption"]}
    with PagedEngine(model_config=model, scheduler_config=limits, cache_config=cache, parts=parts) as engine:
        assert_type(engine, PagedEngine)
        output = engine.generate("text", SamplingParams(n=3, temperature=1.0))
        assert_type([completion.text for completion in output.outputs], list[str])
        whole_answers(engine)
        as_it_comes(engine)
        stats = engine.stats()
        if isinstance(stats, BlockStats):
            assert_type(stats.num_free_blocks, int)
            assert_type(stats.num_preemptions, int)
    assert_type(cache.gpu_memory_utilization, float | None)
    assert_type(KVCapacityError("too long"), KVCapacityError)


def shared() -> None:
    """m4's engine: m3's model configuration, another memory, and what a request may come with."""
    limits = PolicySchedulerConfig(max_num_seqs=8, schedule_policy="lpm", schedule_conservativeness=0.5)
    cache = PrefixCacheConfig(page_size=4, prefix_cache="hash", eviction_policy="lru", max_total_tokens=400, debug=True)
    parts: dict[str, Any] = M4_PARTS | {"prefix_cache": M4_PARTS["prefix_cache"]}
    with RadixEngine(model_config=OwnModelConfig(), scheduler_config=limits, cache_config=cache, parts=parts) as engine:
        assert_type(engine, RadixEngine)
        output = engine.generate("text", priority=3, cache_salt="tenant")
        assert_type(output.metrics.cached_tokens, int)
        assert_type(engine.add_request("text", priority=3), str)
        assert_type(engine.flush_cache(), bool)
        whole_answers(engine)
        as_it_comes(engine)
        stats = engine.stats()
        if isinstance(stats, CacheStats):
            assert_type(stats.hit_rate, float)
            assert_type(stats.evictable_size, int)


def seeing() -> None:
    """m6's engine: messages with pictures wherever a prompt may stand; m5's scheduler and guesses."""
    limits, guesses = PieceSchedulerConfig(max_num_batched_tokens=64), SpeculativeConfig(method="ngram")
    sight = MultimodalConfig(allowed_url_schemes=("https",), max_items=4, min_pixels=4096, encoder_budget=256)
    parts: dict[str, Any] = M6_PARTS | {"media_reader": M6_PARTS["media_reader"]}
    messages = [{"role": "user", "content": [{"type": "image", "image": b"png"}, {"type": "text", "text": "What?"}]}]
    with SeeingEngine(
        scheduler_config=limits, speculative_config=guesses, multimodal_config=sight, parts=parts
    ) as engine:
        assert_type(engine, SeeingEngine)
        assert_type(engine.chat(messages, speculate=False, cache_salt="tenant"), RequestOutput)
        assert_type(engine.generate(messages), RequestOutput)
        assert_type(engine.generate_batch([messages, "text", [1, 2]]), dict[str, RequestOutput])
        assert_type(engine.chat_prompt(messages), list[int])
        assert_type(engine.add_request(engine.chat_prompt(messages)), str)
        assert_type(engine.stream(messages), RequestStream)
        whole_answers(engine)
        as_it_comes(engine)
        stats = engine.stats()
        if isinstance(stats, SeeingStats):
            assert_type(stats.num_encoder_runs, int)
            assert_type(stats.encoder_seconds, float)
    assert_type(sight.budget("cuda"), int)
    assert_type(InvalidMediaError("broken"), InvalidMediaError)


def mistakes(engine: LLMEngine, output: RequestOutput) -> None:
    """What the types refuse."""
    SamplingParams(max_token=8)  # type: ignore[call-arg]
    SamplingParams(max_tokens="8")  # type: ignore[arg-type]
    TraceConfig(console="loud")  # type: ignore[arg-type]
    engine.generate(7)  # type: ignore[arg-type]
    engine.generate("text", {"max_tokens": 8})  # type: ignore[arg-type]
    engine.tracer.attach(print)  # type: ignore[arg-type]
    output.finished = True  # type: ignore[misc]
    engine.generate_batch(["one"], progress="yes")  # type: ignore[arg-type]
    engine.generate("text", priorty=3)  # type: ignore[call-arg]
    engine.stream("text", priority="high")  # type: ignore[arg-type]
    PolicySchedulerConfig(schedule_policy="shortest")  # type: ignore[arg-type]
    PrefixCacheConfig(block_size=16)  # type: ignore[call-arg]
    MultimodalConfig(allowed_url_schemes="https")  # type: ignore[arg-type]
    MultimodalConfig(max_images=3)  # type: ignore[call-arg]
    SchedulerConfig(8)  # type: ignore[call-arg]
    SchedulerConfig(execution="fast")  # type: ignore[arg-type]
    SchedulerConfig(max_seqs=8)  # type: ignore[call-arg]
    PagedSchedulerConfig(preemption_mode="drop")  # type: ignore[arg-type]
    PagedSchedulerConfig(execution="padded")  # type: ignore[call-arg]
    OwnModelConfig(attention_backend="flash")  # type: ignore[arg-type]
    CacheConfig(block_size="16")  # type: ignore[arg-type]
