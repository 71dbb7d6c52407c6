"""A request in the engine: its parameters, its tokens, its status, and its finish reason.

The scheduled unit is a `Request` with exactly one `Sequence`. The scheduler changes their tokens and status. vLLM
calls the same things `Request` and (once) `Sequence`, SGLang puts both into `Req`; the family of finish reasons is
SGLang's.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from m1_single_request.detokenizer import IncrementalDetokenizer
from m1_single_request.outputs import Logprob, TokenLogprobs
from m1_single_request.sampler import LogprobRow
from m1_single_request.sampling_metadata import SamplingRow
from m1_single_request.sampling_params import SamplingParams


class RequestStatus(Enum):
    """The states of a request."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    """It ran and lost its KV memory, to other requests or in a failed step, so it waits again (from m3 on)."""
    TRANSFERRING = "transferring"
    """Its KV is on its way to another engine, or from one: it neither runs nor waits (m6)."""
    FINISHED = "finished"


# --- why a request ended ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BaseFinishReason:
    """The reason why a request ended. `reason` is the output's `finish_reason`; `stop_reason` is the id or string that
    ended it, or None."""

    reason: ClassVar[str]

    @property
    def stop_reason(self) -> int | str | None:
        return None


@dataclass(frozen=True)
class FinishMatchedToken(BaseFinishReason):
    """An end-of-sequence id or one of `stop_token_ids` was produced."""

    reason: ClassVar[str] = "stop"
    token_id: int
    is_eos: bool

    @property
    def stop_reason(self) -> int | str | None:
        """The id for `stop_token_ids`, None for the model's own end of sequence (as in vLLM)."""
        return None if self.is_eos else self.token_id


@dataclass(frozen=True)
class FinishMatchedStr(BaseFinishReason):
    """A stop string appeared in the text."""

    reason: ClassVar[str] = "stop"
    text: str

    @property
    def stop_reason(self) -> int | str | None:
        return self.text


@dataclass(frozen=True)
class FinishLength(BaseFinishReason):
    """`max_tokens` or `max_model_len` was reached; `limit` names it."""

    reason: ClassVar[str] = "length"
    limit: str
    value: int


@dataclass(frozen=True)
class FinishAbort(BaseFinishReason):
    """The caller gave up: `abort_request`, or a stream closed early."""

    reason: ClassVar[str] = "abort"


@dataclass(frozen=True)
class FinishError(BaseFinishReason):
    """The request failed: alone, with the other requests of its step, or with all requests."""

    reason: ClassVar[str] = "error"
    error: BaseException


# --- the request ------------------------------------------------------------------------------------------------------


class Sequence:
    """One growing sequence of tokens and its text."""

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        detokenizer: IncrementalDetokenizer,
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.output_token_ids: list[int] = []
        self.output_logprobs: list[TokenLogprobs | None] = []
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self.num_computed_tokens = 0  # tokens whose KV exists; while decoding this is prompt + output - 1
        self.sampling_params = sampling_params
        self.text_end: int | None = None  # where a stop string cuts the text
        self.detokenizer = detokenizer  # the text of the output tokens

    def add_token_id(self, token_id: int, logprobs: TokenLogprobs | None = None) -> None:
        """Append an output token, which the detokenizer holds already. Its KV does not exist: the next step computes
        it."""
        self.output_token_ids.append(token_id)
        self.output_logprobs.append(logprobs)

    def add_prompt_logprobs(self, rows: SequenceOf[LogprobRow]) -> None:
        """Append the log-probabilities of the prompt's next tokens; the first token has none. A complete list is
        replaced: the prompt was computed again."""
        known = [None] if self.has_prompt_logprobs else self.prompt_logprobs or [None]
        self.prompt_logprobs = [*known, *map(self.named, rows)]

    @property
    def has_prompt_logprobs(self) -> bool:
        """True if all of the prompt's tokens have their log-probabilities."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) >= self.get_prompt_len()

    def named(self, row: LogprobRow) -> TokenLogprobs:
        """Return a row of log-probabilities by token id, with the text of each token."""
        columns = zip(row.token_ids, row.logprobs, row.ranks, strict=True)
        text = self.detokenizer.token_text
        return {token: Logprob(logprob, rank, text(token)) for token, logprob, rank in columns}

    def get_prompt_len(self) -> int:
        return len(self.prompt_token_ids)

    def get_output_len(self) -> int:
        return len(self.output_token_ids)

    def get_len(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)


class Request:
    """One request: its prompt, its parameters, its sequence and the times of its life (monotonic seconds)."""

    def __init__(self, request_id: str, prompt: str | None, sequence: Sequence, seed: int, arrival_time: float) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.sequence = sequence
        self.sampling_params = sequence.sampling_params
        self.seed = seed
        self.cached_tokens = 0  # prompt tokens whose KV was there already: nothing is ever cached before m4
        self.num_draft_tokens = 0  # output tokens that were guessed and verified: nothing is guessed before m5
        self.num_accepted_tokens = 0  # those among them that were right
        self.final_only = False  # its caller reads only the last output, so no other is made (vLLM: FINAL_ONLY)
        self.status = RequestStatus.WAITING
        self.to_finish: BaseFinishReason | None = None  # why it will end, once known; takes effect at an update
        self.finish_reason: BaseFinishReason | None = None
        self.arrival_time = arrival_time
        self.first_token_time: float | None = None
        self.finished_time: float | None = None

    def sampling_row(self, stop_ids: frozenset[int]) -> SamplingRow:
        """Return the sampler's input for the next token."""
        prompt, output = self.sequence.prompt_token_ids, self.sequence.output_token_ids
        return SamplingRow(self.sampling_params, self.seed, prompt, output, stop_ids)

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.sequence.prompt_token_ids

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED
