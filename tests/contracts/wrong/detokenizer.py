"""Typical mistakes in a detokenizer, each with the hint that it must get."""

from m1_single_request.detokenizer import INCOMPLETE, IncrementalDetokenizer, Reading


class ShowsHalves(IncrementalDetokenizer):
    """Nothing is held back."""

    @property
    def text(self) -> str:
        reading = self._read()
        return reading.text + reading.tail


class DropsBrokenBytes(IncrementalDetokenizer):
    """U+FFFD is never shown."""

    @property
    def text(self) -> str:
        return self._read().text.replace(INCOMPLETE, "")


class NoContext(IncrementalDetokenizer):
    """The new tokens are decoded alone."""

    def _read_to(self, end: int) -> Reading:
        reading = self.reading
        return super()._read_to(end) if reading.tail else self._alone(reading, end)

    def _alone(self, reading: Reading, end: int) -> Reading:
        window = self._decode(self._ids[reading.end : end])
        complete = window.rstrip(INCOMPLETE)
        return Reading(reading.text + complete, window[len(complete) :], reading.end, reading.end, end, len(complete))


class AnyContext(IncrementalDetokenizer):
    """A token without text is a context, too."""

    def _read_to(self, end: int) -> Reading:
        reading = super()._read_to(end)
        if reading.tail or reading.newest == end:
            return reading
        emitted = len(self._decode(self._ids[reading.newest : end]))
        return reading._replace(start=reading.newest, newest=end, emitted=emitted)


class DecodesEverything(IncrementalDetokenizer):
    """All tokens are decoded at every reading."""

    def _read_to(self, end: int) -> Reading:
        whole = self._decode(self._ids[:end])
        text = whole.rstrip(INCOMPLETE)
        return Reading(text, whole[len(text) :], 0, 0, end, len(text))


class DecodesEarly(IncrementalDetokenizer):
    """Each token is decoded when it comes."""

    def push(self, token_id: int) -> None:
        super().push(token_id)
        self._read()


class KeepsTheText(IncrementalDetokenizer):
    """A rewind removes the tokens, but not their text."""

    def rewind(self, mark: tuple[int, Reading]) -> None:
        del self._ids[mark[0] :]
        self.reading = self.reading._replace(end=min(self.reading.end, mark[0]))


class CountsFirst(IncrementalDetokenizer):
    """The tokens count as read before they are decoded."""

    def _read(self) -> Reading:
        before, self.reading = self.reading, self.reading._replace(end=len(self._ids))
        reading = Reading(*before)
        if before.end < len(self._ids):
            self._decode(self._ids[before.end :])
            self.reading = reading
        return super()._read()


class ForgetsTheTail(IncrementalDetokenizer):
    """The tail is empty until the text is read."""

    def tail(self) -> str:
        return self.reading.tail


WRONG = [
    (NoContext, "Decoded alone"),
    (ShowsHalves, "leave it out until it does"),
    (DropsBrokenBytes, "it is final, and belongs to the text"),
    (AnyContext, "The special token has no text"),
    (DecodesEverything, "Do not decode everything again"),
    (DecodesEarly, "Decode when the text is read"),
    (KeepsTheText, "Both the tokens and what was read of them"),
    (CountsFirst, "First decode, then store"),
    (ForgetsTheTail, "If the output ends in the middle of a character"),
]
