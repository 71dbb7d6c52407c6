"""Detokenizer: convert token ids to text on demand, without incomplete characters.

A token is a sequence of bytes, and a character may need several tokens. So the newest tokens are decoded together with
a few before them. Text at the end that is U+FFFD (the mark of broken bytes) is held back until it is complete or the
request ends. The text and its tail together are exactly `tokenizer.decode(all ids)`, no matter when they are read.
vLLM: `v1/engine/detokenizer.py`; SGLang: `detokenizer_manager.py`.
"""

from typing import Any, NamedTuple

from tokenizers.decoders import ByteLevel
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

INCOMPLETE = "\ufffd"


class Reading(NamedTuple):
    """Decoding progress. Every advance makes a new `Reading`, so an error never leaves a partial update."""

    text: str = ""
    tail: str = ""
    """Decoded text after `text`: incomplete characters, held back."""
    start: int = 0
    newest: int = 0
    end: int = 0
    emitted: int = 0
    """Number of characters of the decoded window that are already in `text`."""


class IncrementalDetokenizer:
    """The growing text of one sequence.

    ids   [ ........ decoded ........ | context | newest | pending ]
                                       ^start    ^newest  ^end
    `push` only stores a token. Reading the text decodes `ids[start:]`. Once the newest tokens are complete, they become
    the context, from `start` to `newest`. The context is needed because some tokenizers treat the first token of a text
    differently (they drop its leading space). Where tokens are bytes and nothing else, as Qwen's, `start` is `newest`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._options = _decoder_of(tokenizer)
        self._needs_context = self._tokenizer is tokenizer or not isinstance(self._tokenizer.decoder, ByteLevel)
        self._skip_special_tokens = skip_special_tokens
        self._ids: list[int] = []
        self.reading = Reading()
        """The text as of the last time that it was read."""

    def push(self, token_id: int) -> None:
        """Store one token. It is decoded when the text is read."""
        self._ids.append(token_id)

    @property
    def text(self) -> str:
        """Text of all complete characters."""
        return self._read().text

    def tail(self) -> str:
        """Return the incomplete characters that are held back, as U+FFFD, to append when the sequence ends."""
        return self._read().tail

    def mark(self) -> tuple[int, Reading]:
        """Return the current state, for `rewind`."""
        return len(self._ids), self.reading

    def rewind(self, mark: tuple[int, Reading]) -> None:
        """Remove every token pushed since `mark`, decoded or not."""
        num_ids, self.reading = mark
        del self._ids[num_ids:]

    def token_text(self, token_id: int) -> str:
        """Return the text of one token alone, special tokens included."""
        return self._decode([token_id], skip_special_tokens=False)

    def _read(self) -> Reading:
        """Decode the pending tokens: all at once if no character is broken, otherwise one by one.

        Some tokenizers turn a whole run of bytes into U+FFFD because of one broken byte at its end. One by one, a
        request whose text is read once at its end gets the same text as one whose text is read at every token.
        """
        pending = len(self._ids) - self.reading.end
        if pending > 1:
            whole = self._read_to(len(self._ids))
            if INCOMPLETE not in whole.text[len(self.reading.text) :] + whole.tail:
                self.reading, pending = whole, 0
        for _ in range(pending):
            self.reading = self._read_to(self.reading.end + 1)
        return self.reading

    def _read_to(self, end: int) -> Reading:
        """Return the `Reading` after decoding the tokens before index `end`."""
        text, _, start, newest, _, emitted = self.reading
        window = self._decode(self._ids[start:end])
        complete = window.rstrip(INCOMPLETE)
        new = complete[emitted:]
        emitted = max(emitted, len(complete))
        tail = window[emitted:]
        if new and complete == window:  # a skipped special token has no text, so it cannot be the context
            start, newest = newest if self._needs_context else end, end
            emitted = len(self._decode(self._ids[start:end])) if start < end else 0
        return Reading(text + new, tail, start, newest, end, emitted)

    def _decode(self, ids: list[int], *, skip_special_tokens: bool | None = None) -> str:
        skip = self._skip_special_tokens if skip_special_tokens is None else skip_special_tokens
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip, **self._options))


def _decoder_of(tokenizer: PreTrainedTokenizerBase) -> tuple[Any, dict[str, Any]]:
    """Return the object whose `decode` to call, and its keyword arguments.

    It is the tokenizers library's object if transformers adds nothing to its `decode`: it takes a third of the time.
    """
    base = PreTrainedTokenizerFast
    methods = ((getattr(tokenizer, name, None), getattr(base, name)) for name in ("decode", "_decode"))
    if all(getattr(method, "__func__", None) is inherited for method, inherited in methods):
        return tokenizer.backend_tokenizer, {}
    return tokenizer, {"clean_up_tokenization_spaces": False}
