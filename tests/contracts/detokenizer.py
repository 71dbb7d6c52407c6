"""Contract of the detokenizer of m1: the text of tokens, whenever it is read, and no half character."""

from collections.abc import Sequence as SequenceOf
from random import Random
from typing import Any

from tests.contracts.part import Broken, Part, same
from tests.m1_single_request.helpers import PieceTokenizer

PART = Part(
    name="detokenizer",
    target="m1_single_request.detokenizer:IncrementalDetokenizer",
    lesson="docs/m1_single_request.md#incrementaldetokenizer-bytes-to-characters",
    starter="MyDetokenizer",
    role="detokenizer",
    variant="m1_single_request",
)

BROKEN = "\ufffd"
E_ACUTE = [b"\xc3", b"\xa9"]
SMILE = [b"\xf0\x9f", b"\x99", b"\x82"]
PIECES = [b"Hello", b" world", b" the", b"a", b" ", *E_ACUTE, *SMILE, b"\xff", b"\x80", "\u65e5".encode(), b"<end>"]
IDS = {piece: number for number, piece in enumerate(PIECES)}
END = IDS[b"<end>"]


class Pieces(PieceTokenizer):
    """Each id is a piece of bytes. It counts the ids that it decodes, and may raise at its next call."""

    def __init__(self, *, strips: bool = False) -> None:
        """`strips`: it removes the space at the beginning of a text."""
        super().__init__(dict(enumerate(PIECES)), [END])
        self.strips = strips
        self.num_decoded = 0
        self.is_failing = False

    def decode(self, ids: SequenceOf[int], *, skip_special_tokens: bool = False, **_: object) -> str:
        if self.is_failing:
            self.is_failing = False
            raise RuntimeError("the tokenizer failed")
        self.num_decoded += len(ids)
        text = super().decode(ids, skip_special_tokens=skip_special_tokens)
        return text.removeprefix(" ") if self.strips else text


def pushed(part: Any, *pieces: bytes, tokenizer: Pieces | None = None, **settings: Any) -> Any:
    """A detokenizer with these pieces, none of them read."""
    detokenizer = part(tokenizer or Pieces(), **settings)
    for piece in pieces:
        detokenizer.push(IDS[piece])
    return detokenizer


def growth(part: Any, *pieces: bytes, tokenizer: Pieces | None = None, **settings: Any) -> list[str]:
    """The text after each piece."""
    detokenizer = pushed(part, tokenizer=tokenizer, **settings)
    texts = []
    for piece in pieces:
        detokenizer.push(IDS[piece])
        texts.append(detokenizer.text)
    return texts


def shown(pieces: SequenceOf[bytes]) -> str:
    return ", ".join(map(repr, pieces))


def check_growth(part: Any, pieces: SequenceOf[bytes], expected: list[str], hint: str, **settings: Any) -> None:
    on = f"push {shown(pieces)}; the text after each"
    same(growth(part, *pieces, **settings), expected, on=on, hint=hint)


def test_the_text_is_that_of_all_tokens(part: Any) -> None:
    """The text is that of all tokens so far; without a token it is empty."""
    detokenizer = pushed(part)
    detokenizer.push(IDS[b"Hello"])
    detokenizer.push(IDS[b" world"])
    same(detokenizer.text, "Hello world", on="push b'Hello' and b' world'; text")
    detokenizer = pushed(part)
    detokenizer.push(IDS[b"a"])
    same((detokenizer.text, pushed(part).text), ("a", ""), on="push b'a', and a detokenizer without tokens; their text")


def test_it_can_be_read_at_any_time(part: Any) -> None:
    """Reading the text after every token, several times, or once at the end gives the same."""
    hint = "What was read before must be neither added again nor lost."
    check_growth(part, [b"Hello", b" world", b"a"], ["Hello", "Hello world", "Hello worlda"], hint)
    detokenizer = pushed(part, b"Hello", b" world")
    texts = [detokenizer.text, detokenizer.text, detokenizer.tail(), detokenizer.text]
    same(texts, ["Hello world", "Hello world", "", "Hello world"], on="text, text, tail() and text again", hint=hint)
    detokenizer.push(IDS[b"a"])
    detokenizer.push(IDS[b" the"])
    same(detokenizer.text, "Hello worlda the", on="then push b'a' and b' the'; text", hint=hint)


