"""The disk tier of a model with weights from a seed, which has no files with weights."""

from benchmarks.engines import random_model
from m4_radix_cache import CacheConfig, LLMEngine, ModelConfig, SamplingParams

NARROW = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 4096}
PROMPT = [300 + i for i in range(272)]
ONE = SamplingParams(max_tokens=1, ignore_eos=True)


def test_another_engine_finds_the_kv_of_the_same_seed_and_not_that_of_another_one(tmp_path):
    model = random_model(tmp_path / "model", **NARROW)
    found = []
    for seed in (1, 1, 2):
        config = ModelConfig(model=model.directory, device="cpu", load_format="dummy", seed=seed)
        tiers = CacheConfig(host_memory_bytes=2**24, disk_path=tmp_path / "kv", prefetch_policy="wait_complete")
        with LLMEngine(model_config=config, cache_config=tiers) as engine:
            found.append(engine.generate(PROMPT, ONE).metrics.cached_tokens)
    assert found == [0, 256, 0]
