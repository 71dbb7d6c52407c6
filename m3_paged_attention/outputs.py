"""What comes back from a step, and the numbers that only a memory of blocks has.

From m3 on the sampler runs next to the model, so what crosses the executor upwards are tokens, not logits. vLLM:
`v1/outputs.py`. Executor, worker and runner may be somebody else's, so what they say is checked where it comes in.
"""

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from m1_single_request.errors import PartError, shown
from m1_single_request.outputs import EngineStats as SingleRequestStats
from m1_single_request.sampler import LogprobRow


@dataclass(frozen=True)
class ModelRunnerOutput:
    """What one step's forward and sampler made, as parallel lists: plain numbers, no tensors."""

    req_ids: list[str]
    """Whoever got a token; a request whose row could not be used stands in `errors` instead."""
    sampled_token_ids: list[list[int]]
    """The new tokens of each; here always one."""
    logprobs: list[Sequence[LogprobRow | None]]
    """Of each of these tokens, where asked for."""
    prompt_logprobs: dict[str, tuple[LogprobRow, ...]] = field(default_factory=dict)
    """For the prompt's tokens after the first, by request id; with the prefill, where asked for."""
    errors: Mapping[str, Exception] = field(default_factory=dict)
    """By request id."""
    sample_seconds: float = 0.0
    """How much of the step was sampling."""


def checked(output: Any, expected: Mapping[str, int]) -> ModelRunnerOutput:
    """What a step brought for its requests, each with tokens or an error.

    `expected`: how many tokens each may bring at most; with 0, it brings none. A request that is missing, stands there
    twice or has not its tokens gets a `PartError`, and no row. If nobody can say which row is whose, it is raised.
    """
    said = "the executor (or its worker, or its model runner)"
    if not isinstance(output, ModelRunnerOutput):
        raise PartError(f"{said} returned {output!r:.80}, which is no ModelRunnerOutput")
    req_ids, token_ids, logprobs = output.req_ids, output.sampled_token_ids, output.logprobs
    if not len(req_ids) == len(token_ids) == len(logprobs):
        raise PartError(
            f"{said} returned {len(req_ids)} ids, {len(token_ids)} rows of tokens and {len(logprobs)} log-probabilities"
        )
    if not isinstance(output.errors, Mapping) or not isinstance(output.prompt_logprobs, Mapping):
        raise PartError(f"{said} returned errors or prompt_logprobs that are no mapping by request id")
    known = set(req_ids)
    if unknown := known.difference(expected):
        raise PartError(f"{said} returned a row for {min(map(repr, unknown))}, which is not in this step")
    most = [expected[request_id] for request_id in req_ids]
    everybody = len(known) == len(req_ids) and known.union(output.errors) >= {r for r, n in expected.items() if n}
    if everybody and all(map(_is_sound, token_ids, logprobs, most)):
        return output
    times = Counter(req_ids)
    errors = dict(output.errors)
    for request_id in expected:
        wanted = 1 if expected[request_id] else 0
        if times[request_id] != wanted and not (times[request_id] == 0 and request_id in errors):
            errors[request_id] = PartError(f"{said} returned {times[request_id]} rows for request {shown(request_id)}")
    sound = []
    for index, request_id in enumerate(req_ids):
        if times[request_id] != 1 or not most[index]:
            continue
        if _is_sound(token_ids[index], logprobs[index], most[index]):
            sound.append(index)
        else:
            wanted_tokens = "one token" if most[index] == 1 else f"1 to {most[index]} tokens"
            errors[request_id] = PartError(
                f"{said} returned {token_ids[index]!r:.80} for request {shown(request_id)} in place of {wanted_tokens}"
            )
    return replace(
        output,
        req_ids=[req_ids[i] for i in sound],
        sampled_token_ids=[token_ids[i] for i in sound],
        logprobs=[logprobs[i] for i in sound],
        errors=errors,
    )


def _is_sound(token_ids: Any, logprobs: Any, most: int) -> bool:
    """Whether these are the tokens of one row: whole numbers, at least one, and as many log-probabilities."""
    try:
        count = len(token_ids)
        return 1 <= count <= most and len(logprobs) == count and all(operator.index(i) >= 0 for i in token_ids)
    except (TypeError, LookupError):
        return False


@dataclass(frozen=True)
class EngineStats(SingleRequestStats):
    """m1's totals, and the state of the blocks."""

    num_blocks: int
    """Blocks that can be handed out."""
    num_free_blocks: int
    num_shared_blocks: int
    """Blocks with more than one owner."""
    kv_bytes_reserved: int
    """Memory of the blocks that somebody owns; `kv_bytes` of it hold something."""
    num_preemptions: int
    """How often a running request lost its blocks."""
