"""Contract of the input batch of m3: what the runner remembers of requests, from messages that say what changed."""

from dataclasses import dataclass, field
from random import Random
from typing import Any

from m1_single_request import SamplingParams
from m2_continuous_batching.scheduler_output import CachedRequestData
from m3_paged_attention.scheduler_output import NewRequestData, ResumedReqData, SchedulerOutput
from tests.contracts.part import Part, same

PART = Part(
    name="input_batch",
    target="m3_paged_attention.input_batch:InputBatch",
    lesson="docs/m3_model.md#inputbatch-and-modelinput-one-row-for-all",
    starter="MyInputBatch",
    variant="m3_paged_attention-swap",
)

BLOCK_SIZE = 4


@dataclass
class Message:
    """A message, with one method per kind of request. It notes how a learner would say it."""

    new: list[NewRequestData] = field(default_factory=list)
    resumed: list[ResumedReqData] = field(default_factory=list)
    cached: CachedRequestData = field(default_factory=CachedRequestData)
    counts: dict[str, int] = field(default_factory=dict)
    finished: frozenset[str] = frozenset()
    words: list[str] = field(default_factory=list)

    def starts(self, rid: str, prompt: list[int], blocks: list[int], *, computed: int = 0) -> "Message":
        """A request in its first step."""
        self.new.append(NewRequestData(rid, prompt, SamplingParams(), 0, frozenset(), blocks, computed))
        self.counts[rid] = len(prompt) - computed
        known = f" with {computed} tokens computed" * bool(computed)
        self.words.append(f"new {rid}: prompt {prompt}, blocks {blocks}{known}")
        return self

    def resumes(self, rid: str, output: list[int], blocks: list[int], *, start: int, count: int) -> "Message":
        """A request that was preempted."""
        self.resumed.append(ResumedReqData(rid, output, blocks, start))
        self.counts[rid] = count
        self.words.append(f"resumed {rid}: output {output}, blocks {blocks}, {count} tokens from {start} on")
        return self

    def goes_on(self, rid: str, token: int, start: int, blocks: tuple[int, ...] = (), *, num: int = 1) -> "Message":
        """A request with a new token; `num`: how many tokens its output has."""
        lists = (self.cached.req_ids, self.cached.new_token_ids, self.cached.new_block_ids)
        for values, value in zip(lists, (rid, [token], list(blocks)), strict=True):
            values.append(value)  # type: ignore[attr-defined]
        self.cached.num_computed_tokens.append(start)
        self.cached.num_output_tokens.append(num)
        self.counts[rid] = 1
        more = f", new block {blocks[0]}" if blocks else ""
        self.words.append(f"cached {rid}: token {token} at position {start}{more}")
        return self

    def ends(self, *rids: str) -> "Message":
        self.finished |= {*rids}
        self.words.append(f"finished {', '.join(rids)}")
        return self

    def sent(self) -> SchedulerOutput:
        total = sum(self.counts.values())
        return SchedulerOutput(self.new, self.resumed, self.cached, self.counts, total, self.finished, [], [], [])


class Runner:
    """An input batch with blocks of 4 tokens, and what it was told."""

    shown = 6  # messages at most

    def __init__(self, part: Any, *, max_num_seqs: int = 4) -> None:
        self.batch = part(max_num_seqs=max_num_seqs, max_blocks_per_seq=4, block_size=BLOCK_SIZE)
        self.done = [f"max_num_seqs={max_num_seqs}, block_size={BLOCK_SIZE}"]

    def update(self, message: Message) -> list[tuple[str, int, int, bool]]:
        """Send a message. Returns the rows: request, start, number of tokens, is_prompt."""
        self.done.append(" and ".join(message.words))
        rows = self.batch.update(message.sent())
        return [(row.state.req_id, row.start, row.num_tokens, row.is_prompt) for row in rows]

    def table(self, rid: str) -> list[int]:
        return [int(block) for block in self.batch.block_tables[self.batch.states[rid].table_row]]

    def tables(self) -> dict[str, list[int]]:
        return {rid: self.table(rid) for rid in self.batch.states}

    @property
    def on(self) -> str:
        return "; ".join(self.done[:1] + ["..."] * (len(self.done) > self.shown + 1) + self.done[1:][-self.shown :])

    def same(self, got: Any, expected: Any, what: str, hint: str = "") -> None:
        same(got, expected, on=f"{self.on}; {what}", hint=hint)


