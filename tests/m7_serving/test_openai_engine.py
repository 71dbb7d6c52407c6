"""Both endpoints on a real engine: chunks joined, the whole answer and the engine alone agree."""

import asyncio
import base64
from random import Random
from typing import Any

import pytest

from m6_multimodal_pd import DEFAULT_MODEL, LLMEngine, SamplingParams
from m7_serving import AsyncLLM
from m7_serving.openai.deltas import answer, chunks
from m7_serving.openai.requests import ChatCompletionRequest, CompletionRequest, TokenizeRequest
from m7_serving.openai.tokens import tokenize
from tests.m7_serving.conftest import is_idle
from tests.m7_serving.parsed import parsed
from tests.m7_serving.scripted import Watched, collected, endpoint_call, joined_chat, joined_text
from tests.m7_serving.test_async_llm import WORDS

PICTURE = DEFAULT_MODEL.parents[1] / "demo_pictures" / "a_big_red_circle.png"


def names(number: object = 0) -> Any:
    return {"model": "tiny", "request_id": str(number), "watch": Watched()}


def random_body(random: Random) -> dict[str, Any]:
    """The fields of a request that both endpoints have."""
    return {
        "max_tokens": random.randint(1, 30),
        "temperature": random.choice([0.0, 2.0]),
        "seed": random.randrange(1000),
        "n": random.choice([1, 1, 2, 3]),
        "stop": random.sample(["e", "th", " a", "in", "\ufffd"], k=random.choice([0, 0, 1, 3])),
        "ignore_eos": random.random() < 0.5,
    }


def text_of(random: Random) -> str:
    return " ".join(random.choices(WORDS, k=random.randint(1, 12)))


@pytest.mark.parametrize("number", [15, pytest.param(250, marks=pytest.mark.exhaustive)])
def test_completions_are_those_of_the_engine(runner: asyncio.Runner, llm: AsyncLLM, number: int) -> None:
    random = Random(2)
    bodies = [
        random_body(random)
        | {
            "prompt": [text_of(random) for _ in range(random.randint(1, 3))],
            "logprobs": random.choice([None, 0, 3]),
            "echo": random.random() < 0.4,
        }
        for _ in range(number)
    ]

    async def ask(i: int) -> Any:
        whole, streamed = (parsed(CompletionRequest, bodies[i] | {"stream": on}) for on in (False, True))
        body = await answer(endpoint_call(llm, whole, **names(i)))
        return body, joined_text(await collected(chunks(endpoint_call(llm, streamed, **names(i)))))

    async def ask_all() -> list[Any]:
        slots = asyncio.Semaphore(8)

        async def one(i: int) -> Any:
            async with slots:
                return await ask(i)

        return await asyncio.gather(*map(one, range(number)))

    answers = runner.run(ask_all())
    with LLMEngine() as engine:
        for asked, (body, joined) in zip(bodies, answers, strict=True):
            params = SamplingParams(**{k: v for k, v in asked.items() if k not in ("prompt", "echo")})
            outputs = [each for prompt in asked["prompt"] for each in engine.generate(prompt, params).outputs]
            assert len(joined) == len(body["choices"]) == len(outputs)
            for choice, output in zip(body["choices"], outputs, strict=True):
                own = joined[choice["index"]]
                prompt = asked["prompt"][choice["index"] // asked["n"]] if asked["echo"] else ""
                assert own.text == choice["text"] == prompt + output.text
                assert own.finish_reason == choice["finish_reason"] == output.finish_reason
                assert own.stop_reason == choice["stop_reason"] == output.stop_reason
                assert (choice["logprobs"] is None) == (asked["logprobs"] is None)
                assert (own.logprobs or {}).get("tokens") == (choice["logprobs"] or {}).get("tokens")
            num_output = sum(len(output.token_ids) for output in outputs)
            assert body["usage"]["completion_tokens"] == num_output
    assert runner.run(is_idle(llm))


def test_a_chat_with_a_picture_is_that_of_the_engine(runner: asyncio.Runner, llm: AsyncLLM) -> None:
    url = "data:image/png;base64," + base64.b64encode(PICTURE.read_bytes()).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what is this?"}]
    asked = {"messages": [{"role": "user", "content": parts}], "temperature": 0, "max_tokens": 20, "logprobs": True}

    async def ask() -> Any:
        whole, streamed = (parsed(ChatCompletionRequest, asked | {"stream": on}) for on in (False, True))
        body = await answer(endpoint_call(llm, whole, **names()))
        return body, joined_chat(await collected(chunks(endpoint_call(llm, streamed, **names()))))

    body, joined = runner.run(ask())
    with LLMEngine() as engine:
        alone = engine.chat(asked["messages"], SamplingParams(max_tokens=20))  # type: ignore[arg-type]
    assert joined[0].text == body["choices"][0]["message"]["content"] == alone.text
    assert len(joined[0].logprobs) == len(body["choices"][0]["logprobs"]["content"]) == len(alone.token_ids)
    assert body["usage"]["prompt_tokens"] == len(alone.prompt_token_ids)
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_options_of_the_template_keep_the_picture(runner: asyncio.Runner, llm: AsyncLLM) -> None:
    url = "data:image/png;base64," + base64.b64encode(PICTURE.read_bytes()).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what is this?"}]
    asked = {"messages": [{"role": "user", "content": parts}], "temperature": 0, "max_tokens": 20}
    more = {"chat_template_kwargs": {"add_generation_prompt": True}}

    async def ask() -> list[Any]:
        bodies = [parsed(ChatCompletionRequest, asked | extra) for extra in ({}, more)]
        return [await answer(endpoint_call(llm, body, **names())) for body in bodies]

    plain, rendered = runner.run(ask())
    assert plain["choices"] == rendered["choices"]
    assert plain["usage"]["prompt_tokens"] == rendered["usage"]["prompt_tokens"]
    assert rendered["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_a_prompt_is_scored_as_its_own_continuation(runner: asyncio.Runner, llm: AsyncLLM) -> None:
    """lm-eval's way: the log-probabilities of a prompt's tokens are those that generation has given them."""
    base = {"temperature": 0, "logprobs": 1, "ignore_eos": True}

    async def ask() -> tuple[Any, Any]:
        ids = (await tokenize(llm, parsed(TokenizeRequest, {"prompt": "where is the red circle"})))["tokens"]
        output = await answer(
            endpoint_call(llm, parsed(CompletionRequest, base | {"prompt": ids, "max_tokens": 6}), **names())
        )
        generated = [output async for output in llm.generate(ids, SamplingParams(max_tokens=6, ignore_eos=True))][-1]
        whole = [*ids, *generated.token_ids]
        scoring = parsed(CompletionRequest, base | {"prompt": whole, "max_tokens": 0, "echo": True})
        scored = await answer(endpoint_call(llm, scoring, **names()))
        return output["choices"][0]["logprobs"], scored["choices"][0]["logprobs"]

    output, scored = runner.run(ask())
    assert scored["tokens"][-6:] == output["tokens"]
    assert scored["token_logprobs"][-6:] == pytest.approx(output["token_logprobs"], abs=1e-4)
