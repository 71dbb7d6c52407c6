"""m4's engine: the public interface over m4's parts. New call: `flush_cache`."""

from collections.abc import Sequence
from typing import ClassVar, Literal

from m1_single_request.llm_engine import LLMEngine as SingleRequestEngine
from m4_radix_cache.config import EngineConfig
from m4_radix_cache.wiring import PARTS

Tier = Literal["device", "host", "disk"]


class LLMEngine(SingleRequestEngine):
    """Runs many requests, which start from cached KV. A request may have `priority=` and `cache_salt=`."""

    parts = PARTS
    config_type: ClassVar[type] = EngineConfig
    request_options: ClassVar[Sequence[str]] = ("priority", "cache_salt")

    def flush_cache(self, tier: Tier | None = None) -> bool:
        """Empty the prefix cache and return True. With unfinished requests, keep it and return False.

        `tier`: empty this tier alone. None: device and host; what is on a disk stays. Raises `ConfigError` for a tier
        that is not configured.
        """
        self._check_usable()
        return bool(self.engine_core.flush_cache(tier))
