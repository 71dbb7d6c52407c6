"""Sampling parameters of one request: token selection and stop conditions.

The fields and their meaning are those of vLLM's `SamplingParams`. The defaults differ: greedy, 128 tokens. The
constructor checks all values, so an invalid one never reaches the engine. Only limits that depend on the model (token
ids within the vocabulary) are checked later, by `InputProcessor`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

from msgspec import Meta

from m1_single_request.errors import InvalidParamsError, is_unicode, shown
from m1_single_request.field_rules import Int, NonNegativeFloat, NonNegativeInt, PositiveInt, check_fields, valid

Bias = Annotated[float, Meta(ge=-100, le=100)]  # enough to force or to ban a token; the OpenAI API has the same range
Penalty = Annotated[float, Meta(ge=-2, le=2)]
MAX_TOKEN_IDS = 2**20  # entries of stop_token_ids and of logit_bias; no vocabulary is larger
MAX_STOP_CHARACTERS = 2**16  # of all stop strings together
GREEDY_EPSILON = 1e-5  # a temperature below this means greedy
BEFORE_GREEDY = ("min_tokens", "logit_bias", "repetition_penalty", "frequency_penalty", "presence_penalty")
AFTER_GREEDY = ("temperature", "min_p", "top_k", "top_p")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters and stop conditions of one request. Immutable; the constructor raises `InvalidParamsError`.

    The order in which the values act on the logits is fixed (see `Sampler`): min_tokens and logit_bias, penalties,
    greedy choice, temperature, min_p, top_k, top_p. A whole number is at most 2**63 - 1, stop strings have at most
    65,536 characters in all, and `stop_token_ids` and `logit_bias` at most 1,048,576 entries.
    """

    max_tokens: PositiveInt = 128
    """Maximum number of output tokens."""
    min_tokens: NonNegativeInt = 0
    """Minimum number of output tokens. Before it, stop ids cannot be sampled, and only a length limit stops."""
    temperature: NonNegativeFloat = 0.0
    """Divisor of the logits. Below 1e-5 the choice is greedy, and top_k, top_p and min_p are ignored."""
    top_k: Annotated[int, Meta(ge=-1, le=2**63 - 1)] = -1
    """Sample from the k most likely tokens; -1 means all."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Sample from the smallest set of most likely tokens whose total probability reaches p."""
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Exclude tokens whose probability is below this fraction of the highest probability."""
    presence_penalty: Penalty = 0.0
    """Subtracted once from the logit of every token in the output."""
    frequency_penalty: Penalty = 0.0
    """Subtracted from a token's logit once per occurrence of the token in the output."""
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output."""
    logit_bias: Mapping[int, float] | None = None
    """Values to add to the logits of these token ids; from -100 to 100."""
    stop: str | Sequence[str] = ()
    """Strings that end the output at their first occurrence; cut off unless `include_stop_str_in_output`."""
    stop_token_ids: Sequence[int] = ()
    """Token ids that end the output, besides the model's end-of-sequence ids."""
    include_stop_str_in_output: bool = False
    """Keep the stop string, or the text of the stop token, in the output text."""
    ignore_eos: bool = False
    """Continue after the model's end-of-sequence ids (`stop_token_ids` still stop)."""
    seed: Int | None = None
    """Seed of the random draws. None: derived from the engine's seed and the request's number."""
    logprobs: NonNegativeInt | None = None
    """Return log-probabilities of this many most likely tokens per output position, and of the sampled token."""
    prompt_logprobs: NonNegativeInt | None = None
    """Number of most likely tokens per prompt token, as for `logprobs`; the first prompt token has none."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the output text."""
    n: Annotated[int, Meta(ge=1, le=16_384)] = 1  # vLLM's limit
    """Number of independent outputs. More than one needs shared KV blocks (m3)."""

    def __post_init__(self) -> None:
        check_fields(self, InvalidParamsError)
        if self.min_tokens > self.max_tokens:
            raise InvalidParamsError(f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}")
        if self.top_k == 0:
            raise InvalidParamsError("top_k=0 would leave no token: use -1 for all tokens, or at least 1")
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _token_ids(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _bias(self.logit_bias))

    @cached_property
    def is_greedy(self) -> bool:
        """True if the most likely token is taken, without a random draw."""
        return self.temperature < GREEDY_EPSILON

    @cached_property
    def has_penalties(self) -> bool:
        """True if any penalty changes the logits."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    def describe(self) -> str:
        """Return the settings that act on the logits, in the order in which they act; empty for plain greedy."""
        names = BEFORE_GREEDY if self.is_greedy else BEFORE_GREEDY + AFTER_GREEDY
        values = {name: getattr(self, name) for name in names}  # the class has the defaults, which change nothing
        return ", ".join(f"{name} {value}" for name, value in values.items() if value != getattr(SamplingParams, name))


def _stop_strings(stop: str | Sequence[str]) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, Sequence) or not all(isinstance(s, str) and s and is_unicode(s) for s in strings):
        raise InvalidParamsError(f"stop={shown(stop)} must be valid text or a list of texts, none of them empty")
    if sum(map(len, strings)) > MAX_STOP_CHARACTERS:
        raise InvalidParamsError(f"stop={shown(stop)} has more than {MAX_STOP_CHARACTERS:,} characters in all")
    return tuple(dict.fromkeys(strings))


def _token_ids(ids: Sequence[int]) -> tuple[int, ...]:
    is_list = isinstance(ids, Sequence) and not isinstance(ids, str | bytes | bytearray)
    if not is_list or len(ids) > MAX_TOKEN_IDS:
        raise InvalidParamsError(f"stop_token_ids={shown(ids)} must be a list of at most {MAX_TOKEN_IDS:,} token ids")
    token_ids: list[int] = valid("stop_token_ids", list(ids), list[NonNegativeInt], InvalidParamsError)
    return tuple(dict.fromkeys(token_ids))


def _bias(bias: Mapping[int, float] | None) -> dict[int, float] | None:
    if bias is None:
        return None
    if not isinstance(bias, Mapping) or len(bias) > MAX_TOKEN_IDS:
        raise InvalidParamsError(f"logit_bias={shown(bias)} must map at most {MAX_TOKEN_IDS:,} token ids to numbers")
    values: dict[int, float] = valid("logit_bias", dict(bias), dict[NonNegativeInt, Bias], InvalidParamsError)
    return values or None
