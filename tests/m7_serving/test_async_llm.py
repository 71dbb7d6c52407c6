"""`AsyncLLM`: many readers of one engine, slow ones and such that go away, and errors that concern one of them."""

import asyncio
import threading
import time
from collections.abc import Coroutine
from contextlib import aclosing
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest

from m6_multimodal_pd import LLMEngine
from m7_serving import (
    AsyncLLM,
    ConfigError,
    DuplicateRequestError,
    EngineClosedError,
    InvalidPromptError,
    InvalidRequestError,
    PromptTooLongError,
    RequestOutput,
    SamplingParams,
    ServerBusyError,
    async_llm,
)
from tests.m7_serving.conftest import IN_PROCESS, is_idle

WORDS = "red blue circle square left of above picture what where is the a ä 日 🙂".split()
LONG = SamplingParams(max_tokens=400, ignore_eos=True)


async def read(llm: AsyncLLM, prompt: Any, params: SamplingParams | None = None, **options: Any) -> list[RequestOutput]:
    """All outputs that a reader gets."""
    return [output async for output in llm.generate(prompt, params, **options)]


async def all_of(*tasks: Coroutine[Any, Any, Any]) -> list[Any]:
    return list(await asyncio.gather(*tasks))


def random_request(random: Random) -> tuple[str, SamplingParams]:
    """A prompt, and parameters whose answers have half characters, stop strings, siblings."""
    hot = random.random() < 0.6
    return " ".join(random.choices(WORDS, k=random.randint(1, 12))), SamplingParams(
        max_tokens=random.randint(1, 40),
        temperature=2.0 if hot else 0.0,
        seed=random.randrange(1000),
        n=random.choice([1, 1, 1, 2, 3]),
        stop=random.sample(["e", "th", "in", " a", "\ufffd", "no such text"], k=random.choice([0, 0, 1, 3])),
        ignore_eos=random.random() < 0.5,
        logprobs=random.choice([None, None, 0, 2]),
        prompt_logprobs=random.choice([None, None, None, 1]),
        include_stop_str_in_output=random.random() < 0.2,
    )


@pytest.mark.parametrize("number", [30, pytest.param(500, marks=pytest.mark.exhaustive)])
def test_texts_of_the_front_are_those_of_an_engine_alone(runner: asyncio.Runner, llm: AsyncLLM, number: int) -> None:
    """Tokens, texts, ends and log-probabilities of random requests, all at once; texts only ever grow."""
    random = Random(1)
    asked = [random_request(random) for _ in range(number)]

    async def ask() -> list[list[RequestOutput]]:
        slots = asyncio.Semaphore(60)

        async def one(prompt: str, params: SamplingParams) -> list[RequestOutput]:
            async with slots:
                return await read(llm, prompt, params)

        return await all_of(*(one(*each) for each in asked))

    streams = runner.run(ask())
    with LLMEngine() as engine:
        for (prompt, params), stream in zip(asked, streams, strict=True):
            alone = engine.generate(prompt, params)
            for own, theirs in zip(stream[-1].outputs, alone.outputs, strict=True):
                assert (own.text, own.token_ids) == (theirs.text, theirs.token_ids), (prompt, params)
                assert (own.finish_reason, own.stop_reason) == (theirs.finish_reason, theirs.stop_reason)
                assert (own.logprobs is None) == (theirs.logprobs is None)
            assert (stream[-1].prompt_logprobs is None) == (alone.prompt_logprobs is None)
            for before, after in pairwise(stream):
                for one, two in zip(before.outputs, after.outputs, strict=True):
                    assert two.text.startswith(one.text) and two.token_ids[: len(one.token_ids)] == one.token_ids
    assert runner.run(is_idle(llm))


def test_a_slow_reader_gets_the_newest_and_delays_nobody(runner: asyncio.Runner, llm: AsyncLLM) -> None:
    async def ask() -> tuple[list[RequestOutput], list[RequestOutput]]:
        slow: list[RequestOutput] = []
        async with aclosing(llm.generate("red", LONG)) as outputs:
            slow.append(await anext(outputs))
            fast = await read(llm, "blue", LONG)  # nobody reads the other one meanwhile
            slow += [output async for output in outputs]
        return slow, fast

    slow, fast = runner.run(ask())
    assert slow[-1].finished and len(slow[-1].token_ids) == len(fast[-1].token_ids) == 400
    assert len(slow) < 20 and len(slow) < len(fast)


