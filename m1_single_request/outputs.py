"""Outputs for the user: one `RequestOutput` per request and step with the result so far, complete when `finished`.

The names are vLLM's. Outputs are frozen: each step makes a new one, so an output that the user holds never changes.
Those of every step are msgspec's `Struct`, which is made in a third of the time of a frozen dataclass; to copy one with
other values, use `msgspec.structs.replace`.
"""

from dataclasses import dataclass

from msgspec import Struct


@dataclass(frozen=True)
class Logprob:
    """One token's log-probability according to the model, before penalties and temperature."""

    logprob: float
    rank: int
    """1 for the most likely token. For a token outside the requested best: the number of tokens at least as likely."""
    decoded_token: str
    """The token alone as text (U+FFFD for an incomplete character)."""


TokenLogprobs = dict[int, Logprob]
"""Token id -> `Logprob` at one position: the requested best tokens, and always the token at that position."""


class CompletionOutput(Struct, frozen=True):
    """One generated continuation."""

    index: int
    text: str
    """Text so far. Until the end it excludes an incomplete character and a possible beginning of a stop string."""
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None
    """Sum of the sampled tokens' logprobs; None if logprobs were not requested."""
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: str | None = None
    """`stop`, `length`, `abort`, `error`, or None while unfinished."""
    stop_reason: int | str | None = None
    """The stop string, or the id from `stop_token_ids`; None for end of sequence."""


class RequestMetrics(Struct, frozen=True):
    """Times (monotonic seconds) and token counts of one request."""

    arrival_time: float
    first_token_time: float | None
    finished_time: float | None
    num_prompt_tokens: int
    cached_tokens: int
    """Prompt tokens whose KV was in the prefix cache (from m4 on)."""
    num_output_tokens: int
    num_draft_tokens: int = 0
    """Draft tokens that the model verified (from m5 on)."""
    num_accepted_tokens: int = 0
    """Draft tokens that the model accepted, including accepted ones after the end of the output."""

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first output token (TTFT)."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def time_per_output_token(self) -> float | None:
        """Mean seconds between output tokens after the first (TPOT); None before the end or with fewer than two."""
        if self.first_token_time is None or self.finished_time is None or self.num_output_tokens < 2:
            return None
        return (self.finished_time - self.first_token_time) / (self.num_output_tokens - 1)

    @property
    def latency(self) -> float | None:
        """Seconds from arrival to the end of the request."""
        return None if self.finished_time is None else self.finished_time - self.arrival_time


class RequestOutput(Struct, frozen=True, weakref=True):
    """A request's result so far, after a step."""

    request_id: str
    prompt: str | None
    """The prompt as text; None if it was passed as token ids."""
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None
    """One entry per prompt token, the first is None; None if not requested."""
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    metrics: RequestMetrics
    error: BaseException | None = None
    """The error, if the `finish_reason` of a completion is `error`."""

    @property
    def text(self) -> str:
        """The text of the first completion."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The token ids of the first completion."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        """The finish reason of the first completion. With `n > 1` see each of `outputs`, and `error`."""
        return self.outputs[0].finish_reason


@dataclass(frozen=True)
class EngineStats:
    """Totals since the engine was built, and current values."""

    num_steps: int
    num_waiting: int
    num_running: int
    num_finished: dict[str, int]
    """Finish reason -> number of requests."""
    num_prompt_tokens: int
    """Prompt tokens that were prefilled."""
    num_output_tokens: int
    kv_tokens: int
    """Tokens whose KV is in memory now."""
    kv_bytes: int
    max_model_len: int
    """Maximum number of tokens of prompt plus output."""
