"""Input processor with one more limit: a prompt that is longer than the token budget of a step is rejected.

m2 prefills every prompt whole, in one step, so such a prompt would wait for ever. m5 splits prompts into chunks and
removes this limit.
"""

from m1_single_request.detokenizer import IncrementalDetokenizer
from m1_single_request.errors import PromptTooLongError, shown
from m1_single_request.input_processor import InputProcessor as SingleRequestInputProcessor
from m1_single_request.model_loader import ModelDescription
from m1_single_request.request import Request
from m1_single_request.sampling_params import SamplingParams


class InputProcessor(SingleRequestInputProcessor):
    """m1's input processor, with the token budget in `check_limits`."""

    def __init__(
        self,
        *,
        request_class: type[Request],
        detokenizer_class: type[IncrementalDetokenizer],
        loaded_model: ModelDescription,
        seed: int,
        max_num_batched_tokens: int,
    ) -> None:
        super().__init__(
            request_class=request_class,
            detokenizer_class=detokenizer_class,
            loaded_model=loaded_model,
            seed=seed,
        )
        self.max_num_batched_tokens = max_num_batched_tokens

    def check_limits(self, token_ids: list[int], params: SamplingParams, request_id: str) -> None:
        """Reject a request that this engine can never run (`InvalidRequestError`)."""
        super().check_limits(token_ids, params, request_id)
        check_token_budget(token_ids, self.max_num_batched_tokens, request_id)


def check_token_budget(token_ids: list[int], max_num_batched_tokens: int, request_id: str) -> None:
    """Reject a prompt that is longer than the token budget of a step (`PromptTooLongError`)."""
    if len(token_ids) > max_num_batched_tokens:
        raise PromptTooLongError(
            f"request {shown(request_id)} has {len(token_ids)} prompt tokens; a prompt goes through the model in one "
            f"step, and max_num_batched_tokens is {max_num_batched_tokens}"
        )
