"""A lower bound on the number of tokens of a text, from its length in characters.

It rejects a prompt that is too long without tokenizing it: a tokenizer takes many seconds for ten megabytes. No token
covers more bytes than the longest token of the vocabulary, and a character has at least one byte. So the number of
tokens is at least the number of characters divided by the bytes of the longest token. NFC may first compose up to 4
characters into one; then only a quarter of them counts. The bound holds for byte-level BPE, which drops no byte; other
tokenizers always tokenize.
"""

import json
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

NFC_SHRINKS_BY = 4
"""Maximum number of characters that NFC composes into one (UAX #15)."""


class LengthBound:
    """Lower bound on the number of tokens of a text. The constructor reads the whole vocabulary."""

    def __init__(self, tokenizer: Any) -> None:
        self.longest = _longest_token(tokenizer)
        """Bytes of the longest token; None: this tokenizer has no bound."""
        self.shrinks = bool(self.longest) and tokenizer.backend_tokenizer.normalizer is not None

    def __call__(self, text: str) -> int:
        """Return the minimum number of tokens of `text`; 0 if there is no bound."""
        if self.longest is None:
            return 0
        length = len(text)
        if self.shrinks and not text.isascii():
            length //= NFC_SHRINKS_BY
        return -(-length // self.longest)


def _longest_token(tokenizer: Any) -> int | None:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not _keeps_every_byte(backend):
        return None
    vocabulary, added = tokenizer.get_vocab(), tokenizer.added_tokens_decoder.values()
    if any(token.lstrip or token.rstrip for token in added) or not vocabulary.keys() >= set(ByteLevel.alphabet()):
        return None  # such a token covers any number of spaces; a byte without a token is dropped
    added_texts = {token.content for token in added}  # other tokens are stored with one character per byte
    return max([len(token.encode()) if token in added_texts else len(token) for token in vocabulary])


def _keeps_every_byte(backend: Any) -> bool:
    """Return whether this is byte-level BPE whose input keeps all characters, except that NFC may compose them."""
    if type(backend.model).__name__ != "BPE" or backend.model.continuing_subword_prefix:
        return False
    if backend.model.end_of_word_suffix or _steps(backend.normalizer, "normalizers") not in ([], [{"type": "NFC"}]):
        return False
    steps = _steps(backend.pre_tokenizer, "pretokenizers")
    is_kept = all(
        step["type"] in ("ByteLevel", "Digits") or (step["type"] == "Split" and step["behavior"] != "Removed")
        for step in steps
    )
    return is_kept and any(step["type"] == "ByteLevel" for step in steps)


def _steps(component: Any, parts: str) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer, as in tokenizer.json."""
    if component is None:
        return []
    state: dict[str, Any] = json.loads(component.__getstate__())
    inner = state.get(parts) if state["type"] == "Sequence" else None
    return [state] if inner is None else inner
