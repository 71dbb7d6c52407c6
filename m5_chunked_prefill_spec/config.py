"""Settings of an m5 engine: the contents of a step, and speculative decoding.

Model and cache are configured as in m4. `max_num_batched_tokens` limited the length of a prompt there; here it limits
the new tokens of a step, those of decodes, drafts and pieces of prompts together, and a prompt may be longer. SGLang:
`chunked_prefill_size`, `enable_mixed_chunk`, `speculative_*` of `ServerArgs`; vLLM: `SchedulerConfig` and
`SpeculativeConfig`.
"""

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal, Self

from msgspec import Meta

from m1_single_request.config import check_path
from m1_single_request.errors import ConfigError, shown
from m1_single_request.field_rules import PositiveInt, check_fields
from m3_paged_attention.device_limits import CPU_LIMITS, DeviceLimits
from m4_radix_cache.config import EngineConfig as RadixConfig, SchedulerConfig as RadixSchedulerConfig
from m5_chunked_prefill_spec.cost_table import CostTable

ScheduleName = Literal["decode_first", "prefill_first"]
SpeculativeMethod = Literal["ngram", "draft_model"]
PositiveFloat = Annotated[float, Meta(gt=0, le=sys.float_info.max)]

DEFAULT_DRAFT_MODEL = Path(__file__).parent / "checkpoints" / "tiny-qwen3-draft"
CPU_CHUNKED_TOKENS = 128
"""Default token budget on a CPU: short gaps between two tokens of a stream, with still efficient matrix sizes."""


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(RadixSchedulerConfig):
    """m4's settings, and the contents of a step: decodes, prompts, and pieces of prompts."""

    max_num_batched_tokens: PositiveInt | None = None
    """Maximum number of new tokens in one step. None: 128 on a CPU, 2,048 to 16,384 on CUDA by the memory of the device
    (m3's `device_limits.py`), and at least `max_num_seqs`; with `enable_chunked_prefill=False` as in m4, so that no
    prompt is refused for it."""
    schedule: ScheduleName = "decode_first"
    """Order in which a step is filled. `decode_first`: each running request gets a token, prompts get the rest of the
    budget. `prefill_first`: prompts run alone, as in m4, and running requests wait for them."""
    enable_chunked_prefill: bool = True
    """Whether a prompt may be cut into pieces. If not, a prompt longer than the budget is refused; any other runs whole
    in the first step in which the decodes leave room for all of it, at the latest when no request decodes."""
    chunked_prefill_size: PositiveInt | None = None
    """Maximum number of prompt tokens in one step. None: the token budget is the only limit."""
    target_gap_ms: PositiveFloat | None = None
    """Target duration of a step in milliseconds, with `decode_first`: prompts are cut so that a step stays within it by
    the cost table. A step without prompts may take longer. None: no target, and no cost table."""
    cost_table: CostTable | None = None
    """Costs of steps for `target_gap_ms`. None: measured when the engine is built, and recorded in the trace. With the
    table of another engine's trace, this engine makes the same decisions."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cost_table is not None and not isinstance(self.cost_table, CostTable):
            raise ConfigError(f"cost_table={shown(self.cost_table)} must be a CostTable")
        if self.cost_table is not None and self.target_gap_ms is None:
            raise ConfigError("cost_table has no effect without target_gap_ms: give both, or neither")
        if not self.enable_chunked_prefill:
            for name in ("chunked_prefill_size", "target_gap_ms"):
                if getattr(self, name) is not None:
                    raise ConfigError(f"{name} has no effect with enable_chunked_prefill=False: no prompt is cut")
        if self.schedule == "prefill_first" and self.target_gap_ms is not None:
            raise ConfigError("target_gap_ms has no effect with schedule='prefill_first': decodes wait for all prompts")

    def resolved(self, max_model_len: int, device: DeviceLimits = CPU_LIMITS) -> Self:
        """Return a copy with every None of the limits replaced, for a model of this length on such a device."""
        limits = super().resolved(max_model_len, device)
        if self.max_num_batched_tokens is not None or not self.enable_chunked_prefill:
            return limits
        assert limits.max_num_seqs is not None
        chunked = CPU_CHUNKED_TOKENS if device.total_bytes is None else device.max_num_batched_tokens
        return replace(limits, max_num_batched_tokens=max(chunked, limits.max_num_seqs))


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Settings of speculative decoding: a step verifies several drafted tokens of a request."""

    method: SpeculativeMethod | None = None
    """Source of the drafts. `ngram`: the tokens that followed an earlier occurrence of the last tokens in prompt or
    output. `draft_model`: a small model. None: no speculation."""
    num_speculative_tokens: Annotated[int, Meta(ge=1, le=64)] = 4
    """Number of drafts for a request in one step; fewer where its answer or the step's budget ends, or where `ngram`
    finds fewer."""
    prompt_lookup_max: PositiveInt = 4
    """`ngram`: length of the longest run of last tokens that is searched."""
    prompt_lookup_min: PositiveInt = 2
    """`ngram`: length of the shortest run."""
    model: str | Path | None = None
    """`draft_model`: a local directory or hub id of a model with the target's tokenizer. None: the embedded checkpoint,
    the draft model of the default model."""

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        check_path("model", self.model, "a directory or a hub id", optional=True)
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"prompt_lookup_min={self.prompt_lookup_min} is more than prompt_lookup_max={self.prompt_lookup_max}"
            )
        for name, methods in READ_BY.items():
            if self.method not in methods and getattr(self, name) != getattr(type(self), name):
                raise ConfigError(f"{name} has no effect with method={self.method!r}: use {' or '.join(methods)}")

    @property
    def num_draft_tokens(self) -> int:
        """Maximum number of drafts of a request in a step."""
        return 0 if self.method is None else self.num_speculative_tokens

    def limits(self, device: DeviceLimits) -> DeviceLimits:
        """Return the default limits of steps with drafts on a device. On CUDA fewer requests run than without: a
        request with drafts has several rows of logits in a step, and the number of rows stays the same."""
        if device.total_bytes is None:
            return device
        fitting = device.max_num_seqs // (1 + self.num_draft_tokens) // 8 * 8
        return device._replace(max_num_seqs=max(fitting, CPU_LIMITS.max_num_seqs))


READ_BY: dict[str, tuple[SpeculativeMethod, ...]] = {
    "num_speculative_tokens": ("ngram", "draft_model"),
    "prompt_lookup_max": ("ngram",),
    "prompt_lookup_min": ("ngram",),
    "model": ("draft_model",),
}
"""The methods that read a field."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig(RadixConfig):
    """All settings of an m5 engine. The field `x` is the engine's keyword `x_config`."""

    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
