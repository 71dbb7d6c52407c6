"""How requests of a workload arrive at an engine: by seconds, by steps, by tokens, and after one another."""

import json
import subprocess
import sys

import pytest

from benchmarks.engines import TEXT_MODEL, Engines, build
from benchmarks.machine import own_seconds
from benchmarks.serving import answer, serve
from benchmarks.side import SideProcess
from benchmarks.workloads import WORKLOADS, Arguments, Request, Workload, drawn, named
from tests.m6_multimodal_pd.processes import is_alive


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


def test_a_text_that_continues_a_request_follows_its_tokens(engine, tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text(
        '{"prompt": "A token is", "max_tokens": 4, "ignore_eos": true}\n\n{"prompt": " a page", "after": 0}\n'
    )
    served = serve(engine, named(str(path), number=None, rate=None, seed=1))
    first, second = served.outputs
    text = engine.engine_core.input_processor.tokenizer.decode(second.prompt_token_ids)
    assert text == f"A token is{first.text} a page"


def test_a_rate_gives_the_requests_of_a_file_other_times(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "a", "at": 5}\n{"prompt": "b", "after": 0, "at": 2}\n{"prompt": "c"}\n')
    at = {
        (rate, seed): [request.at for request in named(str(path), number=None, rate=rate, seed=seed).requests]
        for rate, seed in ((None, 1), (10.0, 1), (10.0, 2))
    }
    assert at[None, 1] == [5, 2, 0]
    assert at[10.0, 1][:2] == [0, 2] and 0 < at[10.0, 1][2] < 2
    assert at[10.0, 1] != at[10.0, 2]


def test_more_questions_than_there_are_to_explain_can_be_asked():
    assert len(named("explain", number=200, rate=None, seed=1).requests) == 200


def test_kv_memory_of_a_number_of_tokens_counts_the_blocks_of_their_size():
    model = {"model": str(TEXT_MODEL), "device": "cpu"}
    with build("m3", model=model, cache={"kv_tokens": 1280, "block_size": 4}) as engine:
        assert engine.config.cache.num_blocks == 320


def test_work_of_a_running_child_is_not_that_of_other_programs():
    work = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    before = own_seconds()
    with subprocess.Popen([sys.executable, "-c", work], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        assert own_seconds() - before > 0.25
        child.communicate()
    assert own_seconds() - before > 0.25


@pytest.mark.exhaustive
def test_a_side_that_is_closed_leaves_no_process_of_its_group():
    model = {"model": str(TEXT_MODEL), "device": "cpu"}
    side = SideProcess({"milestone": "m6", "settings": {"model": model, "disaggregation": {}}, "threads": 1})
    side({"drawn": {"number": 1, "prompts": (8, 8), "outputs": (2, 2), "seed": 1}})
    engines = children_of(side.process.pid)
    side.close()
    assert len(engines) == 2 and not any(map(is_alive, engines))


def children_of(pid):
    """Return the processes whose parent is this one."""
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=True)
    return list(map(int, listed.stdout.split()))


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_named_workload_is_the_same_for_the_same_seed_and_another_for_another(name):
    one, again, other = (named(name, number=4, rate=None, seed=seed) for seed in (1, 1, 2))
    assert repr(one) == repr(again)
    assert repr(one) != repr(other)
    assert WORKLOADS[name][1].__doc__


def test_a_rate_spreads_the_arrivals():
    work = WORKLOADS["ragged"][1](Arguments(200, 10.0, 1))
    at = [request.at for request in work.requests]
    assert at == sorted(at) and at[0] == 0
    assert 15 < at[-1] < 27