def test_an_incomplete_character_is_held_back(part: Any) -> None:
    """A character that needs several tokens is in the text when its last token has come, and not before."""
    hint = "U+FFFD at the end of the text may become a character: leave it out until it does."
    check_growth(part, [b"a", *E_ACUTE, b"a"], ["a", "a", "a\u00e9", "a\u00e9a"], hint)
    check_growth(part, [*SMILE, b"a"], ["", "", "\U0001f642", "\U0001f642a"], hint)


def test_the_tail_is_what_is_held_back(part: Any) -> None:
    """The tail is what the text leaves out, so that both together are the text of all tokens."""
    detokenizer = pushed(part, b"a", b"\xc3")
    hint = "If the output ends in the middle of a character, the user sees U+FFFD: the tail."
    same((detokenizer.text, detokenizer.tail()), ("a", BROKEN), on="push b'a' and b'\\xc3'; text, tail()", hint=hint)
    same(pushed(part, b"a", b"\xc3").tail(), BROKEN, on="push b'a' and b'\\xc3'; tail() without text", hint=hint)
    detokenizer.push(IDS[b"\xa9"])
    same((detokenizer.text, detokenizer.tail()), ("a\u00e9", ""), on="then push b'\\xa9'; text, tail()", hint=hint)
    detokenizer = pushed(part, b"\xff", b"\xff")
    same((detokenizer.text, detokenizer.tail()), ("", BROKEN * 2), on="push b'\\xff' twice; text, tail()", hint=hint)


def test_broken_bytes_stay_in_the_text(part: Any) -> None:
    """Bytes that are no character become part of the text as U+FFFD as soon as something follows."""
    hint = "Only U+FFFD at the end is held back. Before other characters it is final, and belongs to the text."
    check_growth(part, [b"a", b"\xff", b"a"], ["a", "a", f"a{BROKEN}a"], hint)
    check_growth(part, [b"\xc3", b"\xc3", b"\xa9"], ["", "", f"{BROKEN}\u00e9"], hint)


def test_special_tokens_are_left_out_if_asked(part: Any) -> None:
    """Special tokens are in the text only with `skip_special_tokens=False`."""
    hint = "Pass `skip_special_tokens` on to the tokenizer."
    check_growth(part, [b"a", b"<end>", b"a"], ["a", "a", "aa"], hint)
    got = growth(part, b"a", b"<end>", b"a", skip_special_tokens=False)
    on = "skip_special_tokens=False; push b'a', b'<end>', b'a'; the text after each"
    same(got, ["a", "a<end>", "a<end>a"], on=on, hint=hint)


def test_a_space_is_lost_only_at_the_beginning(part: Any) -> None:
    """A tokenizer that removes the space at the beginning of a text does so once, not for each token."""
    hint = "Decoded alone, ` world` loses its space: decode it with the tokens before it."
    on = "a tokenizer that removes a leading space; push b' world', b' the', b' world'; the text after each"
    got = growth(part, b" world", b" the", b" world", tokenizer=Pieces(strips=True))
    same(got, ["world", "world the", "world the world"], on=on, hint=hint)
    hint = "The special token has no text, so it is no context: the token before it is needed, too."
    on = "the same tokenizer; push b'Hello', b'<end>', b' world', b'<end>', b'<end>', b' the'; the text after each"
    pieces = (b"Hello", b"<end>", b" world", b"<end>", b"<end>", b" the")
    got = growth(part, *pieces, tokenizer=Pieces(strips=True))
    world, end = "Hello world", "Hello world the"
    same(got, ["Hello", "Hello", world, world, world, end], on=on, hint=hint)