@pytest.mark.parametrize("moment", range(8))
def test_a_reader_that_goes_away_ends_its_request(runner: asyncio.Runner, llm: AsyncLLM, moment: int) -> None:
    """Cancelled before it is tokenized, while it waits, in the middle, with siblings; or the generator is closed."""
    params = SamplingParams(max_tokens=400, ignore_eos=True, n=1 + moment % 3)

    async def ask() -> bool:
        task = asyncio.create_task(read(llm, "red " * (1 + 20 * moment), params))
        for _ in range(moment):
            await asyncio.sleep(0.004)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with aclosing(llm.generate("blue", params)) as outputs:
            async for output in outputs:
                if output.metrics.num_output_tokens >= moment:
                    break
        return await is_idle(llm)

    assert runner.run(ask())


@pytest.mark.exhaustive
def test_readers_that_go_away_at_random_moments_leave_nothing(runner: asyncio.Runner, llm: AsyncLLM) -> None:
    random = Random(2)

    async def ask() -> bool:
        async def one() -> None:
            await asyncio.sleep(random.random() * 2)
            prompt, params = random_request(random)
            task = asyncio.create_task(read(llm, prompt, params if random.random() < 0.5 else LONG))
            await asyncio.sleep(random.expovariate(30))
            task.cancel()
            await asyncio.wait([task])

        for _ in range(10):
            await all_of(*(one() for _ in range(30)))
        return await is_idle(llm)

    assert runner.run(ask())
    assert not llm._mailboxes


def test_prompts_of_one_call_are_admitted_together_or_not_at_all(runner: asyncio.Runner, llm: AsyncLLM) -> None:
    async def ask() -> list[dict[int, RequestOutput]]:
        with pytest.raises(InvalidPromptError):
            await anext(llm.generate_batch(["good", []], LONG))
        with pytest.raises(InvalidRequestError, match="speculation"):
            await anext(llm.generate_batch(["good"], LONG, speculation=True))  # type: ignore[call-arg]
        assert await is_idle(llm)
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        return [changed async for changed in llm.generate_batch(["a", "b", "c"], params, final_only=True)]

    found = runner.run(ask())
    assert sorted(index for changed in found for index in changed) == [0, 1, 2]
    assert all(output.finished for changed in found for output in changed.values())


def test_more_requests_than_may_be_are_rejected_and_the_others_go_on(runner: asyncio.Runner, llm: AsyncLLM) -> None:
    async def ask() -> None:
        with pytest.raises(InvalidRequestError, match="max_requests=200"):
            await anext(llm.generate_batch(["a"] * 67, SamplingParams(n=3)))
        running = [asyncio.create_task(read(llm, "a", replace(LONG, n=2))) for _ in range(100)]
        await asyncio.sleep(0)
        with pytest.raises(ServerBusyError, match="200 outputs are unfinished"):
            await read(llm, "b")
        for task in running:
            task.cancel()
        await asyncio.wait(running)
        assert await is_idle(llm)
        assert (await read(llm, "b", SamplingParams(max_tokens=1)))[-1].finished

    runner.run(ask())


def test_an_end_that_fails_is_an_end() -> None:
    async def act() -> None:
        llm = await AsyncLLM.start(disaggregation_config=IN_PROCESS)

        def spoil(core: Any) -> None:
            close = core.close

            def fail() -> None:
                close()
                raise OSError("it cannot be closed")

            core.close = fail

        await llm.call(spoil)
        async with asyncio.timeout(5):
            await llm.close()

    asyncio.run(act())


