"""m8's table of contents: m6's, with the parts of a rank."""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from m1_single_request.errors import ConfigError, shown
from m1_single_request.parts import check_built
from m1_single_request.tracer import Tracer
from m3_paged_attention.device_limits import device_limits
from m4_radix_cache.tiers import WatchedLoader
from m6_multimodal_pd.model_loader import load_model
from m6_multimodal_pd.wiring import PARTS as M6_PARTS, PreparedEngine, build as build_alone
from m8_parallel.config import EngineConfig
from m8_parallel.engine_core import ParallelEngineCore
from m8_parallel.events import RanksJoined
from m8_parallel.job import join
from m8_parallel.mem_cache.agreed_tiers import AgreedCache, AgreedDiskCache
from m8_parallel.model_loader import ParallelLoader
from m8_parallel.model_runner import ParallelModelRunner
from m8_parallel.overlap import OverlapParallelEngineCore
from m8_parallel.ranks import Ranks
from m8_parallel.scheduler import ParallelScheduler
from m8_parallel.trace import RanksTraceReader
from m8_parallel.weight_loader import ParallelWeightLoader


def build(config: EngineConfig, parts: Mapping[str, Any], tracer: Tracer) -> Any:
    """Join the job, and build this rank's engine; without a job build m6's, with the parts of m6."""
    on_gpu, parallel = config.model.torch_device().type == "cuda", config.parallel
    ranks = join(step_timeout_s=parallel.step_timeout_s, long_timeout_s=parallel.load_timeout_s, on_gpu=on_gpu)
    try:
        config.check_ranks(ranks.size)
        if ranks.size > 1:
            return build_rank(config, parts, ranks, tracer)
        if all(parts[role] is PARTS[role] for role in OF_RANKS):
            return build_alone(config, {**parts, **{role: M6_PARTS[role] for role in OF_RANKS}}, tracer)
        return build_alone(config, parts_of_rank(parts, ranks, config, tracer), tracer)
    except BaseException:
        ranks.close()
        raise


def build_rank(config: EngineConfig, parts: Mapping[str, Any], ranks: Ranks, tracer: Tracer) -> ParallelEngineCore:
    """Load this rank's part of the model, agree on all sizes, and put the parts together."""
    if parts["model_loader"] is not load_model:
        raise ConfigError(f"model_loader={shown(parts['model_loader'])} has no effect: each rank loads its part")
    readers = [each for each in tracer.readers if isinstance(each, RanksTraceReader)]
    settings = {f"{name}_config": setting for name, setting in vars(config).items() if name != "trace"}
    check_same(ranks, settings | {"number of Chrome traces": len(readers)})
    config = of_rank(config, ranks)
    for reader in readers:
        reader.meet(ranks)
    load = ParallelLoader(ranks, config.model, config.parallel.expert_parallel)
    prepared = PreparedEngine(
        config, parts_of_rank(parts, ranks, config, tracer), tracer, WatchedLoader(load, config.cache)
    )
    prepared.weight_loader = partial(ParallelWeightLoader, ranks=ranks)
    prepared.overlapped = ParallelEngineCore, OverlapParallelEngineCore
    tracer.emit(RanksJoined.of, ranks, prepared.loaded.model, prepared.loaded.weight_bytes)
    budget = prepared.kv_budget
    length, *sizes = ranks.smallest(prepared.loaded.max_model_len, budget.num_blocks or 0, budget.num_bytes or 0)
    num_blocks, num_bytes = (int(size) or None for size in sizes)
    prepared.kv_budget = replace(budget, num_blocks=num_blocks, num_bytes=num_bytes)
    bytes_per_token = prepared.runs.executor.kv_cache_spec(1).bytes_per_token
    limits = device_limits(replace(prepared.loaded, max_model_len=int(length)), bytes_per_token=bytes_per_token)
    check_same(ranks, {"default of max_num_seqs and max_num_batched_tokens": limits[:2]})  # by the size of a GPU

    def complete() -> ParallelEngineCore:
        core = prepared.complete(int(length))
        assert isinstance(core, ParallelEngineCore)
        check_built(core, PARTS)  # an error in a part of the user's ends the job here, on all ranks
        return core

    core = ranks.agreed(complete)
    core.trace_readers = readers
    ranks.leads = ranks.is_first
    return core


def check_same(ranks: Ranks, settings: Mapping[str, object]) -> None:
    """Raise `ConfigError` on all ranks if one of them has other settings, by name."""
    own = json.dumps([_written(setting) for setting in settings.values()])
    each = [json.loads(found) for found in ranks.compare("settings", own)]
    for name, *values in zip(settings, *each, strict=True):
        for rank, value in enumerate(values):
            if value != values[0]:
                raise ConfigError(
                    f"all ranks need the same {name}: rank 0 has {values[0]}, and rank {rank} has {value}"
                )


def _written(setting: object) -> str:
    """Return a configuration in words that are the same on all ranks; an object is the name of its class."""
    return msgspec.json.encode(setting, enc_hook=lambda value: type(value).__name__, order="deterministic").decode()


def of_rank(config: EngineConfig, ranks: Ranks) -> EngineConfig:
    """Return the configuration of a rank: with a GPU of its own, and a directory for its KV pages."""
    model, cache, scheduler = config.model, config.cache, config.scheduler
    if model.torch_device().type == "cuda":
        if torch.device(model.device if model.device != "auto" else "cuda").index is not None:
            raise ConfigError(f"device={shown(model.device)}: each rank has a GPU of its own, so leave out the number")
        # both only if they are asked for: with NCCL they have not run yet
        model = replace(model, device=str(ranks.device), cuda_graphs=bool(model.cuda_graphs))
        scheduler = replace(scheduler, enable_overlap=bool(scheduler.enable_overlap))
    if cache.disk_path is not None:
        cache = replace(cache, disk_path=Path(cache.disk_path) / f"rank-{ranks.rank}-of-{ranks.size}")
    return replace(config, model=model, cache=cache, scheduler=scheduler)


def parts_of_rank(parts: Mapping[str, Any], ranks: Ranks, config: EngineConfig, tracer: Tracer) -> dict[str, Any]:
    """Return all parts; scheduler, model runner and the two caches with tiers are bound to `ranks`."""
    more: dict[str, dict[str, Any]] = {
        "scheduler": {"digest_interval": config.parallel.digest_interval},
        "model_runner": {"tracer": tracer},
        "tiered_cache": {},
        "disk_cache": {},
    }
    return {**parts, **{role: partial(parts[role], ranks=ranks, **given) for role, given in more.items()}}


# --8<-- [start:parts]
PARTS: dict[str, Any] = M6_PARTS | {
    "wiring": build,
    "engine_core": ParallelEngineCore,
    "scheduler": ParallelScheduler,
    "model_runner": ParallelModelRunner,
    "tiered_cache": AgreedCache,
    "disk_cache": AgreedDiskCache,
}
# --8<-- [end:parts]
OF_RANKS = ("engine_core", "scheduler", "model_runner", "tiered_cache", "disk_cache")
"""Roles whose parts need ranks."""