def test_a_push_decodes_nothing(part: Any) -> None:
    """Nothing is decoded until text or tail is read."""
    tokenizer = Pieces()
    detokenizer = pushed(part, b"Hello", b" world", tokenizer=tokenizer)
    detokenizer.rewind(detokenizer.mark())
    hint = "Store the token. Decode when the text is read: it may never be."
    same(tokenizer.num_decoded, 0, on="push two tokens, mark, rewind; how many tokens were decoded", hint=hint)
    same(detokenizer.text, "Hello world", on="then read the text")
    before = tokenizer.num_decoded
    same((detokenizer.text, detokenizer.tail()), ("Hello world", ""), on="then text and tail() again")
    hint = "All tokens have been read: there is nothing to decode."
    same(tokenizer.num_decoded - before, 0, on="text and tail() again; how many tokens were decoded", hint=hint)


def test_a_rewind_removes_tokens(part: Any) -> None:
    """After `rewind` the text is as if the tokens since the mark had never come, whether they were read or not."""
    hint = "Both the tokens and what was read of them have to go."
    for is_read in (False, True):
        detokenizer = pushed(part, b"a")
        mark = detokenizer.mark()
        detokenizer.push(IDS[b" the"])
        detokenizer.push(IDS[b"\xc3"])
        done = "push b'a'; mark; push b' the' and b'\\xc3'; " + "read the text; " * is_read
        if is_read:
            same(detokenizer.text, "a the", on=done)
        detokenizer.rewind(mark)
        same((detokenizer.text, detokenizer.tail()), ("a", ""), on=f"{done}rewind; text, tail()", hint=hint)
        detokenizer.push(IDS[b" world"])
        same(detokenizer.text, "a world", on=f"{done}rewind; push b' world'; text", hint=hint)


def test_a_rewind_brings_half_a_character_back(part: Any) -> None:
    """A rewind to the middle of a character holds its first half back again, and another second half may follow."""
    detokenizer = pushed(part, b"\xc3")
    same(detokenizer.text, "", on="push b'\\xc3'; text")
    mark = detokenizer.mark()
    detokenizer.push(IDS[b"\xa9"])
    same(detokenizer.text, "\u00e9", on="then mark; push b'\\xa9'; text")
    detokenizer.rewind(mark)
    done = "push b'\\xc3'; mark; push b'\\xa9'; rewind"
    same((detokenizer.text, detokenizer.tail()), ("", BROKEN), on=f"{done}; text, tail()")
    detokenizer.push(IDS[b"\x80"])
    same(detokenizer.text, b"\xc3\x80".decode(), on=f"{done}; push b'\\x80'; text")


def test_a_mark_can_be_used_again(part: Any) -> None:
    """A mark stays valid when the text is read, after a rewind to it, and after a rewind to a later mark."""
    hint = "A mark is a copy of the state: nothing that happens later may change it."
    detokenizer = pushed(part, b"a")
    first = detokenizer.mark()
    for piece in (b" the", b" world"):
        detokenizer.push(IDS[piece])
        second = detokenizer.mark()
        detokenizer.push(IDS[b"Hello"])
        same(detokenizer.text, f"a{piece.decode()}Hello", on=f"push b'a'; mark; push {piece!r}; mark; push b'Hello'")
        detokenizer.rewind(second)
        same(detokenizer.text, f"a{piece.decode()}", on=f"then rewind to the second mark, behind {piece!r}", hint=hint)
        detokenizer.rewind(first)
        same(detokenizer.text, "a", on="then rewind to the first mark", hint=hint)
    done = "push b'a'; text; push b' the'; mark"
    detokenizer.push(IDS[b" the"])
    same(detokenizer.mark()[1].text, "a", on=f"{done}; mark()[1].text", hint="The text as it was read last: the trace.")


