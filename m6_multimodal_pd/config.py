"""Configuration of an m6 engine: m5's, with CUDA graphs, limits for images and budgets for their encoder.

Scheduler, cache and speculation are configured as in m5. `MultimodalConfig` has two groups of fields: limits, which are
checked before an image is decoded, because images may come from untrusted users; and the two limits of the vision
encoder, the tokens that a step encodes and the memory for embeddings. vLLM: `MultiModalConfig`,
`EncoderCacheManager`'s budgets, `cudagraph_mode`; SGLang: `--mm-...` of `ServerArgs`, `SGLANG_VLM_CACHE_SIZE_MB`,
`--disable-cuda-graph`.
"""

from dataclasses import dataclass, field
from pathlib import Path

from m1_single_request.errors import ConfigError, shown
from m1_single_request.field_rules import PositiveInt, check_fields
from m3_paged_attention.config import ModelConfig as PagedModelConfig
from m5_chunked_prefill_spec.config import (
    EngineConfig as ChunkedEngineConfig,
    PositiveFloat,
    SchedulerConfig as ChunkedSchedulerConfig,
)
from m6_multimodal_pd.disaggregation.config import DisaggregationConfig

DEFAULT_MODEL = Path(__file__).parent / "checkpoints" / "tiny-qwen3-vl"

URL_SCHEMES = ("file", "http", "https")
ENCODER_BUDGETS = {"cpu": 1024, "cuda": 16384}
"""By the kind of device: maximum number of image tokens encoded per step."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(PagedModelConfig):
    """m3's settings of the model, and how its steps are launched."""

    cuda_graphs: bool | None = None
    """Whether steps of few tokens are captured as CUDA graphs at the start, and replayed. None: on CUDA."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cuda_graphs and self.torch_device().type != "cuda":
            raise ConfigError(f"cuda_graphs=True needs a GPU, and the device is {self.torch_device()}: leave it out")

    @property
    def wants_graphs(self) -> bool:
        """Whether steps are to be captured, with the default of the device."""
        return self.torch_device().type == "cuda" if self.cuda_graphs is None else self.cuda_graphs


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(ChunkedSchedulerConfig):
    """m5's settings, and whether steps overlap."""

    enable_overlap: bool | None = None
    """Whether a step is launched before the one before is booked (`overlap/`). None: on CUDA."""

    def overlaps(self, device_type: str) -> bool:
        """Return whether steps overlap on a device of this type."""
        return device_type == "cuda" if self.enable_overlap is None else self.enable_overlap


@dataclass(frozen=True, kw_only=True)
class MultimodalConfig:
    """Limits for images and videos, and for their encoder."""

    allowed_url_schemes: tuple[str, ...] = ()
    """Schemes of URLs that are read: `file`, `http`, `https`. None of them by default: a URL makes the engine read what
    its sender cannot reach. `data:` URLs contain their image and are always accepted."""
    url_timeout_s: PositiveFloat = 10.0
    """Timeout of a URL in seconds, up to its last byte and including all redirects."""
    max_items: PositiveInt = 16
    """Maximum number of images and videos in one request."""
    max_file_bytes: PositiveInt = 32 * 2**20
    """Maximum size of an encoded image or animation."""
    max_image_pixels: PositiveInt = 2**25
    """Maximum width times height, compared with the file's header before a pixel is decoded. PIL rejects files of more
    than twice `PIL.Image.MAX_IMAGE_PIXELS` with any value of this field."""
    max_video_frames: PositiveInt = 4096
    """Maximum number of frames of a video before sampling."""
    max_video_pixels: PositiveInt = 2**28
    """Maximum width times height of all sampled frames together. Of an animation all frames count, because each is
    drawn over the one before."""
    min_pixels: PositiveInt | None = None
    """Minimum number of pixels of an image after resizing. None: that of the model's processor."""
    max_pixels: PositiveInt | None = None
    """Maximum number of pixels of an image after resizing. None: that of the model's processor."""
    encoder_budget: PositiveInt | None = None
    """Maximum number of image tokens encoded per step, for all requests together; a larger item is the only one that is
    encoded in its step. None: 1,024 on a CPU, 16,384 on CUDA."""
    embedding_cache_bytes: PositiveInt = 128 * 2**20
    """Memory for embeddings, which are kept for later requests until others need it. Unlike KV they are shared across
    `cache_salt`s: the time to a first token may show that another request had the same image."""

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        check_schemes(self.allowed_url_schemes)
        if self.min_pixels is not None and self.max_pixels is not None and self.min_pixels > self.max_pixels:
            raise ConfigError(f"min_pixels={self.min_pixels} is more than max_pixels={self.max_pixels}")

    def budget(self, device_type: str) -> int:
        """Return the maximum number of image tokens encoded per step on a device of this type."""
        return self.encoder_budget or ENCODER_BUDGETS.get(device_type, ENCODER_BUDGETS["cpu"])


def check_schemes(schemes: object) -> None:
    """Raise `ConfigError` unless these are names of schemes that can be allowed."""
    if not isinstance(schemes, tuple | list | frozenset | set):
        raise ConfigError(f"allowed_url_schemes={shown(schemes)} must be a tuple of names, such as ('https',)")
    for scheme in schemes:
        if not isinstance(scheme, str) or scheme not in URL_SCHEMES:
            raise ConfigError(f"allowed_url_schemes: {shown(scheme)} is not one of {', '.join(URL_SCHEMES)}")


@dataclass(frozen=True, kw_only=True)
class EngineConfig(ChunkedEngineConfig):
    """All settings of an m6 engine. The field `x` is the engine's keyword `x_config`."""

    model: ModelConfig = field(default_factory=ModelConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    multimodal: MultimodalConfig = field(default_factory=MultimodalConfig)
    disaggregation: DisaggregationConfig | None = None
    """Prefill and decode in separate engines; None: one engine does both."""
