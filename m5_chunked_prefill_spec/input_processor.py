"""Input processor for prompts that may run in pieces, so that their length is not limited by the token budget.

m4 rejected a prompt longer than the budget of a step. Here only `enable_chunked_prefill=False` does; the limits are the
model's length and the KV memory. A request may switch drafts off (`speculate=False`).
"""

from m1_single_request.detokenizer import IncrementalDetokenizer
from m1_single_request.errors import InvalidRequestError
from m1_single_request.field_rules import valid
from m1_single_request.input_processor import Arrival, InputProcessor as SingleRequestInputProcessor, check_model_len
from m1_single_request.model_loader import ModelDescription
from m1_single_request.request import Request
from m1_single_request.sampling_params import SamplingParams
from m2_continuous_batching.input_processor import check_token_budget
from m3_paged_attention.input_processor import build_family
from m4_radix_cache.input_processor import check_kv_room, set_options
from m5_chunked_prefill_spec.request import Req


class InputProcessor(SingleRequestInputProcessor):
    """m1's input processor; `check_limits` also checks the KV memory, `build_request` takes m5's options."""

    def __init__(
        self,
        *,
        request_class: type[Req],
        detokenizer_class: type[IncrementalDetokenizer],
        loaded_model: ModelDescription,
        seed: int,
        max_num_batched_tokens: int | None,
        max_total_tokens: int,
    ) -> None:
        """`max_num_batched_tokens`: None if prompts are cut."""
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
        if self.max_num_batched_tokens is not None:
            check_token_budget(token_ids, self.max_num_batched_tokens, request_id)
        check_kv_room(token_ids, self.max_total_tokens, request_id)

    def build_request(
        self, arrival: Arrival, *, priority: int = 0, cache_salt: str | None = None, speculate: bool = True
    ) -> Request:
        """Return a request, or the parent of `n` requests, with its options.

        Raises `InvalidRequestError` for a priority that is no whole number, a salt that is no text, or a `speculate`
        that is neither True nor False.
        """
        build, longest = super().build_request, min(self.max_model_len, self.max_total_tokens - 1)

        def build_one(arrival: Arrival) -> Req:
            req = set_options(build(arrival), priority, cache_salt, longest)
            assert isinstance(req, Req), "the part `request` must be a Req"
            req.speculate = valid("speculate", speculate, bool, InvalidRequestError)
            return req

        return build_family(arrival, build_one)
