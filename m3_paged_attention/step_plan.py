"""Step plan: the scheduled requests of a step, their new blocks, and the rest of the token budget.

m2's plan had rows of two kinds, whole prompts and single tokens. Here a request may also be resumed with its output so
far, or start on the blocks of a sibling. So a row is a number of tokens from any position on.
"""

from collections.abc import Mapping, Sequence

from m1_single_request.stop_checker import StopChecker
from m2_continuous_batching.scheduler_output import CachedRequestData
from m3_paged_attention.block_pool import BlockMoves
from m3_paged_attention.request import Request
from m3_paged_attention.scheduler_output import NewRequestData, ResumedReqData, SchedulerOutput

NO_BLOCKS: list[int] = []  # the same list for all requests; a message is never modified


class StepPlan:
    """Collects the requests of a step; `output` returns them as the scheduler's output."""

    def __init__(self, *, budget: int) -> None:
        self.budget = budget
        self.budget_left = budget
        self.num_scheduled_tokens: dict[str, int] = {}
        self._full: list[tuple[Request, list[int]]] = []  # with all their blocks
        self._decodes: list[Request] = []
        self._new_block_ids: list[list[int]] = []  # of each decode

    def add_full(self, request: Request, block_ids: list[int]) -> None:
        """Schedule all tokens without KV of a new or resumed request. `block_ids`: its whole block table."""
        self._full.append((request, block_ids))
        request.is_sent = True
        num_tokens = request.sequence.get_len() - request.sequence.num_computed_tokens
        self.num_scheduled_tokens[request.request_id] = num_tokens
        self.budget_left -= num_tokens

    def add_decodes(self, requests: Sequence[Request], new_block_ids: Mapping[str, list[int]]) -> None:
        """Schedule the newest token of requests whose state the runner has. `new_block_ids`: by request id, if any."""
        req_ids = [request.request_id for request in requests]
        self._decodes += requests
        self._new_block_ids += [new_block_ids.get(request_id, NO_BLOCKS) for request_id in req_ids]
        self.num_scheduled_tokens.update(dict.fromkeys(req_ids, 1))
        self.budget_left -= len(req_ids)

    def output(
        self, *, finished_req_ids: frozenset[str], moves: BlockMoves, stop_checker: StopChecker
    ) -> SchedulerOutput:
        """Return the message that describes this step."""
        sequences = [request.sequence for request in self._decodes]
        return SchedulerOutput(
            scheduled_new_reqs=[
                NewRequestData(
                    req_id=request.request_id,
                    prompt_token_ids=request.prompt_token_ids,
                    sampling_params=request.sampling_params,
                    seed=request.seed,
                    stop_token_ids=stop_checker.stop_ids(request.sequence),
                    block_ids=block_ids,
                    num_computed_tokens=request.sequence.num_computed_tokens,
                )
                for request, block_ids in self._full
                if not request.sequence.output_token_ids
            ],
            scheduled_resumed_reqs=[
                ResumedReqData(
                    req_id=request.request_id,
                    output_token_ids=list(request.sequence.output_token_ids),
                    block_ids=block_ids,
                    num_computed_tokens=request.sequence.num_computed_tokens,
                )
                for request, block_ids in self._full
                if request.sequence.output_token_ids
            ],
            scheduled_cached_reqs=CachedRequestData(
                req_ids=[request.request_id for request in self._decodes],
                new_token_ids=[sequence.output_token_ids[-1:] for sequence in sequences],
                new_block_ids=self._new_block_ids,
                num_computed_tokens=[sequence.num_computed_tokens for sequence in sequences],
                num_output_tokens=[len(sequence.output_token_ids) for sequence in sequences],
            ),
            num_scheduled_tokens=self.num_scheduled_tokens,
            total_num_scheduled_tokens=self.budget - self.budget_left,
            finished_req_ids=finished_req_ids,
            blocks_to_swap_in=moves.swap_in,
            blocks_to_swap_out=moves.swap_out,
            blocks_to_copy=moves.copies,
        )
