"""The official client, unmodified, against a server as a user starts it: every form of a request, whole and in chunks.

An answer in chunks is the answer in one piece, and both are what an engine alone says.
"""

import asyncio
import base64
from collections.abc import Iterator
from random import Random
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from m6_multimodal_pd import LLMEngine, SamplingParams
from m6_multimodal_pd.demo_tour import PICTURES
from tests.m7_serving.servers import Server, chat, serving

pytestmark = pytest.mark.exhaustive  # by default: `test_openai_answers.py` and `test_openai_engine.py`
MODEL = "tiny-qwen3-vl"
PROMPTS: dict[str, Any] = {
    "text": "red circle",
    "texts": ["red circle", "a blue square"],
    "ids": [300, 301, 302],
    "lists of ids": [[300, 301, 302], [7, 8]],
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as started:
        yield started
        assert started.is_idle()
        engines = started.engines()
        assert engines and started.stop() == (0, "")


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.url, api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def engine() -> Iterator[LLMEngine]:
    with LLMEngine() as made:
        yield made


class Joined:
    """Chunks put together again, with what must hold of their order."""

    def __init__(self, chunks: Any, n: int) -> None:
        self.texts, self.ends, self.logprobs = [""] * n, [None] * n, [[] for _ in range(n)]  # type: ignore[var-annotated]
        self.roles, self.usage = [0] * n, None
        for chunk in chunks:
            self.usage = chunk.usage or self.usage
            for choice in chunk.choices:
                i, delta = choice.index, getattr(choice, "delta", None)
                assert self.ends[i] is None, "nothing comes after the end"
                if delta is not None and delta.role is not None:
                    self.roles[i] += 1
                    assert not self.texts[i] and delta.content == ""
                self.texts[i] += (choice.text if delta is None else delta.content) or ""
                self.ends[i] = choice.finish_reason
                if choice.logprobs is not None:
                    own = choice.logprobs
                    self.logprobs[i] += (
                        own.content if delta is not None else list(zip(own.tokens, own.token_logprobs, strict=True))
                    )
        assert all(self.ends)


@pytest.mark.sample(12)
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("logprobs", [None, 0, 3])
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("form", PROMPTS)
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_completions_in_every_form(
    client: OpenAI, form: str, echo: bool, logprobs: int | None, n: int, temperature: float
) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": PROMPTS[form], "n": n, "echo": echo, "logprobs": logprobs}
    asked |= {"temperature": temperature, "seed": 3, "max_tokens": 9, "extra_body": {"ignore_eos": True}}
    whole = client.completions.create(**asked)
    joined = Joined(
        client.completions.create(**asked, stream=True, stream_options={"include_usage": True}), len(whole.choices)
    )
    assert [choice.index for choice in whole.choices] == list(range(len(whole.choices)))
    assert joined.texts == [choice.text for choice in whole.choices]
    assert joined.ends == [choice.finish_reason for choice in whole.choices] == ["length"] * len(whole.choices)
    usage = whole.usage
    assert usage is not None and joined.usage is not None and usage.completion_tokens == 9 * len(whole.choices)
    assert (usage.prompt_tokens, usage.completion_tokens) == (
        joined.usage.prompt_tokens,
        joined.usage.completion_tokens,
    )
    assert usage.prompt_tokens_details is not None
    for choice, parts in zip(whole.choices, joined.logprobs, strict=True):
        assert (choice.logprobs is None) == (logprobs is None)
        if choice.logprobs is not None:
            assert choice.logprobs.tokens == [token for token, _ in parts] and len(parts) >= 9
            scores = [-1.0 if score is None else score for score in choice.logprobs.token_logprobs or []]
            assert scores == pytest.approx([-1.0 if score is None else score for _, score in parts], abs=1e-3)


@pytest.mark.sample(6)
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("top_logprobs", [None, 0, 2])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_conversations_in_every_form(client: OpenAI, n: int, top_logprobs: int | None, temperature: float) -> None:
    more = {} if top_logprobs is None else {"logprobs": True, "top_logprobs": top_logprobs}
    asked = chat(n=n, temperature=temperature, seed=5, **more)
    whole = client.chat.completions.create(**asked)
    joined = Joined(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}), n)
    assert joined.roles == [1] * n and joined.texts == [choice.message.content for choice in whole.choices]
    assert joined.ends == [choice.finish_reason for choice in whole.choices]
    for choice, parts in zip(whole.choices, joined.logprobs, strict=True):
        assert (choice.logprobs is None) == (top_logprobs is None)
        if choice.logprobs is not None:
            assert [entry.token for entry in choice.logprobs.content or []] == [entry.token for entry in parts]


