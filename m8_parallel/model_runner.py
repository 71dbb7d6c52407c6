"""m6's model runner on a rank: the forward is shared, rank 0 samples, and all book what it has sampled.

In a step rank 0 sends at most two messages: the drafts of its draft model before the forward, and the outcome at the
end. If a rank fails before it has the outcome (it has no memory left, or a part of the user's raises an error there
alone), all ranks raise its error before any rank has updated its state: the requests of the step end, and the engine
goes on.
"""

from collections.abc import Callable, Sequence
from operator import index
from typing import Any, TypeVar

import torch
from torch import Tensor

from m1_single_request.errors import EngineDeadError
from m3_paged_attention.row_sampler import rate_prompts
from m5_chunked_prefill_spec.forward_batch import ForwardBatch
from m5_chunked_prefill_spec.model_worker_batch import ModelWorkerBatch
from m5_chunked_prefill_spec.outputs import ModelRunnerOutput
from m5_chunked_prefill_spec.speculative.spec_info import Drafts
from m6_multimodal_pd.disaggregation.runtime.jobs import error_of, fault_of
from m6_multimodal_pd.model_runner import ModelRunner
from m8_parallel.errors import RanksDifferError
from m8_parallel.events import Collectives
from m8_parallel.graphs import GraphCaptureOfRank
from m8_parallel.messages import Drafted, Outcome, from_bytes, to_bytes
from m8_parallel.ranks import Ranks

T = TypeVar("T")


class ParallelModelRunner(ModelRunner):
    """The model runner of a rank.

    `capture_graphs` captures again for a new group of the ranks.
    `execute_model` returns the same output or raises the same error on all ranks, `sample` is that of rank 0, whose
    outcome the others receive, and `drafted` gives all ranks the drafts of rank 0; a measured cost (`_cost_of`) is that
    of the slowest rank.
    """

    def __init__(self, *, ranks: Ranks, tracer: Any, **parts: Any) -> None:
        """`tracer`: gets the collectives of each step. `parts`: as m6's."""
        if parts["graph_capture"] is not None:
            parts["graph_capture"] = GraphCaptureOfRank(ranks, parts["graph_capture"])
        super().__init__(**parts)
        self._group: int | None = None  # for which the graphs were captured
        self.ranks, self.tracer, self.weight_bytes = ranks, tracer, parts["loaded_model"].weight_bytes

    def capture_graphs(self) -> None:
        """Capture the graphs as in m6, unless this group of ranks has them. No step may be in flight: its tensors take
        memory. If one of two models cannot be captured, the ranks form a new group: the other is captured again."""
        while self._group != self.ranks.num_groups:
            self._group = self.ranks.num_groups
            super().capture_graphs()

    def execute_model(self, batch: ModelWorkerBatch) -> ModelRunnerOutput:
        """Run a step on all ranks."""
        self.capture_graphs()
        execute = super().execute_model
        return self._together(lambda: execute(batch))

    def on_all_ranks(self, part: Callable[[], T]) -> T:
        """Run a part of a step, which ends when it has ended on all ranks."""

        def run() -> T:
            result = part()
            self.ranks.smallest(0)
            return result

        return self._together(run)

    def _together(self, call: Callable[[], T]) -> T:
        """Return `call()`, a part of a step. After an error nothing is left that one rank may have and another not."""
        try:
            return self.ranks.together(call)
        except (EngineDeadError, torch.AcceleratorError):
            raise
        except Exception:
            if self.ranks.size > 1:
                self.encoder.clear()
            raise
        finally:
            self.tracer.emit(Collectives.of, self.ranks, self.ranks.record.taken())

    def sample(
        self, batch: ModelWorkerBatch, forward_batch: ForwardBatch, hidden: Tensor, drafts: Drafts | None = None
    ) -> ModelRunnerOutput:
        """Sample on rank 0, and return its outcome on all ranks."""
        if self.ranks.size == 1:
            return super().sample(batch, forward_batch, hidden, drafts)
        has_logits = any(batch.sample_lens)
        if batch.prompts_to_rate or not has_logits:  # nothing is gathered, or not before a host waits for its device
            self.ranks.arrive()
        if self.ranks.is_first:
            output = super().sample(batch, forward_batch, hidden, drafts)
            if not has_logits:
                self._gather_nothing()
            self.ranks.send_to_all(to_bytes(outcome_of(output)))
            return output
        if batch.prompts_to_rate:
            rate_prompts(self._prompts_to_rate(batch, hidden, forward_batch.starts), self.model.compute_logits)
        if has_logits:
            last = hidden if forward_batch.logits_indices is None else hidden[forward_batch.logits_indices]
            self.model.compute_logits(last)
        else:
            self._gather_nothing()
        output = self.received(batch.rids)
        if self.draft_runner is not None and has_logits:
            accepted = dict(zip(output.req_ids, output.sampled_token_ids, strict=True))
            try:
                self.draft_runner.follow(batch, drafts, [len(accepted.get(rid, [0])) - 1 for rid in batch.rids])
            except Exception as error:  # rank 0 books the step already
                raise RanksDifferError(f"rank {self.ranks.rank} has failed after the outcome: {error}") from error
        return output

    def received(self, rids: Sequence[str]) -> ModelRunnerOutput:
        """Return the outcome of rank 0, for a batch of these requests."""
        return output_of(from_bytes(self.ranks.receive()), rids)

    def drafted(self, batch: ModelWorkerBatch) -> tuple[ModelWorkerBatch, Drafts | None]:
        """Return the step with its drafts: those of rank 0, whose draft model may round otherwise than this one."""
        batch, drafts = super().drafted(batch)
        if self.draft_runner is None or drafts is None or self.ranks.size == 1:
            return batch, drafts
        if self.ranks.is_first:
            self.ranks.send_to_all(to_bytes(Drafted(tuple(map(_whole, drafts.token_ids)))))
            return batch, drafts
        drafted: Drafted = from_bytes(self.ranks.receive())
        drafts = drafts._replace(token_ids=[list(ids) for ids in drafted.token_ids])
        return batch.with_drafts(drafts.token_ids), drafts

    def _gather_nothing(self) -> None:
        """Gather a placeholder in a step without logits: rank 0 sends the outcome only after all forwards are done."""
        self.ranks.gather(torch.zeros(1))

    def _cost_of(self, num_tokens: int, context: int) -> float:
        return self.ranks.largest(super()._cost_of(num_tokens, context))[0]


