"""Plan of one step: the token budget, and the tokens scheduled for each request."""

from m1_single_request.request import Request
from m2_continuous_batching.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput


class StepPlan:
    """A plan that the scheduler fills one request at a time; `output` makes the `SchedulerOutput` of it."""

    def __init__(self, *, budget: int) -> None:
        self.budget = budget
        self.budget_left = budget
        self.num_scheduled_tokens: dict[str, int] = {}
        self._prefills: list[NewRequestData] = []
        self._decodes = CachedRequestData()

    def add_prefill(self, request: Request, block_ids: list[int]) -> None:
        """Schedule a whole prompt."""
        prompt = request.prompt_token_ids
        self._prefills.append(NewRequestData(request.request_id, prompt, request.sampling_params, block_ids))
        self.num_scheduled_tokens[request.request_id] = len(prompt)
        self.budget_left -= len(prompt)

    def add_decode(self, request: Request, new_block_ids: list[int]) -> None:
        """Schedule the newest token of a running request."""
        sequence, decodes = request.sequence, self._decodes
        decodes.req_ids.append(request.request_id)
        decodes.new_token_ids.append(sequence.output_token_ids[-1:])
        decodes.new_block_ids.append(new_block_ids)
        decodes.num_computed_tokens.append(sequence.num_computed_tokens)
        decodes.num_output_tokens.append(len(sequence.output_token_ids))
        self.num_scheduled_tokens[request.request_id] = 1
        self.budget_left -= 1

    def output(self, *, finished_req_ids: frozenset[str]) -> SchedulerOutput:
        """Return the complete decision."""
        rows = [*(request.req_id for request in self._prefills), *self._decodes.req_ids]
        return SchedulerOutput(
            scheduled_new_reqs=self._prefills,
            scheduled_cached_reqs=self._decodes,
            num_scheduled_tokens={request_id: self.num_scheduled_tokens[request_id] for request_id in rows},
            total_num_scheduled_tokens=self.budget - self.budget_left,
            finished_req_ids=finished_req_ids,
        )