def test_a_new_request_is_remembered(part: Any) -> None:
    """A new request gets a state, and its row of the step has its whole prompt."""
    runner = Runner(part)
    rows = runner.update(Message().starts("a", [11, 12, 13], [5]))
    runner.same(rows, [("a", 0, 3, True)], "the rows: request, start, tokens, is_prompt")
    runner.same(list(runner.batch.states), ["a"], "the ids in `states`")
    runner.same(runner.batch.states["a"].prompt_token_ids, [11, 12, 13], "the prompt of a")


def test_each_request_has_a_row_of_blocks(part: Any) -> None:
    """The row of a request has its blocks, and 0 behind them; no two requests share a row."""
    runner = Runner(part)
    runner.update(Message().starts("a", [1, 2, 3, 4, 5], [5, 2]).starts("b", [6, 7], [9]))
    runner.same(runner.tables(), {"a": [5, 2, 0, 0], "b": [9, 0, 0, 0]}, "the rows of block_tables")
    runner.update(Message().starts("c", [8], [3]))
    expected = {"a": [5, 2, 0, 0], "b": [9, 0, 0, 0], "c": [3, 0, 0, 0]}
    runner.same(runner.tables(), expected, "the rows of block_tables")


def test_a_newest_token_is_appended(part: Any) -> None:
    """A request that goes on has one more output token, and a row of one token at its position."""
    runner = Runner(part)
    runner.update(Message().starts("a", [11, 12], [5]))
    rows = runner.update(Message().goes_on("a", 21, 2))
    runner.same(rows, [("a", 2, 1, False)], "the rows: request, start, tokens, is_prompt")
    runner.update(Message().goes_on("a", 22, 3, num=2))
    state = runner.batch.states["a"]
    runner.same(
        state.output_token_ids, [21, 22], "the output of a", "The message has the newest token only: append it."
    )
    hint = "The sampler reads the same list: append to it, and do not make another one."
    runner.same(list(state.sampling_row.output_token_ids), [21, 22], "the output that the sampler sees", hint)
    runner.same(runner.table("a"), [5, 0, 0, 0], "the row of a", "No new block: the table stays as it is.")


def test_a_new_block_goes_behind_the_others(part: Any) -> None:
    """A new block whose first position is that of the new token goes behind the others."""
    runner = Runner(part)
    runner.update(Message().starts("a", [1, 2, 3, 4], [5]))
    runner.update(Message().goes_on("a", 21, 4, (7,)))
    hint = "Position 4 is in the block with the index 4 // 4."
    runner.same(runner.table("a"), [5, 7, 0, 0], "the row of a", hint)
    for place in range(3):
        runner.update(Message().goes_on("a", 22, 5 + place, num=2 + place))
    runner.update(Message().goes_on("a", 25, 8, (2,), num=5))
    runner.same(runner.table("a"), [5, 7, 2, 0], "the row of a", hint)


def test_a_copied_block_replaces_the_last_one(part: Any) -> None:
    """A new block whose positions the request has already is a copy: it replaces the last one."""
    runner = Runner(part)
    runner.update(Message().starts("a", [1, 2, 3, 4, 5], [5, 2]))
    runner.update(Message().goes_on("a", 21, 5, (7,)))
    hint = "The new block holds position 5, and so did block 2: that one is shared, and 7 is this request's own copy."
    runner.same(runner.table("a"), [5, 7, 0, 0], "the row of a", hint)
    runner = Runner(part)
    runner.update(Message().starts("a", [1, 2, 3], [5]))
    runner.update(Message().goes_on("a", 21, 3, (7,)))
    runner.same(runner.table("a"), [7, 0, 0, 0], "the row of a", "The new block holds position 3, and so did block 5.")


def test_an_ended_request_is_forgotten(part: Any) -> None:
    """A request that has ended is removed, and nothing of it is left for the next one; an unknown id is ignored."""
    runner = Runner(part, max_num_seqs=1)
    runner.update(Message().starts("a", [1, 2, 3, 4, 5, 6, 7, 8, 9], [5, 2, 8]))
    runner.update(Message().ends("a", "stranger"))
    runner.same(list(runner.batch.states), [], "the ids in `states`")
    runner.update(Message().starts("b", [1, 2], [3]))
    runner.same(runner.table("b"), [3, 0, 0, 0], "the row of b", "The old blocks behind the new one must go: write 0.")
    runner.batch.remove("b")
    runner.batch.remove("b")
    runner.done.append("remove(b), twice")
    runner.same(list(runner.batch.states), [], "the ids in `states`")


