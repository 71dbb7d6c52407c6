"""Sampling parameters of one request: token selection and stop conditions.

The fields and their meaning are those of vLLM's `SamplingParams`. The defaults differ: greedy, 128 tokens. The
constructor checks all values, so an invalid one never reaches the engine. Only limits that depend on the model (token
ids within the vocabulary) are checked later, by `InputProcessor`.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from m1_single_request.errors import InvalidParamsError, is_unicode, shown

MAX_BIAS = 100  # enough to force or to ban a token; the OpenAI API has the same range
LARGEST = 2**63 - 1  # of a whole number: no request needs more, and messages between processes hold 64 bits
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

    max_tokens: int = 128
    """Maximum number of output tokens."""
    min_tokens: int = 0
    """Minimum number of output tokens. Before it, stop ids cannot be sampled, and only a length limit stops."""
    temperature: float = 0.0
    """Divisor of the logits. Below 1e-5 the choice is greedy, and top_k, top_p and min_p are ignored."""
    top_k: int = -1
    """Sample from the k most likely tokens; -1 means all."""
    top_p: float = 1.0
    """Sample from the smallest set of most likely tokens whose total probability reaches p."""
    min_p: float = 0.0
    """Exclude tokens whose probability is below this fraction of the highest probability."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once per occurrence of the token in the output."""
    repetition_penalty: float = 1.0
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
    seed: int | None = None
    """Seed of the random draws. None: derived from the engine's seed and the request's number."""
    logprobs: int | None = None
    """Return log-probabilities of this many most likely tokens per output position, and of the sampled token."""
    prompt_logprobs: int | None = None
    """Number of most likely tokens per prompt token, as for `logprobs`; the first prompt token has none."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the output text."""
    n: int = 1
    """Number of independent outputs. More than one needs shared KV blocks (m3)."""

    def __post_init__(self) -> None:
        _integer(self, "max_tokens", low=1)
        _integer(self, "min_tokens", low=0, high=self.max_tokens, high_is="max_tokens=")
        _integer(self, "n", low=1)
        _integer(self, "seed", low=-(2**63), high=2**63 - 1, optional=True)
        _integer(self, "logprobs", low=0, optional=True)
        _integer(self, "prompt_logprobs", low=0, optional=True)
        _integer(self, "top_k", low=-1)
        if self.top_k == 0:
            raise InvalidParamsError("top_k=0 would leave no token: use -1 for all tokens, or at least 1")
        _number(self, "temperature", low=0.0)
        _number(self, "top_p", low=0.0, high=1.0, open_low=True)
        _number(self, "min_p", low=0.0, high=1.0)
        _number(self, "presence_penalty", low=-2.0, high=2.0)
        _number(self, "frequency_penalty", low=-2.0, high=2.0)
        _number(self, "repetition_penalty", low=0.0, high=2.0, open_low=True)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidParamsError(f"{name}={shown(getattr(self, name))} must be True or False")
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


def _integer(
    params: SamplingParams, name: str, *, low: int, high: int = LARGEST, high_is: str = "", optional: bool = False
) -> None:
    value = getattr(params, name)
    if value is None and optional:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidParamsError(f"{name}={shown(value)} must be a whole number")
    if not low <= value <= high:
        raise InvalidParamsError(f"{name}={shown(value)} is out of range: it must be from {low} to {high_is}{high}")


def _number(
    params: SamplingParams, name: str, *, low: float, high: float = sys.float_info.max, open_low: bool = False
) -> None:
    value = getattr(params, name)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InvalidParamsError(f"{name}={shown(value)} must be a number")
    above = value > low if open_low else value >= low
    if not (above and value <= high):
        bound = f"{'greater than' if open_low else 'at least'} {low}"
        ceiling = f" and at most {high}" if high < sys.float_info.max else ""
        raise InvalidParamsError(f"{name}={shown(value)} is out of range: it must be finite, {bound}{ceiling}")
    object.__setattr__(params, name, float(value))


def _stop_strings(stop: str | Sequence[str]) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, Sequence) or not all(isinstance(s, str) and s and is_unicode(s) for s in strings):
        raise InvalidParamsError(f"stop={shown(stop)} must be valid text or a list of texts, none of them empty")
    if sum(map(len, strings)) > MAX_STOP_CHARACTERS:
        raise InvalidParamsError(f"stop={shown(stop)} has more than {MAX_STOP_CHARACTERS:,} characters in all")
    return tuple(dict.fromkeys(strings))


def _token_ids(ids: Sequence[int]) -> tuple[int, ...]:
    is_list = isinstance(ids, Sequence) and not isinstance(ids, str | bytes | bytearray) and len(ids) <= MAX_TOKEN_IDS
    if not is_list or not all(map(_is_token_id, ids)):
        raise InvalidParamsError(f"stop_token_ids={shown(ids)} must be a list of at most {MAX_TOKEN_IDS:,} token ids")
    return tuple(dict.fromkeys(ids))


def _bias(bias: Mapping[int, float] | None) -> dict[int, float] | None:
    if bias is None:
        return None
    if not isinstance(bias, Mapping) or len(bias) > MAX_TOKEN_IDS:
        raise InvalidParamsError(f"logit_bias={shown(bias)} must map at most {MAX_TOKEN_IDS:,} token ids to numbers")
    for token_id, value in bias.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not _is_token_id(token_id) or not is_number or not -MAX_BIAS <= value <= MAX_BIAS:
            bound = f"a token id to a number from -{MAX_BIAS} to {MAX_BIAS}"
            raise InvalidParamsError(f"logit_bias={{{shown(token_id)}: {shown(value)}}} must map {bound}")
    return dict(bias) or None


def _is_token_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST
