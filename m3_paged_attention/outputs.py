"""What comes back from a step, and the numbers that only a memory of blocks has.

From m3 on the sampler runs next to the model, so what crosses the executor upwards are tokens, not logits. vLLM:
`v1/outputs.py`. Executor, worker and runner may be somebody else's, so what they say is checked where it comes in.
"""

import operator
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from m1_single_request.outputs import EngineStats as SingleRequestStats
from m1_single_request.sampler import LogprobRow
from m3_paged_attention.errors import PartError


@dataclass(frozen=True)
class ModelRunnerOutput:
    """What one step's forward and sampler made, as parallel lists: plain numbers, no tensors."""

    req_ids: list[str]
    """Whoever got a token; a request whose row could not be used stands in `errors` instead."""
    sampled_token_ids: list[list[int]]
    """The new tokens of each; here always one."""
    logprobs: list[LogprobRow | None]
    prompt_logprobs: dict[str, tuple[LogprobRow, ...]] = field(default_factory=dict)
    """For the prompt's tokens after the first, by request id; with the prefill, where asked for."""
    errors: Mapping[str, Exception] = field(default_factory=dict)
    """By request id."""
    sample_seconds: float = 0.0
    """How much of the step was sampling."""


def checked(output: Any, scheduled: Mapping[str, int]) -> ModelRunnerOutput:
    """What a step brought for the requests that were `scheduled`, each with one token or an error.

    A request that is missing, stands there twice or has no token gets a `PartError`, and no row. If nobody can say
    which row is whose, it is raised.
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
    if unknown := known.difference(scheduled):
        raise PartError(f"{said} returned a row for {min(map(repr, unknown))}, which is not in this step")
    everybody = len(known) == len(req_ids) and known.union(output.errors) == scheduled.keys()
    if everybody and all(map(_is_one, token_ids)):
        return output
    times = Counter(req_ids)
    errors = dict(output.errors)
    for request_id in scheduled:
        if times[request_id] != 1 and not (times[request_id] == 0 and request_id in errors):
            errors[request_id] = PartError(f"{said} returned {times[request_id]} rows for request {request_id!r}")
    sound = []
    for index, request_id in enumerate(req_ids):
        if times[request_id] != 1:
            continue
        if _is_one(token_ids[index]):
            sound.append(index)
        else:
            errors[request_id] = PartError(
                f"{said} returned {token_ids[index]!r:.80} for request {request_id!r} in place of one token"
            )
    return replace(
        output,
        req_ids=[req_ids[i] for i in sound],
        sampled_token_ids=[token_ids[i] for i in sound],
        logprobs=[logprobs[i] for i in sound],
        errors=errors,
    )


def _is_one(token_ids: Any) -> bool:
    """Whether these are the tokens of one row: one whole number."""
    try:
        return len(token_ids) == 1 and operator.index(token_ids[0]) >= 0
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