def test_an_id_may_be_used_again_at_once(part: Any) -> None:
    """An id may end and be new in the same message: then the new request stays."""
    runner = Runner(part)
    runner.update(Message().starts("a", [1, 2, 3, 4, 5], [5, 2]))
    runner.update(Message().ends("a").starts("a", [9], [3]))
    hint = "`finished_req_ids` names the request before: remove it first."
    runner.same(runner.tables(), {"a": [3, 0, 0, 0]}, "the rows of block_tables", hint)
    runner.same(runner.batch.states["a"].prompt_token_ids, [9], "the prompt of a", hint)


def test_a_request_that_starts_again_replaces_itself(part: Any) -> None:
    """A request that is new although it is known replaces its old state: a step failed before."""
    runner = Runner(part, max_num_seqs=1)
    runner.update(Message().starts("a", [1, 2, 3, 4, 5], [5, 2]))
    runner.update(Message().goes_on("a", 21, 5))
    rows = runner.update(Message().starts("a", [1, 2, 3, 4, 5], [4, 6]))
    runner.same(rows, [("a", 0, 5, True)], "the rows: request, start, tokens, is_prompt")
    runner.same(runner.batch.states["a"].output_token_ids, [], "the output of a", "It begins anew, without output.")
    runner.same(runner.table("a"), [4, 6, 0, 0], "the row of a")
    hint = "Its old row has to become free, or each such request costs a row for ever."
    runner.same(len(runner.batch.block_tables), 1, "the number of rows of block_tables", hint)


def test_a_resumed_request_has_other_blocks(part: Any) -> None:
    """A resumed request has the output and the blocks of the message, and nothing of its old ones."""
    runner = Runner(part)
    runner.update(Message().starts("a", [1, 2, 3, 4, 5], [5, 2]))
    runner.update(Message().goes_on("a", 21, 5))
    state = runner.batch.states["a"]
    rows = runner.update(Message().resumes("a", [21, 22], [8], start=0, count=7))
    runner.same(rows, [("a", 0, 7, False)], "the rows: request, start, tokens, is_prompt")
    runner.same(runner.table("a"), [8, 0, 0, 0], "the row of a", "All of its old blocks are gone.")
    hint = "The sampler and the state have one list: change what is in it, do not replace it."
    got = (list(state.output_token_ids), list(state.sampling_row.output_token_ids))
    runner.same(got, ([21, 22], [21, 22]), "the output of a, and the output that the sampler sees", hint)
    rows = runner.update(Message().resumes("a", [21, 22, 23], [3, 4], start=7, count=1))
    runner.same(rows, [("a", 7, 1, False)], "the rows: request, start, tokens, is_prompt")


def test_a_prompt_may_be_computed_in_part(part: Any) -> None:
    """A new request whose prompt has KV already begins behind it, and is no prompt for the log-probabilities."""
    runner = Runner(part)
    rows = runner.update(Message().starts("a", [1, 2, 3, 4, 5], [5, 2], computed=4))
    hint = "It starts at num_computed_tokens, and is_prompt is True only if that is 0."
    runner.same(rows, [("a", 4, 1, False)], "the rows: request, start, tokens, is_prompt", hint)


def test_long_rows_come_first(part: Any) -> None:
    """Rows with several tokens come before those with one; within both new, resumed and cached requests, in turn."""
    runner = Runner(part)
    runner.update(Message().starts("a", [1, 2], [5]).starts("b", [3, 4], [6]))
    message = Message().starts("c", [7], [1]).starts("d", [8, 9], [2]).resumes("a", [21], [3], start=0, count=3)
    rows = runner.update(message.goes_on("b", 31, 2))
    hint = "First all rows with more than one token, then all with one."
    expected = [("d", 0, 2, True), ("a", 0, 3, False), ("c", 0, 1, True), ("b", 2, 1, False)]
    runner.same(rows, expected, "the rows: request, start, tokens, is_prompt", hint)


