"""m6's table of contents: m5's table with the roles that pictures change, and how the parts are put together.

A model may have a vision tower now; then its processor, the cache of what it makes, and a budget for it are put between
intake, the adder and the model runner. For a text model everything is m5's.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from m1_single_request.config import DEFAULT_MODEL as TEXT_MODEL
from m1_single_request.tracer import Tracer
from m3_paged_attention.kv_cache_config import check_memory_share
from m3_paged_attention.wiring import trace_start
from m4_radix_cache.engine_core import EngineCore
from m4_radix_cache.mem_cache.allocator import BaseTokenToKVPoolAllocator
from m4_radix_cache.schedule_batch import Pools
from m4_radix_cache.wiring import prefix_cache_class, reserve_kv_memory
from m5_chunked_prefill_spec.config import SchedulerConfig
from m5_chunked_prefill_spec.speculative.draft_runner import load_draft_model
from m5_chunked_prefill_spec.wiring import PARTS as M5_PARTS, build_scheduler, cost_table
from m6_multimodal_pd.config import DEFAULT_MODEL, EngineConfig
from m6_multimodal_pd.input_processor import InputProcessor, Sight
from m6_multimodal_pd.model_loader import LoadedModel, load_model
from m6_multimodal_pd.model_runner import ModelRunner
from m6_multimodal_pd.multimodal.embedding_cache import EmbeddingCache
from m6_multimodal_pd.multimodal.encoder import Encoder
from m6_multimodal_pd.multimodal.encoder_budget import EncoderBudget
from m6_multimodal_pd.multimodal.media_reader import MediaReader


def build_engine_core(config: EngineConfig, parts: Mapping[str, Any], tracer: Tracer) -> EngineCore:
    """Load the models, size the KV memory, measure, and put the parts together."""
    device = config.model.torch_device()
    check_memory_share(config.cache, device)
    cache_class = prefix_cache_class(config.cache, parts)
    loaded = parts["model_loader"](config.model)
    drafting = load_draft_model(
        parts["model_loader"], config.model, config.speculative, loaded, default_models=(TEXT_MODEL, DEFAULT_MODEL)
    )
    if tracer:
        trace_start(loaded, config.model, tracer)
    limits = config.scheduler.resolved(loaded.max_model_len, device.type)
    rows = parts["req_to_token_pool"](size=limits.max_num_seqs, max_context_len=loaded.max_model_len)
    embeddings = parts["embedding_cache"](capacity_bytes=config.multimodal.embedding_cache_bytes, tracer=tracer)
    budget = config.multimodal.budget(device.type)
    encoder = parts["encoder"](tower=loaded.vision, cache=embeddings, budget=budget, tracer=tracer)
    runner = parts["model_runner"](
        loaded_model=loaded,
        scheduler_config=limits,
        req_to_token_pool=rows,
        rejection_sampler=parts["rejection_sampler"](
            sampler=parts["sampler"](), token_text=parts["detokenizer"](loaded.tokenizer).token_text, tracer=tracer
        ),
        draft_runner=drafting and parts["draft_runner"](loaded_model=drafting, req_to_token_pool=rows),
        encoder=encoder,
    )
    executor = parts["executor"](worker=parts["worker"](model_runner=runner))
    kv_cache_config = reserve_kv_memory(executor, config.cache, device, loaded.max_model_len, limits, tracer)
    costs = cost_table(config, limits, runner, tracer)
    allocator = parts["token_to_kv_pool_allocator"](
        size=kv_cache_config.num_tokens, page_size=config.cache.page_size, checked=config.cache.debug
    )
    tree_cache = cache_class(
        req_to_token_pool=rows,
        token_to_kv_pool_allocator=allocator,
        eviction_policy=config.cache.eviction_policy,
        tracer=tracer,
    )
    pools = Pools(rows, allocator, tree_cache, debug=config.cache.debug)
    sighted = dict(parts) | {"prefill_adder": adder_of(config, parts, loaded, embeddings)}
    return parts["engine_core"](
        input_processor=build_input_processor(config, limits, parts, loaded, allocator),
        scheduler=build_scheduler(config, limits, sighted, pools, loaded, costs, tracer),
        executor=executor,
        output_processor=parts["output_processor"](tracer=tracer),
        kv_bytes_per_token=kv_cache_config.spec.bytes_per_token,
        tracer=tracer,
        companion=encoder,
    )


def build_input_processor(
    config: EngineConfig,
    limits: SchedulerConfig,
    parts: Mapping[str, Any],
    loaded: LoadedModel,
    allocator: BaseTokenToKVPoolAllocator,
) -> Any:
    """What takes requests in; with sight, if the model has any."""
    sight = None
    if loaded.vision is not None and loaded.media_tokens is not None:
        sight = Sight(
            media=parts["media_reader"](name=loaded.name, config=config.multimodal, vision=loaded.vision.config),
            tokens=loaded.media_tokens,
            config=config.multimodal,
            max_item_tokens=config.multimodal.embedding_cache_bytes // loaded.vision.bytes_per_token,
        )
    return parts["input_processor"](
        request_class=parts["request"],
        detokenizer_class=parts["detokenizer"],
        tokenizer=loaded.tokenizer,
        vocab_size=loaded.vocab_size,
        max_model_len=loaded.max_model_len,
        max_num_batched_tokens=None if limits.enable_chunked_prefill else limits.max_num_batched_tokens,
        max_total_tokens=allocator.size,
        speculates=config.speculative.method is not None,
        seed=config.model.seed,
        sight=sight,
        guesses_texts_only=config.speculative.method == "draft_model",
    )


def adder_of(config: EngineConfig, parts: Mapping[str, Any], loaded: LoadedModel, embeddings: EmbeddingCache) -> Any:
    """What fills a step with prompts; with a budget for their pictures, if the model sees any."""
    adder = parts["prefill_adder"]
    if loaded.vision is None:
        return adder
    return partial(
        adder,
        new_piece_limit=partial(
            parts["encoder_budget"],
            max_tokens=config.multimodal.budget(loaded.device.type),
            bytes_per_token=loaded.vision.bytes_per_token,
            cache=embeddings,
        ),
    )


# --8<-- [start:parts]
PARTS: dict[str, Any] = M5_PARTS | {
    "wiring": build_engine_core,
    "model_loader": load_model,
    "input_processor": InputProcessor,
    "media_reader": MediaReader,
    "embedding_cache": EmbeddingCache,
    "encoder": Encoder,
    "encoder_budget": EncoderBudget,
    "model_runner": ModelRunner,
}
# --8<-- [end:parts]
