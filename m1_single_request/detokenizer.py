"""Token ids to text, when somebody asks for it, never showing half a character.

A token is a piece of bytes, and a character may need several. So the text of the newest tokens is decoded together with
a few before them, and what ends in U+FFFD (the mark of broken bytes) waits until it is complete or the request ends.
The text and its tail are exactly `tokenizer.decode(all ids)`, however often they are asked for. vLLM:
`v1/engine/detokenizer.py`; SGLang: `detokenizer_manager.py`.
"""

from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

INCOMPLETE = "\ufffd"


class Reading(NamedTuple):
    """How far the tokens have been read. A step forward is a new `Reading`, so an interrupt leaves no half a step."""

    text: str = ""
    tail: str = ""
    """What the decoded tokens have behind `text`: broken bytes that wait."""
    start: int = 0
    newest: int = 0
    end: int = 0
    emitted: int = 0
    """How many characters of the decoded window are in `text` already."""


class IncrementalDetokenizer:
    """The growing text of one sequence.

    ids   [ ........ settled ........ | context | newest | noted ]
                                       ^start    ^newest  ^end
    A token is only noted when it comes. To read what was noted, `ids[start:]` is decoded. Once the newest tokens are
    complete they become the context, from `start` to `newest`: some tokenizers treat the first token of a text
    differently (they drop its leading space), and with a context before it no new token is the first.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._options = _decoder_of(tokenizer)
        self._skip_special_tokens = skip_special_tokens
        self._ids: list[int] = []
        self._reading = Reading()

    def push(self, token_id: int) -> None:
        """Note one token. It is decoded when somebody asks for the text."""
        self._ids.append(token_id)

    @property
    def text(self) -> str:
        """All characters that are complete."""
        return self._read().text

    def tail(self) -> str:
        """The broken bytes that are still held back, as U+FFFD: what to append when nothing more will come."""
        return self._read().tail

    def mark(self) -> tuple[int, Reading]:
        """A point to `rewind` to."""
        return len(self._ids), self._reading

    def rewind(self, mark: tuple[int, Reading]) -> None:
        """Forget every token pushed since `mark`, read or not."""
        num_ids, self._reading = mark
        del self._ids[num_ids:]

    def token_text(self, token_id: int) -> str:
        """One token alone as text, special tokens included."""
        return self._decode([token_id], skip_special_tokens=False)

    def _read(self) -> Reading:
        """Read what was noted: in one go if no character is broken, otherwise token by token.

        There are tokenizers that make U+FFFD of a whole run of bytes because of a broken one at its end. Read so, a
        request that is asked once at its end has the text of one that is asked at every token.
        """
        noted = len(self._ids) - self._reading.end
        if noted > 1:
            whole = self._read_to(len(self._ids))
            if INCOMPLETE not in whole.text[len(self._reading.text) :] + whole.tail:
                self._reading, noted = whole, 0
        for _ in range(noted):
            self._reading = self._read_to(self._reading.end + 1)
        return self._reading

    def _read_to(self, end: int) -> Reading:
        """The reading after the tokens before `end`."""
        text, _, start, newest, _, emitted = self._reading
        window = self._decode(self._ids[start:end])
        complete = window.rstrip(INCOMPLETE)
        new = complete[emitted:]
        emitted = max(emitted, len(complete))
        tail = window[emitted:]
        if new and complete == window:  # a special token that is skipped has no text and cannot serve as context
            start, newest = newest, end
            emitted = len(self._decode(self._ids[start:end]))
        return Reading(text + new, tail, start, newest, end, emitted)

    def _decode(self, ids: list[int], *, skip_special_tokens: bool | None = None) -> str:
        skip = self._skip_special_tokens if skip_special_tokens is None else skip_special_tokens
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip, **self._options))


def _decoder_of(tokenizer: PreTrainedTokenizerBase) -> tuple[Any, dict[str, Any]]:
    """Whose `decode` to call, and with what besides: that of the tokenizers library, where it is all that transformers'
    own comes to, and takes a third of the time."""
    library = PreTrainedTokenizerFast
    ways = ((getattr(tokenizer, name, None), getattr(library, name)) for name in ("decode", "_decode"))
    if all(getattr(way, "__func__", None) is theirs for way, theirs in ways):
        return tokenizer.backend_tokenizer, {}
    return tokenizer, {"clean_up_tokenization_spaces": False}