def test_there_is_room_for_any_number_of_requests(part: Any) -> None:
    """With more requests than rows the table grows and keeps what is in it; free rows are used again."""
    runner = Runner(part, max_num_seqs=2)
    for number in range(5):
        runner.update(Message().starts(f"r{number}", [number], [number + 1]))
    expected = {f"r{number}": [number + 1, 0, 0, 0] for number in range(5)}
    runner.same(
        runner.tables(), expected, "the rows of block_tables", "An array with more rows begins with the old ones."
    )
    runner.same(str(runner.batch.block_tables.dtype), "int32", "the type of block_tables")
    num_rows = len(runner.batch.block_tables)
    for number in range(5, 60):
        runner.update(Message().ends(f"r{number - 5}").starts(f"r{number}", [number], [number + 1]))
    hint = "The row of a request that has ended is free for the next one."
    runner.same(
        len(runner.batch.block_tables), num_rows, f"rows of block_tables: before 55 more came, {num_rows}", hint
    )


def test_a_message_stays_as_it_is(part: Any) -> None:
    """Later messages do not change an earlier one."""
    runner = Runner(part)
    first = Message().starts("a", [1, 2], [5])
    second = Message().goes_on("a", 21, 2)
    third = Message().resumes("a", [21, 22], [8], start=0, count=4)
    for message in (first, second, third, Message().goes_on("a", 23, 4, (9,), num=3)):
        runner.update(message)
    hint = "The lists of a message are not yours: copy what is in them."
    runner.same(third.resumed[0].output_token_ids, [21, 22], "the output in the third message", hint)
    runner.same(first.new[0].prompt_token_ids, [1, 2], "the prompt in the first message", hint)
    runner.same(second.cached.new_token_ids, [[21]], "the new tokens in the second message", hint)


def test_any_messages_are_applied(part: Any) -> None:
    """After any messages each request has its tokens and its blocks."""
    rng = Random(1)
    for _ in range(10):
        runner = Runner(part, max_num_seqs=3)
        runner.shown = 3
        outputs, tables, lens = dict[str, list[int]](), dict[str, list[int]](), dict[str, int]()
        coming = iter(range(100))
        for _ in range(25):
            message, expected = Message(), list[tuple[str, int, int, bool]]()
            hint = f"Before the last message the blocks are {tables}, and the outputs {outputs}."
            if ended := [rid for rid in outputs if rng.random() < 0.1]:
                message.ends(*ended)
                for rid in ended:
                    del outputs[rid], tables[rid], lens[rid]
            known = list(outputs)
            if rng.random() < 0.5 and len(known) < 6:
                rid = rng.choice(ended) if ended and rng.random() < 0.5 else f"r{next(coming)}"
                outputs[rid], lens[rid] = [], rng.randrange(1, 7)
                tables[rid] = [rng.randrange(1, 90) for _ in range(-(-lens[rid] // BLOCK_SIZE))]
                message.starts(rid, list(range(lens[rid])), list(tables[rid]))
                expected.append((rid, 0, lens[rid], True))
            resumed = [rid for rid in known if outputs[rid] and rng.random() < 0.15]
            for rid in resumed:
                outputs[rid] = [*outputs[rid], rng.randrange(100)]
                total = lens[rid] + len(outputs[rid])
                tables[rid] = [rng.randrange(1, 90) for _ in range(-(-total // BLOCK_SIZE))]
                start = rng.choice((0, total - 1))
                message.resumes(rid, list(outputs[rid]), list(tables[rid]), start=start, count=total - start)
                expected.append((rid, start, total - start, False))
            for rid in [rid for rid in known if rid not in resumed and rng.random() < 0.6]:
                start = lens[rid] + len(outputs[rid])
                if start >= 4 * BLOCK_SIZE - 2:
                    continue
                outputs[rid] = [*outputs[rid], rng.randrange(100)]
                index, blocks = start // BLOCK_SIZE, ()
                if index == len(tables[rid]) or rng.random() < 0.2:
                    blocks = (rng.randrange(1, 90),)
                    tables[rid] = [*tables[rid][:index], *blocks]
                message.goes_on(rid, outputs[rid][-1], start, blocks, num=len(outputs[rid]))
                expected.append((rid, start, 1, False))
            rows = runner.update(message)
            expected.sort(key=lambda row: row[2] == 1)
            runner.same(rows, expected, "the rows: request, start, tokens, is_prompt", hint)
            got = {rid: list(state.output_token_ids) for rid, state in runner.batch.states.items()}
            runner.same(got, outputs, "the outputs", hint)
            full = {rid: [*table, *[0] * (4 - len(table))] for rid, table in tables.items()}
            runner.same(runner.tables(), full, "the rows of block_tables", hint)
