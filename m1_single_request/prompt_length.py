"""A lower bound on the number of tokens of a text, from its length in characters.

It rejects a prompt that is too long without tokenizing it: a tokenizer takes many seconds for ten megabytes. One token
stands for at most as many characters as the longest token of the vocabulary has, and NFC may have composed each of them
from up to 4. This holds for a tokenizer that keeps every character. vLLM has the same check (`max_chars_per_token`).
"""

from typing import Any
from unicodedata import normalize

NFC_SHRINKS_BY = 4
"""Maximum number of characters that NFC composes into one (UAX #15)."""
LOW = (*range(0xC0), *range(0xC0, 0x1000, 0x40), *range(0x1000, 0xD000, 0x1000))  # below the surrogates
PROBE = "".join(map(chr, (*LOW, *range(0xE000, 0x110000, 0x1000))))
"""Text with every byte that UTF-8 uses."""


def characters_per_token(tokenizer: Any) -> int | None:
    """Return the maximum number of characters, after NFC, that one token stands for.

    None for a tokenizer that drops characters or merges any number of them into one token: `PROBE`, with each added
    token between spaces, does not come back from it.
    """
    added = [token.content for token in tokenizer.added_tokens_decoder.values()]
    probe = "   ".join(["", PROBE, *added, ""])
    kept = tokenizer.decode(tokenizer.encode(probe, add_special_tokens=False))
    return max(map(len, tokenizer.get_vocab())) if normalize("NFC", kept) == normalize("NFC", probe) else None
