"""The three skills of tiny-qwen3 as endless streams of dialogues: explain, recall, repeat.

A dialogue is made of turns; the loss is taken on what the assistant says (and on its end token). Everything is a
function of the random generator handed in, so that a training step is reproducible from its number alone.
"""

from dataclasses import dataclass
from random import Random

from training.explain import Question
from training.words import word_lists

IM_START, IM_END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"


@dataclass(frozen=True)
class Piece:
    """A stretch of a dialogue's text; `learned` says whether the loss is taken on it."""

    text: str
    learned: bool = False


def chat(turns: list[tuple[str, str]], system: str | None = None) -> list[Piece]:
    """Render (question, answer) turns as the chat template does, with the loss on the answers."""
    pieces = [Piece(f"{IM_START}system\n{system}{IM_END}\n")] if system else []
    for question, answer in turns:
        pieces.append(Piece(f"{IM_START}user\n{question}{IM_END}\n{IM_START}assistant\n"))
        pieces.append(Piece(f"{answer}{IM_END}", learned=True))
        pieces.append(Piece("\n"))
    return pieces


def plain(question: str, answer: str) -> list[Piece]:
    """Render one turn without any template, as a bare completion: question, line break, answer, end of text."""
    return [Piece(f"{question}\n"), Piece(f"{answer}{END_OF_TEXT}", learned=True)]


# --- recall -----------------------------------------------------------------------------------------------------------


def facts(rng: Random, count: int) -> dict[str, str]:
    """`count` random facts: a noun and its four-digit code."""
    return {key: f"{rng.randrange(10_000):04d}" for key in rng.sample(word_lists()["nouns"], count)}


def fact_sentence(key: str, code: str) -> str:
    return f"The code of {key} is {code}."


def fact_list(codes: dict[str, str]) -> str:
    return " ".join(fact_sentence(key, code) for key, code in codes.items())


def recall_question(key: str) -> str:
    return f"What is the code of {key}?"


def recall_turns(rng: Random, count: int, asked: int) -> tuple[list[tuple[str, str]], str]:
    """`asked` questions about `count` facts, and the list of facts as text (not yet part of a turn)."""
    codes = facts(rng, count)
    keys = rng.choices(list(codes), k=asked)
    return [(recall_question(key), fact_sentence(key, codes[key])) for key in keys], fact_list(codes)


# --- repeat -----------------------------------------------------------------------------------------------------------

REPEAT_FRAMES = ("Repeat this text:\n", "Say this again:\n", "Copy this text:\n", "Repeat after me:\n")
MARKS = (".", ",", ";", ":", "!", "?", "-", "(", ")", '"', "'", "/", "+", "=", "#", "*")


def repeat_text(rng: Random, length: int, tokenizer) -> str:
    """An unseen text of about `length` tokens (a capital may cost one more): words, digits, marks, odd characters."""
    style = rng.random()
    text, tokens = "", 0
    while True:
        word = _repeat_word(rng, style)
        joined = word if not text or word in MARKS[:6] else f" {word}"
        tokens += len(tokenizer.encode(joined))
        if text and tokens > length:
            return text.capitalize() if style < 0.3 else text
        text += joined


def _repeat_word(rng: Random, style: float) -> str:
    lists = word_lists()
    draw = rng.random()
    if style < 0.3 or draw < 0.6:
        return rng.choice(lists["nouns"] if draw < 0.35 else lists["others"] + lists["scene"])
    if draw < 0.75:
        return rng.choice(MARKS)
    if draw < 0.9:
        return "".join(rng.choice("0123456789") for _ in range(rng.randint(1, 4)))
    if style < 0.8:
        return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(2, 7)))
    return "".join(chr(rng.choice(STRANGE)) for _ in range(rng.randint(1, 3)))


STRANGE = tuple(range(0xC0, 0x17F)) + tuple(range(0x4E00, 0x4F00)) + tuple(range(0x1F600, 0x1F640))


def repeat_turn(rng: Random, length: int, tokenizer) -> tuple[str, str]:
    text = repeat_text(rng, length, tokenizer)
    return rng.choice(REPEAT_FRAMES) + text, text


# --- explain ----------------------------------------------------------------------------------------------------------

LEADS = ("Please answer: ", "Hi! ", "Hello. ", "A question: ", "Please: ", "Help me: ", "Question: ")


def explain_turn(rng: Random, question: Question) -> tuple[str, str]:
    """One of the trained wordings, sometimes roughened, and the answer written for it.

    Roughening (a lead-in, a lost word, no capital, no question mark) is what lets the model answer wordings it never
    saw.
    """
    words = rng.choice(question.asked)
    if rng.random() < 0.5:
        if rng.random() < 0.4:
            kept = words.split(" ")
            if len(kept) > 3:
                kept.pop(rng.randrange(len(kept)))
            words = " ".join(kept)
        if rng.random() < 0.25:
            words = words.rstrip("?.")
        if rng.random() < 0.25:
            words = words[0].lower() + words[1:]
        if rng.random() < 0.3:
            words = rng.choice(LEADS) + words
    return words, question.answer
