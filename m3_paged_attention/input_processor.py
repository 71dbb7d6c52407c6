"""Input processor: accept `n > 1`, and reject a prompt that does not fit into the KV memory.

m2's check of the token budget stays, because a prompt is still computed in one step. vLLM:
`v1/engine/input_processor.py`.
"""

from collections.abc import Callable
from dataclasses import replace

from m1_single_request.detokenizer import IncrementalDetokenizer
from m1_single_request.errors import shown
from m1_single_request.input_processor import Arrival, InputProcessor as SingleRequestInputProcessor, check_model_len
from m1_single_request.model_loader import ModelDescription
from m1_single_request.request import Request
from m1_single_request.sampling_params import SamplingParams
from m2_continuous_batching.input_processor import check_token_budget
from m3_paged_attention.block_pool import blocks_for
from m3_paged_attention.errors import KVCapacityError
from m3_paged_attention.request import ParentRequest


class InputProcessor(SingleRequestInputProcessor):
    """m1's, with the token budget and the KV memory in `check_limits`, and `n` > 1 in `build_request`."""

    def __init__(
        self,
        *,
        request_class: type[Request],
        detokenizer_class: type[IncrementalDetokenizer],
        loaded_model: ModelDescription,
        seed: int,
        max_num_batched_tokens: int,
        num_blocks: int,
        block_size: int,
    ) -> None:
        super().__init__(
            request_class=request_class, detokenizer_class=detokenizer_class, loaded_model=loaded_model, seed=seed
        )
        self.max_num_batched_tokens = max_num_batched_tokens
        self.num_blocks = num_blocks
        self.block_size = block_size

    def check_limits(self, token_ids: list[int], params: SamplingParams, request_id: str) -> None:
        """Raise `InvalidRequestError` for a request that this engine can never run."""
        check_model_len(token_ids, self.max_model_len, request_id)
        check_token_budget(token_ids, self.max_num_batched_tokens, request_id)
        needed = blocks_for(len(token_ids), self.block_size)
        if needed > self.num_blocks:
            raise KVCapacityError(
                f"request {shown(request_id)} has {len(token_ids)} prompt tokens, which need {needed} blocks of "
                f"{self.block_size} tokens; the whole KV memory has {self.num_blocks}"
            )

    def build_request(self, arrival: Arrival) -> Request:
        """Build a request, or for `n > 1` a parent of `n` requests."""
        return build_family(arrival, super().build_request)


def build_family(arrival: Arrival, build_one: Callable[[Arrival], Request]) -> Request:
    """Build a request by `build_one`, or for `n > 1` a parent of `n` requests: child i is `request_id/i` and draws from
    `seed + i`.

    The prompt's log-probabilities are the same for all children, so only the first one computes them. `build_one` makes
    a request of any class with a `parent_id`.
    """
    request_id, params, seed = arrival.request_id, arrival.params, arrival.seed
    if params.n == 1:
        return build_one(arrival)
    first, others = replace(params, n=1), replace(params, n=1, prompt_logprobs=None)
    children = [
        build_one(arrival._replace(request_id=f"{request_id}/{i}", params=others if i else first, seed=seed + i))
        for i in range(params.n)
    ]
    return ParentRequest(children, request_id=request_id)