def test_an_asynchronous_client_gets_the_same(server: Server, client: OpenAI) -> None:
    async def ask() -> list[str]:
        async with AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0) as other:

            async def one() -> str:
                stream = await other.chat.completions.create(**chat(), stream=True)
                return "".join([c.delta.content or "" async for chunk in stream for c in chunk.choices])

            return list(await asyncio.gather(*(one() for _ in range(8))))

    assert set(asyncio.run(ask())) == {client.chat.completions.create(**chat()).choices[0].message.content}


def test_an_image_in_a_data_url(client: OpenAI, engine: LLMEngine) -> None:
    path = PICTURES / "a_big_red_circle.png"
    url = f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
    question = {"type": "text", "text": "Describe the picture."}
    answer = client.chat.completions.create(**chat([{"type": "image_url", "image_url": {"url": url}}, question]))
    alone = engine.chat(
        [{"role": "user", "content": [{"type": "image", "image": path}, question]}], SamplingParams(max_tokens=24)
    )
    assert answer.choices[0].message.content == alone.text and answer.usage is not None
    assert answer.usage.prompt_tokens == len(alone.prompt_token_ids)


@pytest.mark.parametrize("number", [500])
def test_joined_deltas_are_the_whole_answer_and_that_of_an_engine_alone(
    server: Server, engine: LLMEngine, number: int
) -> None:
    """Random requests, many at a time: hot answers have half characters, and stop strings end inside tokens."""
    random = Random(1)
    asked = []
    for _ in range(number):
        params: dict[str, Any] = {
            "max_tokens": random.randint(1, 40), "temperature": random.choice([0.0, 2.0]), "seed": random.randrange(99),
            "stop": random.sample(["e", "th", "in", " a", "\ufffd"], k=random.choice([0, 0, 1, 3])),
        }  # fmt: skip
        asked.append(("".join(random.choices("red ä日🙂 what is a blue?", k=random.randint(1, 30))), params))

    async def ask() -> list[tuple[str, str]]:
        slots = asyncio.Semaphore(32)
        async with AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0) as client:

            async def one(prompt: str, params: dict[str, Any]) -> tuple[str, str]:
                async with slots:
                    stream = await client.completions.create(model=MODEL, prompt=prompt, stream=True, **params)
                    joined = "".join([c.text async for chunk in stream for c in chunk.choices])
                    whole = await client.completions.create(model=MODEL, prompt=prompt, **params)
                    return joined, whole.choices[0].text

            return list(await asyncio.gather(*(one(*each) for each in asked)))

    for (prompt, params), (joined, whole) in zip(asked, asyncio.run(ask()), strict=True):
        alone = engine.generate(prompt, SamplingParams(**params)).text
        assert joined == whole == alone, (prompt, params)
    assert server.is_idle()


def test_scores_of_a_prompt_as_evaluations_ask_for_them(client: OpenAI, engine: LLMEngine) -> None:
    """lm-eval sends token ids, and reads the log-probabilities of their last ones."""
    ids = [300, 301, 302, 303]
    for max_tokens in (0, 1):
        found = client.completions.create(model=MODEL, prompt=ids, echo=True, logprobs=1, max_tokens=max_tokens)
        scores = found.choices[0].logprobs
        assert scores is not None and scores.token_logprobs is not None and len(scores.token_logprobs) == 4 + max_tokens
        alone = engine.generate(ids, SamplingParams(max_tokens=1, prompt_logprobs=1)).prompt_logprobs
        assert alone is not None and scores.token_logprobs[0] is None
        for score, token, row in zip(scores.token_logprobs[1:4], ids[1:], alone[1:], strict=True):
            assert row is not None and score == pytest.approx(row[token].logprob, abs=1e-4)


def test_models_and_errors_as_the_client_knows_them(client: OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL == client.models.retrieve(MODEL).id
    with pytest.raises(openai.NotFoundError, match="gpt-4"):
        client.chat.completions.create(**chat(model="gpt-4"))
    with pytest.raises(openai.BadRequestError, match="temperature") as error:
        client.chat.completions.create(**chat(temperature=7))
    assert error.value.param == "temperature" and error.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model=MODEL, prompt="red " * 100_000)
    assert error.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="tools"):
        client.chat.completions.create(**chat(tools=[{"type": "function", "function": {"name": "f"}}]))


def test_a_group_of_two_engines_gives_the_same_answers(client: OpenAI) -> None:
    questions = [chat(f"What is {number}?", n=2, temperature=1.0, seed=number) for number in range(4)]
    expected = [client.chat.completions.create(**each).choices for each in questions]
    with serving("--prefill", "1", "--decode", "1") as pair, OpenAI(base_url=pair.url, api_key="none") as other:
        found = [other.chat.completions.create(**each).choices for each in questions]
        assert len(pair.engines()) == 2
        assert pair.stop() == (0, "")
    texts = [[choice.message.content for choice in choices] for choices in expected]
    assert [[choice.message.content for choice in choices] for choices in found] == texts
