"""Configuration of an m8 engine: m6's, and how its ranks share a model.

torchrun sets the number of ranks; `tensor_parallel_size` only confirms it. vLLM: `ParallelConfig`; SGLang: `--tp-size`.
"""

from dataclasses import dataclass, field

from m1_single_request.errors import ConfigError
from m1_single_request.field_rules import PositiveInt, check_fields
from m5_chunked_prefill_spec.config import PositiveFloat
from m6_multimodal_pd.config import EngineConfig as SingleProcessConfig


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The ranks of an engine."""

    tensor_parallel_size: PositiveInt | None = None
    """Number of ranks that share each layer of the model. None: all that torchrun has started."""
    expert_parallel: bool = False
    """Whether each rank has some of the experts whole, and not a part of each."""
    step_timeout_s: PositiveFloat = 10.0
    """Timeout of each collective between hosts, in seconds; then the rank that waits raises `RankLostError`."""
    load_timeout_s: PositiveFloat = 600.0
    """Timeout of each other wait for all ranks, in seconds: loading, measuring, writing files, agreeing on an error."""
    digest_interval: PositiveInt = 64
    """Number of steps after which the ranks compare what they have decided."""

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)

    def check_size(self, size: int) -> None:
        """Raise `ConfigError` unless `size` ranks are right."""
        wanted = self.tensor_parallel_size
        if wanted is not None and wanted != size:
            raise ConfigError(
                f"tensor_parallel_size={wanted} needs as many ranks, and there {'is' if size == 1 else 'are'} {size}: "
                f"start the program with `torchrun --nproc-per-node {wanted}`"
            )


@dataclass(frozen=True, kw_only=True)
class EngineConfig(SingleProcessConfig):
    """All settings of an m8 engine. The field `x` is the engine's keyword `x_config`."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def check_ranks(self, size: int) -> None:
        """Raise `ConfigError` for settings that `size` ranks cannot follow."""
        self.parallel.check_size(size)
        if size == 1:
            if self.parallel.expert_parallel:
                raise ConfigError("expert_parallel=True has no effect on one rank, which has all experts")
            return
        if self.disaggregation is not None:
            raise ConfigError("disaggregation_config is not supported with ranks: start the program without torchrun")