def test_an_id_in_use_is_rejected_and_its_request_goes_on(runner: asyncio.Runner, llm: AsyncLLM) -> None:
    async def ask() -> None:
        params = SamplingParams(max_tokens=60, ignore_eos=True, n=2)
        async with aclosing(llm.generate("a", params, request_id="x")) as outputs:
            await anext(outputs)
            for taken in ("x", "x/0"):
                with pytest.raises(DuplicateRequestError, match="is in use"):
                    await read(llm, "b", request_id=taken)
            *_, last = [output async for output in outputs]
        assert [len(each.token_ids) for each in last.outputs] == [60, 60]
        async with aclosing(llm.generate("a", LONG, request_id="y")) as outputs:
            await anext(outputs)
            held = asyncio.create_task(llm.call(lambda core: time.sleep(0.5)))
            await asyncio.sleep(0.01)
        with pytest.raises(DuplicateRequestError, match="is in use"):
            await read(llm, "b", request_id="y")  # its abort is behind the call that runs
        await held
        assert await is_idle(llm)
        assert (await read(llm, "b", SamplingParams(max_tokens=2), request_id="y"))[-1].finished

    runner.run(ask())
    assert runner.run(is_idle(llm))


def test_readers_of_the_totals_do_not_stop_the_streams(runner: asyncio.Runner, llm: AsyncLLM) -> None:
    """Each reading waits for an answer of the engine: between two of them there is a step."""

    async def ask() -> int:
        is_done = asyncio.Event()

        async def poll() -> None:
            while not is_done.is_set():
                await llm.stats()

        pollers = [asyncio.create_task(poll()) for _ in range(8)]
        outputs = await read(llm, "a", replace(LONG, max_tokens=100))
        is_done.set()
        await asyncio.gather(*pollers)
        return len(outputs)

    assert runner.run(ask()) > 20


def test_a_limit_that_the_caller_has_named_must_fit(runner: asyncio.Runner, llm: AsyncLLM) -> None:
    async def ask() -> None:
        longest = llm.input_processor.max_model_len
        async for changed in llm.generate_batch([[5] * (longest - 8)], SamplingParams(max_tokens=8), must_fit=True):
            assert changed
        with pytest.raises(PromptTooLongError, match="max_tokens=9 exceed"):
            await anext(llm.generate_batch([[5] * (longest - 8)], SamplingParams(max_tokens=9), must_fit=True))

    runner.run(ask())


def test_messages_may_be_prompts(runner: asyncio.Runner, llm: AsyncLLM) -> None:
    outputs = runner.run(read(llm, [{"role": "user", "content": "What is red?"}], SamplingParams(max_tokens=4)))
    assert outputs[-1].finished and len(outputs[-1].prompt_token_ids) > 4


def test_a_closed_engine_ends_its_readers_with_an_error() -> None:
    async def ask() -> None:
        llm = await AsyncLLM.start(disaggregation_config=IN_PROCESS)
        async with aclosing(llm.generate("a", LONG)) as outputs:
            await anext(outputs)
            await llm.close()
            with pytest.raises(EngineClosedError):
                while True:
                    await anext(outputs)
        for call in (read(llm, "b"), llm.stats()):
            with pytest.raises(EngineClosedError):
                await call
        await llm.close()
        assert isinstance(llm.end_error, EngineClosedError) and not llm.is_serving

    asyncio.run(ask())


def test_a_core_thread_that_hangs_does_not_hold_the_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_llm, "END_S", 0.2)
    has_begun, goes_on = threading.Event(), threading.Event()

    async def ask() -> None:
        llm = await AsyncLLM.start(disaggregation_config=IN_PROCESS)
        hanging = asyncio.create_task(llm.call(lambda _: (has_begun.set(), goes_on.wait(30))))
        while not has_begun.is_set():
            await asyncio.sleep(0.01)
        async with asyncio.timeout(5):
            await llm.close()
            await llm.close()
            with pytest.raises(EngineClosedError):
                await hanging
        goes_on.set()
        llm._thread.join(30)

    asyncio.run(ask())


def test_an_engine_that_cannot_be_built_raises_its_error() -> None:
    with pytest.raises(ConfigError, match="no_such_config"):
        asyncio.run(AsyncLLM.start(no_such_config=1))
    for max_requests in (0, 2.5, "3"):
        with pytest.raises(ConfigError, match="max_requests"):
            asyncio.run(AsyncLLM.start(max_requests=max_requests))  # type: ignore[arg-type]
    with pytest.raises(Exception, match="nowhere"):
        asyncio.run(AsyncLLM.start("/nowhere", disaggregation_config=IN_PROCESS))
