"""What an m2 engine is told: m1's model and trace, and now how many requests may run together.

vLLM: `SchedulerConfig` with the same two limits; SGLang: `max_running_requests` and `max_prefill_tokens`.
"""

from dataclasses import dataclass, field, replace
from typing import Literal, Self, get_args

from m1_single_request.config import EngineConfig as SingleRequestConfig, check_whole_number
from m1_single_request.errors import ConfigError, shown

Execution = Literal["per_request", "padded"]
LEAST_BATCHED_TOKENS = 2048


@dataclass(frozen=True, kw_only=True)
class BatchLimits:
    """The largest batch. Each milestone's `SchedulerConfig` adds its own settings."""

    max_num_seqs: int = 16
    """At most so many requests run at a time."""
    max_num_batched_tokens: int | None = None
    """At most so many new tokens go through the model in one step. A prompt runs whole, so a longer one is refused.
    None: the largest of `max_model_len`, 2,048 and `max_num_seqs`, so that no prompt is refused for it."""

    def __post_init__(self) -> None:
        check_whole_number("max_num_seqs", self.max_num_seqs, low=1)
        check_whole_number("max_num_batched_tokens", self.max_num_batched_tokens, low=1, optional=True)
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is less than max_num_seqs={self.max_num_seqs}: "
                f"not every running request could get a token in a step"
            )

    def resolved(self, max_model_len: int) -> Self:
        """Return a copy with every None replaced, for a model of this length."""
        budget = self.max_num_batched_tokens or max(max_model_len, LEAST_BATCHED_TOKENS, self.max_num_seqs)
        return replace(self, max_num_batched_tokens=budget)


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(BatchLimits):
    """The largest batch, and its execution."""

    execution: Execution = "padded"
    """`padded`: one forward for all prefills of a step and one for all decodes, over a dense cache with a slot per
    request. `per_request`: a forward for each request, as in m1."""

    def __post_init__(self) -> None:
        if not isinstance(self.execution, str) or self.execution not in get_args(Execution):
            raise ConfigError(f"execution={shown(self.execution)} is unknown: use {' or '.join(get_args(Execution))}")
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class EngineConfig(SingleRequestConfig):
    """All settings of an m2 engine. The field `x` is the engine's keyword `x_config`."""

    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
