"""Log-probabilities in the two forms of OpenAI's API: a list of objects for chat, four lists for completions.

New in this milestone. vLLM: `_create_chat_logprobs` and `_create_completion_logprobs` of its serving classes.
"""

import math
import re
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

from transformers import PreTrainedTokenizerBase

from m1_single_request.detokenizer import INCOMPLETE
from m1_single_request.outputs import Logprob, TokenLogprobs

LEAST = -9999.0
"""In place of minus infinity and NaN, which JSON lacks (vLLM's value)."""

# Byte-level tokenizers (GPT-2's, Qwen's) write a byte as a printable character: itself, or one from U+0100 on.
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
OTHERS = [byte for byte in range(0x100) if byte not in PRINTABLE]
BYTE_OF = {chr(byte): byte for byte in PRINTABLE} | {chr(0x100 + i): byte for i, byte in enumerate(OTHERS)}
BYTE_FALLBACK = re.compile("<0x([0-9A-F]{2})>")
"""A byte in the vocabulary of SentencePiece."""


def chat_logprobs(
    token_ids: Sequence[int], rows: Iterable[TokenLogprobs], num_top: int, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """Return the `logprobs` of a choice of `/v1/chat/completions`, with the `num_top` most likely tokens."""

    def entry(token_id: int, one: Logprob) -> dict[str, Any]:
        encoded = token_bytes(token_id, one.decoded_token, tokenizer)
        return {"token": one.decoded_token, "logprob": finite(one.logprob), "bytes": encoded}

    content = [
        {
            **entry(token_id, row[token_id]),
            "top_logprobs": [entry(*pair) for pair in by_rank(row) if pair[1].rank <= num_top],
        }
        for token_id, row in zip(token_ids, rows, strict=True)
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    token_ids: Sequence[int],
    rows: Iterable[TokenLogprobs | None],
    offset: int,
    tokenizer: PreTrainedTokenizerBase,
) -> dict[str, list[Any]]:
    """Return the `logprobs` of a choice of `/v1/completions`.

    The first token of a prompt has no row. `offset`: characters of all tokens before these. The offsets count the
    characters of each token alone, so that a character of several tokens counts for each of them, as in vLLM.
    """
    tokens: list[str] = []
    own: list[float | None] = []
    top: list[dict[str, float] | None] = []
    for token_id, row in zip(token_ids, rows, strict=True):
        if row is None:
            tokens.append(str(tokenizer.decode([token_id], clean_up_tokenization_spaces=False)))
            own.append(None)
            top.append(None)
            continue
        tokens.append(row[token_id].decoded_token)
        own.append(finite(row[token_id].logprob))
        best: dict[str, float] = {}
        for _, one in by_rank(row):  # of tokens with the same text, the most likely one
            best.setdefault(one.decoded_token, finite(one.logprob))
        top.append(best)
    offsets = list(accumulate(map(len, tokens), initial=offset))
    return {"tokens": tokens, "token_logprobs": own, "top_logprobs": top, "text_offset": offsets[:-1]}


def by_rank(row: TokenLogprobs) -> list[tuple[int, Logprob]]:
    """Return the tokens of a row from the most likely one on."""
    return sorted(row.items(), key=lambda pair: pair[1].rank)


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can represent."""
    return max(logprob, LEAST) if math.isfinite(logprob) else LEAST


def token_bytes(token_id: int, text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the UTF-8 bytes of a token, also of one that is a part of a character."""
    if INCOMPLETE in text:
        piece = str(tokenizer.convert_ids_to_tokens(token_id))
        if fallback := BYTE_FALLBACK.fullmatch(piece):
            return [int(fallback[1], 16)]
        if all(character in BYTE_OF for character in piece):
            return [BYTE_OF[character] for character in piece]
    return list(text.encode())
