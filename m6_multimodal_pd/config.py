"""Configuration of an m6 engine: m5's, with CUDA graphs and overlapped steps, images, and groups of engines.

Cache and speculation are configured as in m5. What concerns images is in `multimodal/config.py`, and groups are in
`disaggregation/config.py`. vLLM: `cudagraph_mode`, `async_scheduling`; SGLang: `--disable-cuda-graph`,
`--disable-overlap-schedule` of `ServerArgs`.
"""

from dataclasses import dataclass, field
from pathlib import Path

from m1_single_request.errors import ConfigError
from m3_paged_attention.config import ModelConfig as PagedModelConfig
from m5_chunked_prefill_spec.config import (
    EngineConfig as ChunkedEngineConfig,
    SchedulerConfig as ChunkedSchedulerConfig,
)
from m6_multimodal_pd.disaggregation.config import DisaggregationConfig
from m6_multimodal_pd.multimodal.config import MultimodalConfig as MultimodalConfig

DEFAULT_MODEL = Path(__file__).parent / "checkpoints" / "tiny-qwen3-vl"


@dataclass(frozen=True, kw_only=True)
class ModelConfig(PagedModelConfig):
    """m3's settings of the model, and how its steps are launched. `quantization` leaves the vision tower as it is."""

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
class EngineConfig(ChunkedEngineConfig):
    """All settings of an m6 engine. The field `x` is the engine's keyword `x_config`."""

    model: ModelConfig = field(default_factory=ModelConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    multimodal: MultimodalConfig = field(default_factory=MultimodalConfig)
    disaggregation: DisaggregationConfig | None = None
    """Prefill and decode in separate engines; None: one engine does both."""
