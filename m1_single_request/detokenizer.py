"""Token ids to text, one token at a time, never showing half a character.

A token is a piece of bytes, and a character may need several. So the text of the newest tokens is decoded again with
each token, and what ends in U+FFFD (the mark of broken bytes) waits until it is complete or the request ends. The
pieces joined are exactly `tokenizer.decode(all ids)`. vLLM: `v1/engine/detokenizer.py`; SGLang:
`detokenizer_manager.py`.
"""

from transformers import PreTrainedTokenizerBase

INCOMPLETE = "\ufffd"


class IncrementalDetokenizer:
    """The growing text of one sequence.

    ids   [ ........ settled ........ | context | newest ]
                                       ^_start   ^_read
    Only `ids[_start:]` is decoded per token; `_emitted` of its characters are in `text` already. Once the newest tokens
    are complete they become the context, from `_start` to `_read`: some tokenizers treat the first token of a text
    differently (they drop its leading space), and with a context before it no new token is the first.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._ids: list[int] = []
        self._start = 0
        self._read = 0
        self._emitted = 0
        self.text = ""

    def push(self, token_id: int) -> str:
        """Read one token and return the text that became complete with it (possibly none)."""
        self._ids.append(token_id)
        window = self._decode(self._ids[self._start :])
        complete = window.rstrip(INCOMPLETE)
        new = complete[self._emitted :]
        self.text += new
        self._emitted = max(self._emitted, len(complete))
        if new and complete == window:  # a special token that is skipped has no text and cannot serve as context
            self._start, self._read = self._read, len(self._ids)
            self._emitted = len(self._decode(self._ids[self._start :]))
        return new

    def tail(self) -> str:
        """The broken bytes that are still held back, as U+FFFD: what to append when nothing more will come."""
        return self._decode(self._ids[self._start :])[self._emitted :]

    def mark(self) -> tuple[int, int, int, int, int]:
        """A point to `rewind` to."""
        return len(self._ids), self._start, self._read, self._emitted, len(self.text)

    def rewind(self, mark: tuple[int, int, int, int, int]) -> None:
        """Forget every token pushed since `mark`."""
        num_ids, self._start, self._read, self._emitted, length = mark
        del self._ids[num_ids:]
        self.text = self.text[:length]

    def token_text(self, token_id: int) -> str:
        """One token alone as text, special tokens included."""
        return self._decode([token_id], skip_special_tokens=False)

    def _decode(self, ids: list[int], *, skip_special_tokens: bool | None = None) -> str:
        skip = self._skip_special_tokens if skip_special_tokens is None else skip_special_tokens
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False))
