"""m6's table of contents: m5's table with the roles that images change, and the order in which the parts are built.

A model may have a vision tower now; then a media reader is added to intake, a budget to the prefill adder, and an
encoder with its cache to the model runner. For a text model all that is m5's. On CUDA the runner captures graphs.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from typing import Any

from m1_single_request.config import DEFAULT_MODEL as TEXT_MODEL
from m1_single_request.errors import ConfigError, shown
from m1_single_request.model_loader import ModelDescription
from m1_single_request.tracer import Tracer
from m3_paged_attention.kv_cache_config import check_memory_share
from m3_paged_attention.model_len import shortened
from m3_paged_attention.step_threads import step_threads
from m3_paged_attention.wiring import record_experts, trace_start, wants_experts
from m4_radix_cache.tiers import WatchedLoader, tiers_of
from m4_radix_cache.wiring import build_pools, fit_to_memory, prefix_cache_class, reserve_kv_memory
from m5_chunked_prefill_spec.speculative.draft_runner import limited, load_draft_model
from m5_chunked_prefill_spec.wiring import (
    PARTS as M5_PARTS,
    Runner,
    build_executor,
    build_input_processor,
    build_scheduler,
    cost_table,
)
from m6_multimodal_pd.config import DEFAULT_MODEL, EngineConfig, MultimodalConfig
from m6_multimodal_pd.disaggregation.config import FIRST_ENGINE, on_own_device
from m6_multimodal_pd.disaggregation.router_core import RouterCore
from m6_multimodal_pd.disaggregation.runtime.assembly import build_disaggregated, check_parts
from m6_multimodal_pd.engine_core import EngineCore
from m6_multimodal_pd.graph_runner import GraphCapture
from m6_multimodal_pd.input_processor import InputProcessor
from m6_multimodal_pd.model_loader import LoadedModel, describe_model, language_of, load_model
from m6_multimodal_pd.model_runner import ModelRunner
from m6_multimodal_pd.multimodal.embedding_cache import EmbeddingCache
from m6_multimodal_pd.multimodal.encoder import Encoder
from m6_multimodal_pd.multimodal.encoder_budget import EncoderBudget
from m6_multimodal_pd.multimodal.media_reader import MediaReader
from m6_multimodal_pd.multimodal.media_settings import MediaSettings
from m6_multimodal_pd.multimodal.processor_settings import read_settings
from m6_multimodal_pd.overlap.engine_core import OverlapEngineCore
from m6_multimodal_pd.prefill_adder import PrefillAdder
from m6_multimodal_pd.request import Req
from m6_multimodal_pd.weight_loader import WeightLoader


def build_engine_core(config: EngineConfig, parts: Mapping[str, Any], tracer: Tracer) -> EngineCore:
    """Load the models, size the KV memory, measure, and put the parts together."""
    prepared = PreparedEngine(config, parts, tracer, WatchedLoader(parts["model_loader"], config.cache))
    return prepared.complete(prepared.loaded.max_model_len)


class PreparedEngine:
    """An engine before a group agrees on the maximum length of its requests (see `disaggregation/`)."""

    loaded: LoadedModel
    """With the maximum length for which this engine has memory."""

    def __init__(self, config: EngineConfig, parts: Mapping[str, Any], tracer: Tracer, load: WatchedLoader) -> None:
        """Load the models, and fit the maximum length of requests to the memory, without reserving KV memory.

        `load`: engines may share it, and then what it has loaded."""
        self.config, self.parts, self.tracer, self.load = config, parts, tracer, load
        self.weight_loader: Callable[..., WeightLoader] = WeightLoader
        self.overlapped: tuple[type, type] = EngineCore, OverlapEngineCore
        """An engine core, and the one with overlapped steps that may take its place."""
        device = config.model.torch_device()
        check_memory_share(config.cache, device)
        prefix_cache_class(config.cache, parts)  # raises before the model is loaded
        kv_cache_dtype = config.cache.kv_cache_dtype
        loaded = load(config.model, kv_cache_dtype=kv_cache_dtype)
        self.media = media_reader_of(config, parts, loaded)  # first: an error of its files comes before measurements
        self.drafting = load_draft_model(
            load, config.model, kv_cache_dtype, config.speculative, loaded, default_models=(TEXT_MODEL, DEFAULT_MODEL)
        )
        loaded = limited(loaded, self.drafting)
        embeddings = parts["embedding_cache"](capacity_bytes=config.multimodal.embedding_cache_bytes, tracer=tracer)
        budget = config.multimodal.budget(device.type)
        self.encoder = parts["encoder"](tower=loaded.vision, cache=embeddings, budget=budget, tracer=tracer)
        self.threads = step_threads(tracer, loaded, self.drafting)
        group = config.disaggregation
        self.num_engines = num_engines = 1 if group is None else group.num_engines_on(device)
        self.loaded, self.runs, self.kv_budget = fit_to_memory(loaded, self._make, config, num_shares=num_engines)

    def complete(self, max_model_len: int) -> EngineCore:
        """Reserve the KV memory, measure, and build the parts, for requests of at most `max_model_len` tokens."""
        config, parts, tracer, encoder = self.config, self.parts, self.tracer, self.encoder
        loaded, (limits, executor, rows, worker) = shortened(self.loaded, self.runs, self._make, max_model_len)
        trace_start(loaded, config.model, limits, tracer)
        kv_cache_config = reserve_kv_memory(executor, config, self.kv_budget, loaded, tracer)
        costs = cost_table(limits, worker, tracer)
        record_experts(config.trace, loaded, worker, tracer)
        models = [each for each in (self.drafting, loaded) if each is not None]
        tiers = tiers_of(config, self.load, models, worker.model_runner, parts)
        pools = build_pools(kv_cache_config.num_blocks, rows, config, tiers, parts, tracer)
        size = pools.token_to_kv_pool_allocator.size
        with_budget = dict(parts) | {"prefill_adder": adder_of(parts, loaded, encoder)}
        return engine_core_class(config, parts, self.overlapped)(
            input_processor=build_input_processor(
                config,
                limits,
                parts,
                loaded,
                size,
                media=self.media,
                guesses_texts_only=self.drafting is not None,
            ),
            scheduler=build_scheduler(config, limits, with_budget, pools, loaded, costs, tracer),
            executor=executor,
            output_processor=parts["output_processor"](),
            kv_bytes_per_token=kv_cache_config.spec.bytes_per_token,
            parts=parts,
            tracer=tracer,
            encoder=encoder,
            weight_loader=self.weight_loader(
                config=config.model, loaded=loaded, runner=worker.model_runner, encoder=encoder
            ),
        )

    def _make(self, loaded: LoadedModel) -> Runner:
        capture, page_size = None, self.config.cache.page_size
        if self.config.model.wants_graphs and not wants_experts(self.config.trace):
            capture = GraphCapture(page_size=page_size, is_alone=self.num_engines == 1, tracer=self.tracer)
        more = {"encoder": self.encoder, "step_threads": self.threads, "graph_capture": capture}
        return build_executor(self.config, self.parts, loaded, self.drafting, self.tracer, self.threads, **more)


def build(config: EngineConfig, parts: Mapping[str, Any], tracer: Tracer) -> EngineCore | RouterCore:
    """Build one engine, or a group of engines and its router."""
    if config.disaggregation is None:
        return build_engine_core(config, parts, tracer)
    check_parts(parts, PARTS, config.disaggregation)
    described = describe_model(on_own_device(config, FIRST_ENGINE).model)
    media = media_reader_of(config, parts, described)
    return build_disaggregated(config, parts, tracer, described=described, media=media, prepare=PreparedEngine)


def engine_core_class(config: EngineConfig, parts: Mapping[str, Any], overlapped: tuple[type, type]) -> Any:
    """Return the class of the engine core. Raises `ConfigError` for overlapped steps of a class that has none."""
    usual, replacement = overlapped
    if not config.scheduler.overlaps(config.model.torch_device().type):
        return parts["engine_core"]
    if parts["engine_core"] is usual:
        return replacement
    if config.scheduler.enable_overlap:
        raise ConfigError("enable_overlap=True has no effect on an engine_core of your own")
    return parts["engine_core"]


def media_reader_of(config: EngineConfig, parts: Mapping[str, Any], model: ModelDescription) -> MediaReader | None:
    """Return the media reader of a model; None for a model without vision. Raises `ConfigError` for processes and a
    reader of the user's own."""
    language = language_of(model)
    if language is None:
        check_unused(config.multimodal, model.name)
        return None
    if config.multimodal.num_media_processes and parts["media_reader"] is not MediaReader:
        raise ConfigError("num_media_processes has no effect on a media_reader of your own, which runs in this process")
    image, video = read_settings(model.name, config.multimodal, model.config.vision_config)
    settings = MediaSettings(
        config=config.multimodal,
        image=image,
        video=video,
        tokens=language.media_tokens,
        max_item_tokens=config.multimodal.embedding_cache_bytes // (language.visual_width * model.dtype.itemsize),
    )
    return parts["media_reader"](settings=settings)


