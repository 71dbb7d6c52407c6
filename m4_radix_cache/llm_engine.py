"""m4's engine: the face over m4's parts. New call: the cache can be emptied."""

from collections.abc import Sequence
from typing import ClassVar

from m1_single_request.llm_engine import LLMEngine as SingleRequestEngine
from m4_radix_cache.config import EngineConfig
from m4_radix_cache.wiring import PARTS


class LLMEngine(SingleRequestEngine):
    """Runs many requests, each from what others computed. A request may come with `priority=` and `cache_salt=`."""

    parts = PARTS
    config_type: ClassVar[type] = EngineConfig
    request_options: ClassVar[Sequence[str]] = ("priority", "cache_salt")

    def flush_cache(self) -> bool:
        """Forget the KV that is kept for later requests. False, and nothing is forgotten, while any is unfinished."""
        self._check_usable()
        return bool(self.engine_core.flush_cache())