def test_a_tokenizer_that_raises_changes_nothing(part: Any) -> None:
    """If the tokenizer raises an exception, the text can be read again, and is complete."""
    hint = "First decode, then store what you know: an exception in between must leave everything as it was."
    for num_good in range(3):
        tokenizer = Pieces()
        detokenizer = pushed(part, b"a", tokenizer=tokenizer)
        same(detokenizer.text, "a", on="push b'a'; text")
        for piece in (*E_ACUTE, b" the")[: num_good + 1]:
            detokenizer.push(IDS[piece])
        tokenizer.is_failing = True
        try:
            detokenizer.tail()
        except RuntimeError:
            pass
        else:
            raise Broken("the tokenizer raises while tail() is read", "this exception", "none")
        expected = ("a", "a\u00e9", "a\u00e9 the")[num_good]
        on = f"push b'a', read it; push {shown((*E_ACUTE, b' the')[: num_good + 1])}; tail() raises; text"
        same(detokenizer.text, expected, on=on, hint=hint)


def test_a_long_answer_costs_little(part: Any) -> None:
    """Reading the text after every token decodes a few tokens each time, however long the answer is."""
    tokenizer = Pieces(strips=True)
    pieces = [b" the", b"a", *E_ACUTE, b" world", b"<end>"] * 50
    hint = "What was complete stays, and a token adds its text to it, with its space, if no character is incomplete."
    before = ""
    for number, text in enumerate(growth(part, *pieces, tokenizer=tokenizer), start=1):
        whole = Pieces(strips=True).decode([IDS[piece] for piece in pieces[:number]], skip_special_tokens=True)
        last = f"the last of them {shown(pieces[max(0, number - 3) : number])}"
        on = f"a tokenizer that removes a leading space; push {number} tokens, {last}; the end of the text"
        same(text[len(before[:-20]) :], whole.rstrip(BROKEN)[len(before[:-20]) :], on=on, hint=hint)
        before = text
    if tokenizer.num_decoded > 8 * len(pieces):
        hint = "Do not decode everything again: what is complete stays as it is, and a short context is enough."
        on = f"{len(pieces)} tokens, the text read after each; how many tokens were decoded"
        raise Broken(on, f"at most {8 * len(pieces):,}", f"{tokenizer.num_decoded:,}", hint)


def test_the_text_is_right_at_any_moment(part: Any) -> None:
    """After any pushes, readings, marks and rewinds text and tail are what the tokenizer makes of all ids."""
    rng = Random(1)
    for number in range(60):
        skips, tokenizer = number % 3 > 0, Pieces(strips=number % 2 > 0)
        detokenizer = part(tokenizer, skip_special_tokens=skips)
        ids: list[int] = []
        marks: list[tuple[int, Any]] = [(0, detokenizer.mark())]
        done = [f"skip_special_tokens={skips}" + ", a leading space is removed" * tokenizer.strips]
        for _ in range(25):
            action = rng.random()
            if action < 0.55:
                ids.append(rng.randrange(len(PIECES)))
                detokenizer.push(ids[-1])
                done.append(f"push {PIECES[ids[-1]]!r}")
            elif action < 0.65:
                marks.append((len(ids), detokenizer.mark()))
                done.append(f"mark {len(marks) - 1}")
            elif action < 0.72:
                to = rng.randrange(len(marks))
                del marks[to + 1 :]
                del ids[marks[to][0] :]
                detokenizer.rewind(marks[to][1])
                done.append(f"rewind to mark {to}")
            else:
                whole = tokenizer.decode(ids, skip_special_tokens=skips)
                hint = f"These tokens are there now: {shown([PIECES[token_id] for token_id in ids]) or 'none'}."
                text = whole.rstrip(BROKEN)
                if rng.random() < 0.7:
                    done.append("text")
                    same(detokenizer.text, text, on="; ".join(done), hint=hint)
                else:
                    done.append("tail")
                    same(detokenizer.tail(), whole[len(text) :], on="; ".join(done), hint=hint)
