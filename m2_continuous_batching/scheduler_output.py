"""What the scheduler tells the rest of the engine: full data once, differences afterwards.

In m1 the decision was one request and its tokens. Now it is a batch, and it may have to travel to a worker in another
process. So a request is described in full when it joins (`NewRequestData`), and from then on only by what changed
(`CachedRequestData`); whoever runs it remembers the rest. vLLM: `v1/core/sched/output.py`. SGLang sends a living
`ScheduleBatch` instead (m4).
"""

from dataclasses import dataclass

from m1_single_request.sampling_params import SamplingParams


@dataclass(frozen=True)
class NewRequestData:
    """A request that runs for the first time: its whole prompt goes through the model."""

    req_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    block_ids: list[int]
    """Its KV memory. In m2 one id, the slot."""
    num_computed_tokens: int = 0
    """Tokens whose KV exists already; always 0 before m4."""


@dataclass(frozen=True)
class CachedRequestData:
    """The requests that ran before, as parallel lists: whoever runs them has the rest cached."""

    req_ids: list[str]
    new_token_ids: list[list[int]]
    """The tokens to feed in now: the newest one of each."""
    new_block_ids: list[list[int]]
    """KV memory that each got in addition. A slot never grows, so these are empty here; m3's blocks do."""
    num_computed_tokens: list[int]
    """Tokens of each whose KV exists: the position of the first new token, prompt + output - 1."""
    num_output_tokens: list[int]
    """Output tokens of each so far, the one that is fed in now included."""

    @classmethod
    def make_empty(cls) -> "CachedRequestData":
        """For a step in which nobody goes on."""
        return cls([], [], [], [], [])

    @property
    def num_reqs(self) -> int:
        return len(self.req_ids)


@dataclass(frozen=True)
class SchedulerOutput:
    """One step's decision, complete. Nobody changes it."""

    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    num_scheduled_tokens: dict[str, int]
    """New tokens by request id, in the order of the batch."""
    total_num_scheduled_tokens: int
    finished_req_ids: frozenset[str]
    """Requests that ended since the last decision, each named exactly once; their memory is free already. An id that is
    used again at once stands here and among the new ones: the end came first."""
