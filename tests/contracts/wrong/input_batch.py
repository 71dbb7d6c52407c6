"""Typical mistakes in an input batch, each with the hint that it must get."""

from dataclasses import replace

from m2_continuous_batching.scheduler_output import CachedRequestData
from m3_paged_attention.input_batch import BatchRow, CachedRequestState, InputBatch
from m3_paged_attention.scheduler_output import SchedulerOutput


class AlwaysAppends(InputBatch):
    """A new block goes behind the others, also if it is a copy."""

    def update(self, scheduler_output: SchedulerOutput) -> list[BatchRow]:
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            table = self.block_tables[self.states[request_id].table_row]
            used = int((table != 0).sum())
            table[used : used + len(block_ids)] = block_ids
        none: list[list[int]] = [[] for _ in cached.req_ids]
        return super().update(replace(scheduler_output, scheduled_cached_reqs=replace(cached, new_block_ids=none)))


class NextBlock(InputBatch):
    """The place of a new block is computed from the length, not from the position."""

    def update(self, scheduler_output: SchedulerOutput) -> list[BatchRow]:
        rows = super().update(scheduler_output)
        cached = scheduler_output.scheduled_cached_reqs
        places = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        for request_id, block_ids, start in places:
            if block_ids:
                table = self.block_tables[self.states[request_id].table_row]
                table[start // self.block_size] = 0
                table[min((start + 1) // self.block_size, len(table) - 1)] = block_ids[-1]
        return rows


class EndsLast(InputBatch):
    """Ended requests are removed after the new ones were added."""

    def update(self, scheduler_output: SchedulerOutput) -> list[BatchRow]:
        rows = super().update(replace(scheduler_output, finished_req_ids=frozenset()))
        for request_id in scheduler_output.finished_req_ids:
            self.remove(request_id)
        return rows


class LeavesOldBlocks(InputBatch):
    """Blocks of the request that had the row before stay behind the new ones."""

    def _set_blocks(self, state: CachedRequestState, block_ids: list[int]) -> None:
        self.block_tables[state.table_row, : len(block_ids)] = block_ids


class AnotherList(InputBatch):
    """A resumed request gets a new list, which the sampler does not know."""

    def update(self, scheduler_output: SchedulerOutput) -> list[BatchRow]:
        for resumed in scheduler_output.scheduled_resumed_reqs:
            self.states[resumed.req_id].output_token_ids = []
        return super().update(scheduler_output)


class KeepsTheMessage(InputBatch):
    """The list of the message becomes the request's own."""

    def update(self, scheduler_output: SchedulerOutput) -> list[BatchRow]:
        rows = super().update(scheduler_output)
        for resumed in scheduler_output.scheduled_resumed_reqs:
            state = self.states[resumed.req_id]
            state.output_token_ids = state.sampling_row.__dict__["output_token_ids"] = resumed.output_token_ids
        return rows


class InTheOrderOfTheMessage(InputBatch):
    """The rows are in the order in which the message has them."""

    def update(self, scheduler_output: SchedulerOutput) -> list[BatchRow]:
        rows = super().update(scheduler_output)
        full = [*scheduler_output.scheduled_new_reqs, *scheduler_output.scheduled_resumed_reqs]
        order = [*(data.req_id for data in full), *scheduler_output.scheduled_cached_reqs.req_ids]
        return sorted(rows, key=lambda row: order.index(row.state.req_id))


class FreesNoRow(InputBatch):
    """The row of a request that has ended is never used again."""

    def remove(self, request_id: str) -> None:
        self.states.pop(request_id, None)


class EverythingIsAPrompt(InputBatch):
    """A new request is a prompt, wherever it starts."""

    def update(self, scheduler_output: SchedulerOutput) -> list[BatchRow]:
        new = {data.req_id for data in scheduler_output.scheduled_new_reqs}
        rows = super().update(scheduler_output)
        return [row._replace(is_prompt=row.is_prompt or row.state.req_id in new) for row in rows]


class ForgetsTheCopy(InputBatch):
    """A new block is taken only if it is one more."""

    def update(self, scheduler_output: SchedulerOutput) -> list[BatchRow]:
        cached: CachedRequestData = scheduler_output.scheduled_cached_reqs
        columns = zip(cached.new_block_ids, cached.num_computed_tokens, strict=True)
        kept = [block_ids if start % self.block_size == 0 else [] for block_ids, start in columns]
        return super().update(replace(scheduler_output, scheduled_cached_reqs=replace(cached, new_block_ids=kept)))


WRONG = [
    (AlwaysAppends, "that one is shared"),
    (NextBlock, "and so did block 5"),
    (EndsLast, "remove it first"),
    (LeavesOldBlocks, "The old blocks behind the new one must go"),
    (AnotherList, "The sampler and the state have one list"),
    (KeepsTheMessage, "The lists of a message are not yours"),
    (InTheOrderOfTheMessage, "First all rows with more than one token"),
    (FreesNoRow, "The row of a request that has ended is free"),
    (EverythingIsAPrompt, "is_prompt is True only if that is 0"),
    (ForgetsTheCopy, "that one is shared"),
]
