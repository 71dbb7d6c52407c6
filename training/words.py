"""The word lists behind the synthetic skills, read from `data/words.toml`."""

import tomllib
from functools import cache
from pathlib import Path

DATA = Path(__file__).parent / "data"


@cache
def word_lists() -> dict[str, tuple[str, ...]]:
    """Return `{"nouns": ..., "others": ..., "scene": ...}`, each without repetition, in file order."""
    lists = tomllib.loads((DATA / "words.toml").read_text(encoding="utf-8"))
    return {name: tuple(dict.fromkeys(words.split())) for name, words in lists.items()}


def all_words() -> tuple[str, ...]:
    """Every word of every list once, in file order."""
    return tuple(dict.fromkeys(word for words in word_lists().values() for word in words))
