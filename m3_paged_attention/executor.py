"""Executor: runs a step for the engine core, on one or more workers.

m2's executor took a batch and returned logits. This one takes the scheduler's output and returns tokens. Both are plain
data, so the workers could be in any process. The user may replace executor, worker and runner by own classes, so
`checked` checks what they return. vLLM: `v1/executor` (`UniProcExecutor` is this one).
"""

import operator
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from m1_single_request.engine_core import StepRecord
from m1_single_request.errors import PartError, shown
from m3_paged_attention.kv_cache_spec import KVCacheConfig, KVCacheSpec, MemoryProfile
from m3_paged_attention.outputs import ModelRunnerOutput
from m3_paged_attention.worker import GPUWorker


class GPUExecutor:
    """Executor of one worker in the same process."""

    def __init__(self, *, worker: GPUWorker) -> None:
        self.worker = worker

    def measure_memory(self, num_tokens: int) -> MemoryProfile:
        """Measure the GPU memory of a step of `num_tokens` new tokens. Raises `ConfigError` if it does not fit."""
        return self.worker.measure_memory(num_tokens)

    def kv_cache_spec(self, block_size: int) -> KVCacheSpec:
        """Return the shape of this model's KV blocks."""
        return self.worker.kv_cache_spec(block_size)

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the KV memory. Raises `ConfigError` if the machine has less."""
        self.worker.initialize_kv_cache(kv_cache_config)

    def execute_model(self, decision: Any) -> ModelRunnerOutput:
        """Run a step, described in the format of the model runner (in m3 a `SchedulerOutput`); return its tokens.

        An exception fails only the requests of this step; `torch.AcceleratorError` means that the device is lost.
        """
        return self.worker.execute_model(decision)

    def free_request(self, request_id: str) -> None:
        """Remove the state of a request; does nothing for an unknown id."""
        self.worker.free_request(request_id)

    def held_request_ids(self) -> list[str]:
        """Return the ids of the requests whose state the runner stores."""
        return self.worker.held_request_ids()

    def shutdown(self) -> None:
        """Free the KV memory and the model. Afterwards only `free_request` and `held_request_ids` work."""
        self.worker.shutdown()


def accepted(
    output: ModelRunnerOutput, record: StepRecord, fail: Callable[[list[str], Exception], None]
) -> ModelRunnerOutput:
    """Return a checked output, whose errors end their requests by `fail` of the engine core.

    The last `sample_seconds` of the step's last lap become the time of the sampler, which the runner has measured.
    """
    for request_id, error in output.errors.items():
        fail([request_id], error)
    phase, began, ended = record.laps.pop()
    between = max(began, ended - output.sample_seconds)
    record.laps += [(phase, began, between), ("sample", between, ended)]
    return output


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
    mappings = output.errors, output.prompt_logprobs
    if not all([isinstance(each, dict | Mapping) for each in mappings]):
        raise PartError(f"{source} returned errors or prompt_logprobs that are not a mapping by request id")
    most = {request_id: limit for request_id, limit in expected.items() if limit and request_id not in output.errors}
    if list(req_ids) == [*most] and all(map(_is_valid, token_ids, logprobs, most.values())):
        return output
    if unknown := set(req_ids).difference(expected):
        raise PartError(f"{source} returned a row for {min(map(repr, unknown))}, which is not in this step")
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
        return 1 <= count <= most and len(logprobs) == count and min(map(operator.index, token_ids)) >= 0
    except (TypeError, LookupError):
        return False
