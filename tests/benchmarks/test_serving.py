"""How requests of a workload arrive at an engine: by seconds, by steps, by tokens, and after one another."""

import json

import pytest

from benchmarks.engines import Engines
from benchmarks.serving import answer, serve
from benchmarks.workloads import WORKLOADS, Request, Traffic, Workload, drawn, named


@pytest.fixture(scope="module")
def engine():
    with Engines(max_model_len=512) as engines:
        yield engines("m4", scheduler={"max_num_seqs": 4})


def test_every_token_has_its_time_and_the_counts_are_those_of_the_engine(engine):
    work = drawn(3, prompts=(5, 9), outputs=(2, 6), seed=1)
    served = serve(engine, work)
    assert [len(times) for times in served.times] == [len(tokens) for tokens in served.answers]
    assert all(times == sorted(times) and times[0] > at for at, times in zip(served.arrived, served.times, strict=True))
    assert served.counts["num_prompt_tokens"] == work.num_prompt_tokens
    assert served.counts["num_steps"] == len(served.steps)
    assert served.answers == answer(engine, work).answers


def test_by_the_clock_of_steps_a_request_arrives_before_its_step(engine):
    first, second = Request([300, 301], 8), Request([400, 401], 2, at=5)
    served = serve(engine, Workload([first, second], "steps"))
    assert served.times[0][4] < served.arrived[1] < served.times[0][5]


def test_by_the_clock_of_tokens_a_request_arrives_when_the_streams_have_so_many(engine):
    streams = [Request([300 + i, 301], 8) for i in range(2)]
    served = serve(engine, Workload([*streams, Request([400, 401], 2, at=3)], "tokens"))
    assert served.times[0][2] < served.arrived[2] < served.times[0][3]


def test_a_turn_begins_with_the_tokens_of_the_turn_before_it(engine):
    served = serve(engine, Workload([Request([300] * 20, 6), Request([400] * 3, 2, after=0)]))
    assert served.outputs[1].prompt_token_ids == (*[300] * 20, *served.answers[0], *[400] * 3)
    assert served.metrics[1].cached_tokens == 16


def test_requests_of_a_file_are_served_with_their_own_settings(engine, tmp_path):
    path = tmp_path / "mine.jsonl"
    rows = [
        {"prompt": "A token is", "max_tokens": 4, "ignore_eos": True},
        {"prompt": [300] * 40, "max_tokens": 3, "after": 0, "ignore_eos": True},
        {"messages": [{"role": "user", "content": "What is a KV cache?"}], "at": 0.1, "max_tokens": 5},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    served = serve(engine, named(str(path), number=None, rate=None, seed=1))
    assert [len(tokens) for tokens in served.answers] == [4, 3, 5]
    assert served.arrived[2] >= 0.1 and served.arrived[1] >= served.times[0][-1]


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_named_workload_is_the_same_for_the_same_seed_and_another_for_another(name):
    one, again, other = (named(name, number=4, rate=None, seed=seed) for seed in (1, 1, 2))
    assert repr(one) == repr(again)
    assert name == "pictures" or repr(one) != repr(other)
    assert WORKLOADS[name][1].__doc__


def test_a_rate_spreads_the_arrivals():
    work = WORKLOADS["ragged"][1](Traffic(200, 10.0, 1))
    at = [request.at for request in work.requests]
    assert at == sorted(at) and at[0] == 0
    assert 15 < at[-1] < 27
