"""Output of a step, and statistics of the KV blocks.

From m3 on the sampler runs next to the model, so the executor returns tokens, not logits. The user may replace
executor, worker and runner by own classes, so their output is checked here. vLLM: `v1/outputs.py`.
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
    """The sampled tokens of a step, as parallel lists of plain numbers, without tensors."""

    req_ids: list[str]
    """Requests that got a token; a request with an unusable row is in `errors` instead."""
    sampled_token_ids: list[list[int]]
    """The new tokens of each request; in m3 always one."""
    logprobs: list[Sequence[LogprobRow | None]]
    """Log-probabilities of each of these tokens; None if not requested."""
    prompt_logprobs: dict[str, tuple[LogprobRow, ...]] = field(default_factory=dict)
    """Request id -> log-probabilities of the prompt's tokens after the first, if requested; in the prefill's step."""
    errors: Mapping[str, Exception] = field(default_factory=dict)
    """Request id -> the error that ends the request, such as logits that are not finite."""
    sample_seconds: float = 0.0
    """Duration of sampling, in seconds."""


def checked(output: Any, expected: Mapping[str, int]) -> ModelRunnerOutput:
    """Check the output of a step, and return it with valid rows only.

    `expected`: maximum number of tokens by request id; 0: the request has no row. A request with a missing, duplicate
    or invalid row gets a `PartError` instead of a row. Raises `PartError` if rows cannot be matched to requests.
    """
    source = "the executor (or its worker, or its model runner)"
    if not isinstance(output, ModelRunnerOutput):
        raise PartError(f"{source} returned {output!r:.80}, which is not a ModelRunnerOutput")
    req_ids, token_ids, logprobs = output.req_ids, output.sampled_token_ids, output.logprobs
    if not len(req_ids) == len(token_ids) == len(logprobs):
        lengths = f"{len(req_ids)} ids, {len(token_ids)} rows of tokens and {len(logprobs)} of logprobs"
        raise PartError(f"{source} returned {lengths}")
    if not isinstance(output.errors, Mapping) or not isinstance(output.prompt_logprobs, Mapping):
        raise PartError(f"{source} returned errors or prompt_logprobs that are not a mapping by request id")
    returned = set(req_ids)
    if unknown := returned.difference(expected):
        raise PartError(f"{source} returned a row for {min(map(repr, unknown))}, which is not in this step")
    most = [expected[request_id] for request_id in req_ids]
    has_duplicates = len(returned) < len(req_ids)
    is_complete = returned.union(output.errors) >= {r for r, n in expected.items() if n}
    if is_complete and not has_duplicates and all(map(_is_valid, token_ids, logprobs, most)):
        return output
    num_rows, errors, valid = Counter(req_ids), dict(output.errors), []
    for request_id, limit in expected.items():
        count = num_rows[request_id]
        if limit and count == 1:
            index = req_ids.index(request_id)
            if _is_valid(token_ids[index], logprobs[index], limit):
                valid.append(index)
                continue
            tokens = "one token" if limit == 1 else f"1 to {limit} tokens"
            wrong = f"{token_ids[index]!r:.80} for request {shown(request_id)} in place of {tokens}"
        elif count or (limit and request_id not in errors):
            wrong = f"{count} rows for request {shown(request_id)}"
        else:
            continue
        errors[request_id] = PartError(f"{source} returned {wrong}")
    return replace(
        output,
        req_ids=[req_ids[i] for i in valid],
        sampled_token_ids=[token_ids[i] for i in valid],
        logprobs=[logprobs[i] for i in valid],
        errors=errors,
    )


def _is_valid(token_ids: Any, logprobs: Any, most: int) -> bool:
    """Return whether these are the tokens of one row: 1 to `most` whole numbers, and as many log-probabilities."""
    try:
        count = len(token_ids)
        return 1 <= count <= most and len(logprobs) == count and all(operator.index(i) >= 0 for i in token_ids)
    except (TypeError, LookupError):
        return False


@dataclass(frozen=True)
class EngineStats(SingleRequestStats):
    """m1's totals, and the state of the blocks."""

    num_blocks: int
    """Blocks that can be allocated."""
    num_free_blocks: int
    num_shared_blocks: int
    """Blocks with more than one owner."""
    kv_bytes_reserved: int
    """Memory of the allocated blocks; `kv_bytes` of it hold tokens."""
    num_preemptions: int
    """Number of preemptions of running requests."""
