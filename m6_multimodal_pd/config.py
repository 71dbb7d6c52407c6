"""What an m6 engine is told besides m5's configuration: what it takes as a picture, and what encoding one may cost.

Model, scheduler, cache and speculation are configured as in m5. `MultimodalConfig` has two halves: limits that are
checked before anything is decoded, because pictures come from strangers; and the two numbers that keep the vision
tower from crowding out everybody else, the budget of a step and the memory for what it has made. vLLM:
`MultiModalConfig`, `EncoderCacheManager`'s budgets; SGLang: `--mm-...` of `ServerArgs` and `SGLANG_VLM_CACHE_SIZE_MB`.
"""

from dataclasses import dataclass, field
from pathlib import Path

from m1_single_request.config import check_whole_number
from m1_single_request.errors import ConfigError, shown
from m4_radix_cache.config import check_number
from m5_chunked_prefill_spec.config import EngineConfig as ChunkedEngineConfig
from m6_multimodal_pd.disaggregation.config import DisaggregationConfig

DEFAULT_MODEL = Path(__file__).parent / "checkpoints" / "tiny-qwen3-vl"

URL_SCHEMES = ("file", "http", "https")
ENCODER_BUDGETS = {"cpu": 1024, "cuda": 16384}
"""By the kind of device: tokens of pictures that the vision tower makes in one step."""


@dataclass(frozen=True, kw_only=True)
class MultimodalConfig:
    """Which images and videos are taken, and how many of them are encoded at a time."""

    allowed_url_schemes: tuple[str, ...] = ()
    """Which of `file`, `http` and `https` a URL may name. None of them by default: a URL makes the engine read what it
    can reach and the sender cannot. `data:` URLs carry their picture and are always taken."""
    url_timeout_s: float = 10.0
    """Seconds that a URL may take, its last byte and all redirects included."""
    max_items: int = 16
    """Images and videos in one request."""
    max_file_bytes: int = 32 * 2**20
    """Of an encoded picture or animation."""
    max_image_pixels: int = 2**25
    """Width times height as the file's header has it, before a pixel is decoded. Files of more than twice
    `PIL.Image.MAX_IMAGE_PIXELS` are refused by PIL, whatever is said here."""
    max_video_frames: int = 4096
    """Frames that may be handed in; fewer are sampled from them."""
    max_video_pixels: int = 2**28
    """Width times height of all sampled frames together. Of an animation all frames count, because each is drawn over
    the one before."""
    min_pixels: int | None = None
    """A smaller image is enlarged to so many pixels. None: as the model's processor has it."""
    max_pixels: int | None = None
    """A larger image is reduced to so many pixels. None: as the model's processor has it."""
    encoder_budget: int | None = None
    """At most so many image tokens are encoded in one step, all requests together; an item that is larger is encoded
    alone. None: 1,024 on a CPU, 16,384 on CUDA."""
    embedding_cache_bytes: int = 128 * 2**20
    """Memory for encoded items, kept for later requests until others need the room. Unlike KV they are shared across
    `cache_salt`s: how soon a first token comes may tell whether somebody else has shown the same picture."""

    def __post_init__(self) -> None:
        check_schemes(self.allowed_url_schemes)
        check_number("url_timeout_s", self.url_timeout_s, more_than=0)
        for name in ("max_items", "max_file_bytes", "max_image_pixels", "max_video_frames", "max_video_pixels"):
            check_whole_number(name, getattr(self, name), low=1)
        for name in ("min_pixels", "max_pixels", "encoder_budget"):
            check_whole_number(name, getattr(self, name), low=1, optional=True)
        check_whole_number("embedding_cache_bytes", self.embedding_cache_bytes, low=1)
        if self.min_pixels is not None and self.max_pixels is not None and self.min_pixels > self.max_pixels:
            raise ConfigError(f"min_pixels={self.min_pixels} is more than max_pixels={self.max_pixels}")

    def budget(self, device_type: str) -> int:
        """Image tokens that may be encoded in one step on such a device."""
        return self.encoder_budget or ENCODER_BUDGETS.get(device_type, ENCODER_BUDGETS["cpu"])


def check_schemes(schemes: object) -> None:
    """Raise `ConfigError` unless these are names of URL schemes that can be allowed."""
    if not isinstance(schemes, tuple | list | frozenset | set):
        raise ConfigError(f"allowed_url_schemes={shown(schemes)} must be a tuple of names, such as ('https',)")
    for scheme in schemes:
        if not isinstance(scheme, str) or scheme not in URL_SCHEMES:
            raise ConfigError(f"allowed_url_schemes: {shown(scheme)} is not one of {', '.join(URL_SCHEMES)}")


@dataclass(frozen=True, kw_only=True)
class EngineConfig(ChunkedEngineConfig):
    """All settings of an m6 engine. The field `x` is the engine's keyword `x_config`."""

    multimodal: MultimodalConfig = field(default_factory=MultimodalConfig)
    disaggregation: DisaggregationConfig | None = None
    """Prefill and decode in engines of their own; None: one engine does both."""
