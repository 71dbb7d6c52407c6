"""Twenty prompts of the kinds that the course's model was made for, and a few that it was not."""

from random import Random

from transformers import PreTrainedTokenizerBase

from training.explain import questions
from training.words import word_lists

MAX_TOKENS = 24

REPEATS = (
    "Repeat this text:\nthe otter keeps 7 lamps; two of them are green",
    "Say this again:\nzq9 + #4 (anchor/anchor) = 10!",
    "Copy this text:\nnaïve café, straße, 漢字 and 😀😀 again",
    "Repeat after me:\n" + " ".join(str(n) for n in range(40)),
)
RAW = (
    "Once upon a time there was a kettle that",
    "a",
    "def add(a, b):\n    return a +",
    "\t\n\n  \u00e9\u0301 \u200d\U0001f469\u200d\U0001f467 \x00 end",
)


def facts(rng: Random, count: int) -> tuple[str, str]:
    """A list of `count` facts, and a question about one of them."""
    keys = rng.sample(word_lists()["nouns"], count)
    listed = " ".join(f"The code of {key} is {rng.randrange(10_000):04d}." for key in keys)
    return listed, f"What is the code of {rng.choice(keys)}?"


def twenty_prompts(tokenizer: PreTrainedTokenizerBase) -> list[str | list[int]]:
    """Chat prompts as token ids, plain ones as text."""
    rng = Random(20)
    asked = rng.sample(questions(), 7)
    explain = [question.held_out if number % 2 else question.asked[0] for number, question in enumerate(asked)]
    recall = [" ".join(facts(rng, count)) for count in (2, 5, 10, 20, 35)]
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in (*explain, *recall, *REPEATS)
    ]
    return [*chats, *RAW]
