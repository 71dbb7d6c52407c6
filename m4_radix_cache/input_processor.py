"""Intake of requests that share KV memory: a request may have a priority and a cache namespace.

m3 checked whether a prompt fits into the blocks. Admission here also reserves memory for future output tokens, so each
request gets an upper bound: `max_tokens`, clipped to the model's length and to the memory. SGLang:
`Scheduler.handle_generate_request`; vLLM: `cache_salt` and `priority` of a request.
"""

from m1_single_request.detokenizer import IncrementalDetokenizer
from m1_single_request.errors import InvalidRequestError, shown
from m1_single_request.field_rules import Int, valid
from m1_single_request.input_processor import (
    Arrival,
    InputProcessor as SingleRequestInputProcessor,
    check_model_len,
    check_name,
)
from m1_single_request.model_loader import ModelDescription
from m1_single_request.request import Request
from m1_single_request.sampling_params import SamplingParams
from m2_continuous_batching.input_processor import check_token_budget
from m3_paged_attention.errors import KVCapacityError
from m3_paged_attention.input_processor import build_family
from m4_radix_cache.request import Req


class InputProcessor(SingleRequestInputProcessor):
    """m1's input processor; `check_limits` also checks token budget and KV memory, `build_request` sets the options."""

    def __init__(
        self,
        *,
        request_class: type[Req],
        detokenizer_class: type[IncrementalDetokenizer],
        loaded_model: ModelDescription,
        seed: int,
        max_num_batched_tokens: int,
        max_total_tokens: int,
    ) -> None:
        super().__init__(
            request_class=request_class,
            detokenizer_class=detokenizer_class,
            loaded_model=loaded_model,
            seed=seed,
        )
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_total_tokens = max_total_tokens

    def check_limits(self, token_ids: list[int], params: SamplingParams, request_id: str) -> None:
        """Raise a subclass of `InvalidRequestError` for a request that can never run."""
        check_model_len(token_ids, self.max_model_len, request_id)
        check_token_budget(token_ids, self.max_num_batched_tokens, request_id)
        check_kv_room(token_ids, self.max_total_tokens, request_id)

    def build_request(self, arrival: Arrival, *, priority: int = 0, cache_salt: str | None = None) -> Request:
        """Return a request, or the parent of `n` requests, with its priority and its cache namespace.

        Raises `InvalidRequestError` unless the priority is a whole number and the salt is text or None.
        """
        build, longest = super().build_request, min(self.max_model_len, self.max_total_tokens - 1)
        return build_family(arrival, lambda one: set_options(build(one), priority, cache_salt, longest))


def set_options(request: Request, priority: int, cache_salt: str | None, max_total_len: int) -> Req:
    """Set priority and namespace of a request, and clip its output to a total of `max_total_len` tokens. If no other
    request runs, such a request is always admitted. Raises `InvalidRequestError` for an option of the wrong type."""
    assert isinstance(request, Req), "the part `request` must be a Req"
    if cache_salt is not None:
        check_name("cache_salt", cache_salt)
    request.priority = valid("priority", priority, Int, InvalidRequestError)
    request.extra_key = cache_salt
    request.max_new_tokens = min(request.max_new_tokens, max_total_len - len(request.origin_input_ids))
    return request


def check_kv_room(token_ids: list[int], max_total_tokens: int, request_id: str) -> None:
    """Raise `KVCapacityError` for a prompt that leaves no room for output in the KV memory."""
    if len(token_ids) > max_total_tokens - 2:
        raise KVCapacityError(
            f"request {shown(request_id)} has {len(token_ids)} prompt tokens; the KV memory has room for "
            f"{max_total_tokens}, and a prompt must leave 2 of them"
        )
