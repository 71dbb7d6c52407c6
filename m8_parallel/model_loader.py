"""Load a rank's part of a model. vLLM: `DefaultModelLoader` with a `weight_loader` per parameter; SGLang the same."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from m1_single_request.model_loader import ModelDescription, load_part
from m3_paged_attention.attention.registry import resolve
from m3_paged_attention.config import KVCacheDtype
from m3_paged_attention.model_loader import (
    check_model,
    check_room,
    count_parameters,
    needed_bytes,
    packed_bytes,
    weights_directory,
)
from m3_paged_attention.models.architecture import MODEL_TYPES, decoder_config
from m3_paged_attention.models.weights import PREFIX, DecoderWeights, Header, check_decoder, read_headers
from m6_multimodal_pd.config import ModelConfig
from m6_multimodal_pd.model_loader import LoadedModel, describe_model, language_of, load_model
from m6_multimodal_pd.models import qwen3_vl, vision
from m6_multimodal_pd.models.vision import VisionTower
from m8_parallel.models.parallel_decoder import BackendOfRank, ParallelDecoder, ParallelVLDecoder, RankPart
from m8_parallel.models.plan import plan_of
from m8_parallel.models.shards import Shard, local_config
from m8_parallel.models.shared_tower import SharedTower
from m8_parallel.ranks import Ranks


@dataclass(frozen=True)
class ParallelLoader:
    """The part `model_loader` of a rank."""

    ranks: Ranks
    target: ModelConfig
    """The model that is shared; another one is a draft model, of which every rank has its own."""
    expert_parallel: bool = False

    def __call__(self, config: ModelConfig, kv_cache_dtype: KVCacheDtype = "auto") -> LoadedModel:
        """Load this rank's part of a model; its vision tower whole. Raises `ModelLoadError` or `ConfigError`: on all
        ranks that of the first one that has one."""
        load = self._load if config is self.target else load_model
        return self.ranks.agreed(lambda: load(config, kv_cache_dtype))

    def _load(self, config: ModelConfig, kv_cache_dtype: KVCacheDtype) -> LoadedModel:
        backend = resolve(config.attention_backend, config.torch_device())
        described = describe_model(config)
        language, shard = language_of(described), self.shard_of(described)
        kv_dtype = check_model(config, kv_cache_dtype, described, shard.config.head_dim, backend)
        needed = load_part(described.name, "its weights", lambda: needed_bytes(config, described, shard.local))
        summing: Any = BackendOfRank(backend, shard, self.ranks)
        part = RankPart(shard, self.ranks)
        of_tower = 0 if language is None else vision.count_weights(described.config.vision_config)
        needed += of_tower * described.dtype.itemsize
        check_room(config, described, needed + packed_bytes(config, described, shard.local))

        def load() -> tuple[VisionTower | None, ParallelDecoder | ParallelVLDecoder]:
            tower, weights = self._weights(config, described, shard)
            more: dict[str, Any] = {"max_model_len": described.max_model_len, "kv_dtype": kv_dtype}
            if language is None:
                return None, ParallelDecoder(part, shard.local, weights, summing, **more)
            own = replace(language, decoder=shard.local)
            return tower, ParallelVLDecoder(part, own, weights, summing, **more)

        tower, model = load_part(described.name, "its weights", load)
        shared: Any = None if tower is None else SharedTower(tower, self.ranks)
        return LoadedModel(
            **vars(described),
            model=model,
            num_parameters=of_tower + count_parameters(shard.config, described.dtype),
            weight_bytes=needed,
            vision=shared,
        )

    def shard_of(self, described: ModelDescription) -> Shard:
        """Return how this rank's part is cut from the whole."""
        name, language = described.name, language_of(described)
        if language is not None:
            whole = language.decoder
        else:
            model_type = MODEL_TYPES[described.architecture]
            whole = decoder_config(name, described.architecture, described.config, model_type=model_type)
        local = local_config(name, whole, self.ranks.size, expert_parallel=self.expert_parallel)
        plan = plan_of(name, described.config.get_text_config())
        return Shard(whole, local, plan, self.ranks.rank, self.ranks.size, self.expert_parallel)

    def _weights(
        self, config: ModelConfig, described: ModelDescription, shard: Shard
    ) -> tuple[VisionTower | None, DecoderWeights]:
        name, dtype, device = described.name, described.dtype, described.device
        sees = described.architecture in qwen3_vl.FAMILIES
        if config.load_format == "dummy":
            tower = VisionTower.dummy(described.config.vision_config, dtype, device, config.seed) if sees else None
            return tower, shard.dummy(dtype, device, config.seed, config.quantization)
        of_tower: Mapping[str, Header] = {}
        headers, prefix = read_headers(name, weights_directory(name)), PREFIX
        if sees:
            (of_tower, headers), prefix = vision.parted(headers), qwen3_vl.PREFIX
        tower = VisionTower.load(name, of_tower, described.config.vision_config, dtype, device) if sees else None
        check_decoder(name, headers, shard.config, dtype, prefix)
        return tower, shard.load(headers, dtype, device, prefix, config.quantization)
