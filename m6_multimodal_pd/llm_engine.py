"""m6's engine: the face with m6's parts. A prompt may be messages with images and video, in every call.

New calls: the weights of an engine can be replaced between requests, and its steps profiled.
"""

from pathlib import Path

from m1_single_request.config import check_path
from m4_radix_cache.llm_engine import LLMEngine as RadixEngine
from m6_multimodal_pd.config import DEFAULT_MODEL, EngineConfig
from m6_multimodal_pd.weight_loader import absolute
from m6_multimodal_pd.wiring import PARTS


class LLMEngine(RadixEngine):
    """The full engine. `generate`, `stream`, `add_request` and `chat` take messages whose contents may be lists of
    texts, images and videos; `chat_prompt` returns a prompt with its images. A request has the options `priority=`,
    `cache_salt=` and `speculate=`."""

    parts = PARTS
    config_type = EngineConfig
    default_model = DEFAULT_MODEL
    request_options = ("priority", "cache_salt", "speculate")

    def update_weights(self, model: str | Path) -> None:
        """Overwrite the weights by those of another checkpoint of the same model; the caches are flushed.

        Raises `EngineUsageError` with unfinished requests, for a `model_loader` of your own and for drawn weights,
        `ModelLoadError` for weights that do not fit, and `ConfigError` for a model with fewer positions than
        `max_model_len`. Then nothing has changed. If a file cannot be read to its end, the weights of before are loaded
        again (`ModelLoadError`); if they cannot be, the engine is dead
        (`EngineDeadError`), and in a group that engine is lost (`EngineLostError`).
        """
        self._check_usable()
        check_path("model", model, "a directory or a hub id")
        self.engine_core.update_weights(absolute(model))

    def start_profile(self, folder: str | Path) -> None:
        """Start recording steps with torch's profiler; `stop_profile` writes them into this folder."""
        self._check_usable()
        check_path("folder", folder)
        self.engine_core.profiler.start(str(folder))

    def stop_profile(self) -> list[Path]:
        """Stop recording; return the files written, for chrome://tracing or Perfetto."""
        self._check_usable()
        return [Path(name) for name in self.engine_core.profiler.stop()]
