"""The draft model's KV comes back from every tier: without it the tokens are the same, and the drafts worse."""

from pathlib import Path
from typing import Any

from m4_radix_cache.mem_cache.host_kv_pool import HostKVPool
from tests.equivalence.traffic import prompt_of
from tests.m4_radix_cache.test_disk_engines import PARTS
from tests.m5_chunked_prefill_spec.engines import MakeEngine, Remembered, greedy, setting

PROMPT, PARAMS = prompt_of(60), greedy(40)


class WithoutDrafts(HostKVPool):
    """The KV of the draft model, whose layers are the first, does not come back."""

    def load(self, host_pages: Any, device_pages: Any) -> Any:
        num_layers = self.storages[0].config.spec.num_layers
        for layer in self._host_layers[:num_layers]:
            layer[:] = 0
        return super().load(host_pages, device_pages)


def accepted(make_engine: MakeEngine, m1: Remembered, directory: Path, pool: type) -> dict[str, int]:
    """How many drafts are accepted behind a hit in each tier."""
    more = {"host_memory_bytes": 2**23, "disk_path": directory, "prefetch_policy": "wait_complete"}
    limits = setting(tokens=112, method="draft_model", **more)
    found = {}
    parts = {**PARTS, "host_kv_pool": pool}

    def ask(engine: Any, tier: str) -> None:
        output = engine.generate(PROMPT, PARAMS)
        assert output.token_ids == m1.generate(PROMPT, PARAMS).token_ids
        found[tier] = output.metrics.num_accepted_tokens

    with make_engine(parts, **limits) as engine:
        ask(engine, "none")
        ask(engine, "device")
        engine.generate(prompt_of(50)[::-1], PARAMS)
        ask(engine, "host")
        assert engine.stats().num_host_hit_tokens > 50 and not engine.stats().num_disk_hit_tokens
    with make_engine(parts, **limits) as engine:
        ask(engine, "disk")
        assert engine.stats().num_disk_hit_tokens > 50
    return found


def test_drafts_behind_a_hit_in_any_tier_are_as_good(make_engine: MakeEngine, m1: Remembered, tmp_path: Path) -> None:
    right = accepted(make_engine, m1, tmp_path / "right", HostKVPool)
    assert right["host"] == right["disk"] == right["device"] == right["none"] > 8
    wrong = accepted(make_engine, m1, tmp_path / "wrong", WithoutDrafts)
    assert wrong["host"] < right["host"] and wrong["disk"] < right["disk"]
