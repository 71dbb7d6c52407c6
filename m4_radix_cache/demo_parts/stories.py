"""What is asked in the demo's tour: a system prompt with many users, a conversation, and people who share nothing.

Part of `python -m m4_radix_cache.demo`; nothing in the engine depends on it. The texts are made of what the model that
ships can do: it explains terms of LLM inference and restates codes from its prompt, so a wrong page in the cache would
show in an answer. Lists are as long as the model and the budgets allow.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from m1_single_request.errors import PromptTooLongError
from m1_single_request.input_processor import Message
from m1_single_request.llm_engine import LLMEngine as SingleRequestEngine
from m1_single_request.sampling_params import SamplingParams
from m4_radix_cache.llm_engine import LLMEngine

INTRO = "You answer questions about LLM inference."
HANDBOOK = (
    "Prefill runs the whole prompt through the model in one pass.",
    "Decode adds one token per step.",
    "The keys and values of all earlier tokens are kept in KV memory, in pages of a fixed size.",
    "Requests that begin with the same tokens can share these pages, so only the rest of a prompt is computed.",
    "A page that somebody uses is locked.",
    "When there is no room, pages that nobody uses are evicted, and if that is not enough, a running request is "
    "retracted and computed again later.",
    "The time to first token is the wait before an answer begins.",
)
NOUNS = (
    "zebra", "otter", "lamp", "eagle", "candle", "goat", "kite", "river", "tiger", "spoon", "anchor", "bridge",
    "castle", "dragon", "forest", "garden", "hammer", "island", "jacket", "ladder", "mirror", "needle", "ocean",
    "pencil", "queen", "rocket", "saddle", "table", "velvet", "wagon",
)  # fmt: skip
USERS = (
    "What is the code of lamp?",
    "What is prefix caching?",
    "What is the code of zebra?",
    "What is a radix tree?",
    "What is the code of goat?",
    "What is LRU?",
)
CHAT = (
    "What is prefix caching?",
    "What is the code of lamp?",
    "Why does multi-turn chat benefit from cached KV?",
)
SECOND_THOUGHT = "What is the code of zebra?"  # asked in place of the last turn of the conversation
STRANGERS = (
    "What is continuous batching?",
    "What is paged attention?",
    "What is a radix cache?",
    "What is cache eviction?",
    "What is a block table?",
    "What is the token budget per step?",
)
LIST_OF_STRANGER = 4  # facts in the prompt of each
SHARE_FOR_ANSWERS = 4  # a system prompt leaves a quarter of the longest request for questions and answers


@dataclass(frozen=True)
class Ask:
    """A request: for the reader in a line, and as the model gets it."""

    title: str
    token_ids: list[int]


def code(number: int) -> str:
    """The code of the noun of this number."""
    return f"{(4821 + 3677 * number) % 10_000:04}"


def fact_list(numbers: Sequence[int]) -> str:
    """Facts about the nouns of these numbers, worded as the model learnt them."""
    return " ".join(f"The code of {NOUNS[i % len(NOUNS)]} is {code(i)}." for i in numbers)


def system_prompt(engine: LLMEngine) -> str:
    """The handbook and all codes, or as many sentences of them as leave room for a conversation."""
    sentences = [INTRO, *HANDBOOK, *(fact_list([i]) for i in range(len(NOUNS)))]
    room = most_prompt_tokens(engine) * (SHARE_FOR_ANSWERS - 1) // SHARE_FOR_ANSWERS
    return _longest(lambda count: " ".join(sentences[:count]), len(sentences), room, engine)


def users(engine: LLMEngine, count: int) -> list[Ask]:
    """So many users with the same system prompt, each with a question."""
    system = system_prompt(engine)
    questions = [USERS[i % len(USERS)] for i in range(count)]
    return [Ask(q, as_tokens(engine, _messages(system, (), q))) for q in questions]


def turn(engine: LLMEngine, system: str, past: Sequence[tuple[str, str]], question: str) -> Ask:
    """The next turn of a conversation, whose past is questions and answers."""
    return Ask(question, as_tokens(engine, _messages(system, past, question)))


def strangers(engine: LLMEngine) -> list[Ask]:
    """Users with nothing in common: each has a list of facts of its own."""

    def ask(index: int, question: str) -> Ask:
        numbers = range(index * LIST_OF_STRANGER, (index + 1) * LIST_OF_STRANGER)
        return Ask(question, as_tokens(engine, _messages(fact_list(numbers), (), question)))

    return [ask(index, question) for index, question in enumerate(STRANGERS)]


def check(engine: LLMEngine, asks: Sequence[Ask], params: SamplingParams) -> None:
    """Raise `InvalidRequestError` if the engine could not run one of these."""
    for ask in asks:
        engine.engine_core.input_processor.check_limits(ask.token_ids, params, ask.title)


def most_prompt_tokens(engine: LLMEngine) -> int:
    """Tokens of the longest prompt that the engine would run."""
    intake: Any = engine.engine_core.input_processor
    return int(min(intake.max_model_len, intake.max_total_tokens, intake.max_num_batched_tokens)) - 2


def as_tokens(engine: SingleRequestEngine, messages: Sequence[Message]) -> list[int]:
    """Messages through the model's chat template; without one, a line each."""
    tokenizer = engine.engine_core.input_processor.tokenizer
    if tokenizer.chat_template is not None:
        return engine.chat_prompt(messages)
    ids: list[int] = tokenizer.encode("".join(f"{message['content']}\n" for message in messages))
    return ids


def _messages(system: str, past: Sequence[tuple[str, str]], question: str) -> list[Message]:
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    for asked, answered in past:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    return [*messages, {"role": "user", "content": question}]


def _longest(text: Callable[[int], str], most: int, room: int, engine: LLMEngine) -> str:
    """The text of the largest count of parts that is not longer than `room` tokens as a prompt."""
    for count in range(most, 0, -1):
        with suppress(PromptTooLongError):  # of so many characters that nobody counts its tokens
            if len(as_tokens(engine, _messages(text(count), (), USERS[0]))) <= room:
                return text(count)
    return ""
