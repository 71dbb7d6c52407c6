"""Build the detokenizer of m1: from token ids to text, as far as it is complete, at every step of a stream.

A token is a sequence of bytes, and a character may need several tokens: decoded too early, it becomes U+FFFD, the mark
of broken bytes. To decode all tokens again at every step is right, and an answer of n tokens then costs n * n of work.
To decode the new tokens alone is quick, and wrong: many tokenizers remove the space at the beginning of a text. So
decode the new tokens together with a few before them, and show what these add.

Explained in docs/m1_single_request.md#incrementaldetokenizer-bytes-to-characters.

    cp starters/detokenizer.py my_detokenizer.py
    pytest --part detokenizer=my_detokenizer.py:MyDetokenizer

A good order: decode all tokens whenever the text is read, until everything but the cost is right. Then shorten.
"""

from typing import Any, NamedTuple

INCOMPLETE = "\ufffd"


class Reading(NamedTuple):
    """How far a detokenizer has read. Add the fields that you need, each with a default value.

    It cannot be modified. So it is its own copy: a `Reading` that was stored stays as it is, and if the tokenizer
    raises an exception before the next `Reading` is made, nothing has changed.
    """

    text: str = ""
    """The complete characters. The trace of the engine reads this field; the others are yours."""


class MyDetokenizer:
    """The growing text of one sequence.

    Whenever it is read, `text` is what the tokenizer makes of all ids, without the U+FFFD at its end, if there is any:
    they may become a character. (U+FFFD before other characters stays: these bytes are broken for good.) `tail` is what
    was left out. So both together are always `decode(all ids)`.

    To read the text after every token must not decode more than a few tokens each time. Three things to mind:

    - The tokens before the new ones are the context. Without it a new ` world` would lose its space. Take as the new
      text what the context and the new tokens give together, after the length of what the context gives alone.
    - A context must have text. A special token that is left out has none, so the token before it is needed, too.
    - While the text ends with U+FFFD, the tokens since the last complete character have to be decoded again.
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = True) -> None:
        """Given. `skip_special_tokens`: leave special tokens out of the text."""
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._ids: list[int] = []
        self.reading = Reading()
        """As of the last time that text or tail was read."""

    def push(self, token_id: int) -> None:
        """Store one token. Nothing is decoded before `text` or `tail` is read: it may never be."""
        raise NotImplementedError

    @property
    def text(self) -> str:
        """The text of all tokens, without incomplete characters at its end. To read it twice changes nothing."""
        raise NotImplementedError

    def tail(self) -> str:
        """Return what `text` leaves out: the U+FFFD at the end of the text of all tokens; mostly none."""
        raise NotImplementedError

    def mark(self) -> tuple[int, Reading]:
        """Return the present state, for `rewind`: the number of tokens, and the `reading` as it is. Decodes nothing."""
        raise NotImplementedError

    def rewind(self, mark: tuple[int, Reading]) -> None:
        """Remove all tokens that were pushed since `mark`, whether they were read or not: text and tail are as if they
        had never come. A mark can be used again, also after other marks; one that was made after it cannot."""
        raise NotImplementedError

    def token_text(self, token_id: int) -> str:
        """Given. Return the text of one token alone, special tokens included."""
        return self._decode([token_id], skip_special_tokens=False)

    def _decode(self, ids: list[int], *, skip_special_tokens: bool | None = None) -> str:
        """Given. Return the text of some tokens, as the tokenizer decodes them together."""
        skip = self._skip_special_tokens if skip_special_tokens is None else skip_special_tokens
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False))
