"""Configuration of an m2 engine: m1's model and trace, and the new limits of a batch.

vLLM: `SchedulerConfig` with the same two limits; SGLang: `max_running_requests` and `max_prefill_tokens`.
"""

from dataclasses import dataclass, field, replace
from typing import Literal, Self

from m1_single_request.config import EngineConfig as SingleRequestConfig
from m1_single_request.errors import ConfigError
from m1_single_request.field_rules import PositiveInt, check_fields

Execution = Literal["per_request", "padded"]
LEAST_BATCHED_TOKENS = 2048


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """The size limits of a batch, and its execution."""

    max_num_seqs: PositiveInt = 16
    """Maximum number of running requests."""
    max_num_batched_tokens: PositiveInt | None = None
    """Maximum number of new tokens in one step. A prompt runs in one step, so a longer prompt is rejected. None: the
    largest of `max_model_len`, 2,048 and `max_num_seqs`, so that this limit rejects no prompt."""
    execution: Execution = "padded"
    """`padded`: one forward for all prefills of a step and one for all decodes, with a dense cache of one slot per
    request. `per_request`: one forward per request, as in m1."""

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is less than max_num_seqs={self.max_num_seqs}: "
                f"a step could not run all running requests"
            )

    def resolved(self, max_model_len: int) -> Self:
        """Return a copy with every None replaced, for a model of `max_model_len` tokens."""
        budget = self.max_num_batched_tokens or max(max_model_len, LEAST_BATCHED_TOKENS, self.max_num_seqs)
        return replace(self, max_num_batched_tokens=budget)


@dataclass(frozen=True, kw_only=True)
class EngineConfig(SingleRequestConfig):
    """The whole configuration of an m2 engine. The field `x` is the engine's keyword `x_config`."""

    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
