"""Random traffic against what must always hold, after every single step.

Requests and streams come and go as Hypothesis likes. At any time the queues agree with each other, the runner holds KV
for exactly the computed tokens of the running request, streams only grow, and in the end each request has exactly the
tokens that the same request gets alone, or an abort.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from m1_single_request import LLMEngine, RequestOutput, SamplingParams
from tests.m1_single_request.engines import MakeEngine, held, unfinished
from tests.support.amounts import examples

PROMPTS = st.sampled_from([(5,), (6, 7, 8), (9, 10), tuple(range(40, 60))])
PARAMS = st.sampled_from(
    [
        SamplingParams(max_tokens=1),
        SamplingParams(max_tokens=4),
        SamplingParams(max_tokens=9, min_tokens=3, stop="e"),
        SamplingParams(max_tokens=6, temperature=1.0, seed=1, top_k=50),
        SamplingParams(max_tokens=5, temperature=0.7, seed=2, repetition_penalty=1.3, logprobs=1),
    ]
)


class Traffic(RuleBasedStateMachine):
    """A caller that does everything that the face allows, in any order."""

    make_engine: MakeEngine
    alone: dict[Any, RequestOutput]

    @initialize()
    def start(self) -> None:
        self.engine = self.make_engine()
        self.core = self.engine.engine_core
        self.asked: dict[str, tuple[tuple[int, ...], SamplingParams]] = {}
        self.aborted: set[str] = set()
        self.reported: dict[str, RequestOutput] = {}  # by step()
        self.streams: dict[str, Any] = {}
        self.streamed: dict[str, RequestOutput] = {}
        self.closed: set[str] = set()

    @rule(prompt=PROMPTS, params=PARAMS)
    def add_request(self, prompt: tuple[int, ...], params: SamplingParams) -> None:
        rid = self.engine.add_request(prompt, params)
        assert rid not in self.asked
        self.asked[rid] = prompt, params

    @rule(prompt=PROMPTS, params=PARAMS)
    def open_stream(self, prompt: tuple[int, ...], params: SamplingParams) -> None:
        stream = self.engine.stream(prompt, params)
        assert stream.request_id not in self.asked
        self.asked[stream.request_id] = prompt, params
        self.streams[stream.request_id] = stream

    @rule()
    def step(self) -> None:
        with self.one_step_at_most():
            outputs = self.engine.step()
        for rid, output in outputs.items():
            assert rid not in self.streams and rid not in self.closed, "a stream's output went astray"
            assert not (rid in self.reported and self.reported[rid].finished), "reported after its end"
            self.reported[rid] = output

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def read_stream(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(sorted(self.streams)))
        output = next(self.streams[rid])
        if before := self.streamed.get(rid):
            assert output.text.startswith(before.text)
            assert output.token_ids[: len(before.token_ids)] == before.token_ids
        self.streamed[rid] = output
        if output.finished:
            del self.streams[rid]

    @precondition(lambda self: self.streams)
    @rule(data=st.data(), drop=st.booleans())
    def close_stream(self, data: st.DataObject, drop: bool) -> None:
        rid = data.draw(st.sampled_from(sorted(self.streams)))
        stream = self.streams.pop(rid)
        if not drop:
            stream.close()
        del stream
        self.closed.add(rid)

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(sorted(self.asked)))
        if self.engine.abort_request(rid):
            self.aborted.add(rid)

    @rule(prompt=PROMPTS)
    def generate(self, prompt: tuple[int, ...]) -> None:
        params = SamplingParams(max_tokens=2)
        output = self.engine.generate(prompt, params)
        assert output.request_id not in self.asked
        self.check_answer(output, prompt, params)

    @invariant()
    def queues_agree_and_kv_is_that_of_the_running_request(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.core.scheduler.check_invariants()
        running = self.core.scheduler.running
        assert held(self.engine) == sum(request.sequence.num_computed_tokens for request in running)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in unfinished(self.engine):
            self.step()
            self.queues_agree_and_kv_is_that_of_the_running_request()
        while self.streams:
            rid, stream = self.streams.popitem()
            *_, self.streamed[rid] = stream
        ends = {**self.reported, **self.streamed}
        assert ends.keys() | self.closed == self.asked.keys()
        for rid, output in ends.items():
            assert output.finished or rid in self.closed
            self.check_answer(output, *self.asked[rid])
        stats = self.engine.stats()
        assert (stats.kv_tokens, stats.num_waiting, stats.num_running) == (0, 0, 0)
        assert held(self.engine) == 0
        self.engine.close()

    def check_answer(self, output: RequestOutput, prompt: tuple[int, ...], params: SamplingParams) -> None:
        if (prompt, params) not in self.alone:
            self.alone[prompt, params] = self.make_engine().generate(prompt, params)
        whole = self.alone[prompt, params]
        assert output.token_ids == whole.token_ids[: len(output.token_ids)]
        if output.finished and output.finish_reason != "abort":
            assert (output.token_ids, output.text, output.finish_reason) == (
                whole.token_ids,
                whole.text,
                whole.finish_reason,
            )
        if output.finish_reason == "abort":
            assert output.request_id in self.aborted and whole.text.startswith(output.text.rstrip("\ufffd"))

    @contextmanager
    def one_step_at_most(self) -> Iterator[None]:
        before = self.engine.stats().num_steps
        yield
        assert self.engine.stats().num_steps <= before + 1


@pytest.mark.hypothesis
def test_random_traffic_keeps_every_invariant(make_engine: MakeEngine) -> None:
    known: dict[Any, RequestOutput] = {}

    class Machine(Traffic):
        alone = known

        def make_engine(self) -> LLMEngine:  # type: ignore[override]
            return make_engine()

    run_state_machine_as_test(Machine, settings=settings(max_examples=examples(40), stateful_step_count=30))


def test_the_invariants_notice_a_lost_request(engine: LLMEngine) -> None:
    engine.add_request("a")
    scheduler = engine.engine_core.scheduler
    lost = scheduler.waiting.popleft()
    with pytest.raises(AssertionError):
        scheduler.check_invariants()
    scheduler.waiting.append(lost)


def test_the_invariants_notice_a_wrong_token_count(engine: LLMEngine) -> None:
    engine.add_request("a")
    engine.step()
    sequence = engine.engine_core.scheduler.running[0].sequence
    sequence.num_computed_tokens += 1
    with pytest.raises(AssertionError):
        engine.engine_core.scheduler.check_invariants()
    sequence.num_computed_tokens -= 1