def outcome_of(output: ModelRunnerOutput) -> Outcome:
    """Return the output of a step as a message."""
    return Outcome(
        req_ids=tuple(output.req_ids),
        token_ids=tuple(map(_whole, output.sampled_token_ids)),
        logprobs=tuple(map(tuple, output.logprobs)),
        prompt_logprobs={rid: tuple(rows) for rid, rows in output.prompt_logprobs.items()},
        faults={rid: fault_of(error) for rid, error in output.errors.items()},
        draft_token_ids={rid: _whole(ids) for rid, ids in output.draft_token_ids.items()},
    )


def output_of(outcome: Outcome, rids: Sequence[str]) -> ModelRunnerOutput:
    """Return the output of a step from its message, with the ids of its own batch (see `EndedId`)."""
    own = {str(rid): rid for rid in rids}
    return ModelRunnerOutput(
        req_ids=[own[rid] for rid in outcome.req_ids],
        sampled_token_ids=[list(ids) for ids in outcome.token_ids],
        logprobs=list(outcome.logprobs),
        prompt_logprobs={own[rid]: rows for rid, rows in outcome.prompt_logprobs.items()},
        errors={own[rid]: error_of(fault, "rank 0") for rid, fault in outcome.faults.items()},
        draft_token_ids={own[rid]: list(ids) for rid, ids in outcome.draft_token_ids.items()},
    )


def _whole(ids: Sequence[int]) -> tuple[int, ...]:
    return tuple(map(index, ids))