def check_unused(config: MultimodalConfig, name: str) -> None:
    """Raise `ConfigError` for a setting of `MultimodalConfig` for a model without vision."""
    for field in fields(config):
        value = getattr(config, field.name)
        if value != field.default:
            raise ConfigError(f"{field.name}={shown(value)} has no effect: {name} takes texts only")


def adder_of(parts: Mapping[str, Any], loaded: LoadedModel, encoder: Encoder) -> Any:
    """Return the maker of prefill adders; for a vision model, each with a budget for the images of its step."""
    make_adder: Any = parts["prefill_adder"]
    if loaded.vision is None:
        return make_adder
    make_budget = partial(
        parts["encoder_budget"],
        max_tokens=encoder.budget,
        bytes_per_token=loaded.vision.bytes_per_token,
        cache=encoder.cache,
    )
    return lambda **limits: make_adder(**limits).limit_encoding(make_budget())


# --8<-- [start:parts]
PARTS: dict[str, Any] = M5_PARTS | {
    "engine_core": EngineCore,
    "wiring": build,
    "model_loader": load_model,
    "input_processor": InputProcessor,
    "request": Req,
    "media_reader": MediaReader,
    "embedding_cache": EmbeddingCache,
    "encoder": Encoder,
    "encoder_budget": EncoderBudget,
    "prefill_adder": PrefillAdder,
    "model_runner": ModelRunner,
}
# --8<-- [end:parts]
