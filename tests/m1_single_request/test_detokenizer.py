"""The text of tokens, whenever it is read: what the tokenizer makes of all ids, and no half character."""

from contextlib import suppress
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings, strategies as st
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from m1_single_request.detokenizer import IncrementalDetokenizer
from tests.m1_single_request.helpers import byte_tokens, decode_all, real_tokenizer, sentencepiece_tokenizer
from tests.support.amounts import examples

BROKEN = "\ufffd"
LLAMA_STYLES = [False, True]  # with the Metaspace decoder


def llama(style: bool) -> PreTrainedTokenizerBase:
    return sentencepiece_tokenizer(style)


def byte_ids(data: bytes) -> list[int]:
    """The bytes as tokens of one byte each."""
    return [byte_tokens()[byte] for byte in data]


def pushed(ids: list[int], tokenizer: Any = None, **settings: Any) -> IncrementalDetokenizer:
    """A detokenizer with these tokens, none of them read."""
    detokenizer = IncrementalDetokenizer(tokenizer or real_tokenizer(), **settings)
    for token_id in ids:
        detokenizer.push(token_id)
    return detokenizer


def growth(ids: list[int], tokenizer: Any = None, **settings: Any) -> list[str]:
    """What each token adds to the text."""
    detokenizer = pushed([], tokenizer, **settings)
    added = []
    for token_id in ids:
        before = len(detokenizer.text)
        detokenizer.push(token_id)
        added.append(detokenizer.text[before:])
    return added


# --- read at any moment -----------------------------------------------------------------------------------------------


class Push(NamedTuple):
    token_id: int


class Rewind(NamedTuple):
    to: int
    """Which of the marks, counted round."""


def moments(ids: st.SearchStrategy[int]) -> st.SearchStrategy[list[Any]]:
    """Any order of pushing, reading, marking and rewinding."""
    push = ids.map(Push)
    rewind = st.integers(0, 5).map(Rewind)
    return st.lists(st.one_of(push, push, push, st.sampled_from(["text", "tail", "mark"]), rewind), max_size=30)


def check_moments(tokenizer: Any, steps: list[Any], skip_special_tokens: bool) -> None:
    """Whenever it is read, and whatever was read before: what the tokenizer makes of all ids that are there."""

    def whole() -> str:
        return decode_all(tokenizer, ids, skip_special_tokens=skip_special_tokens)

    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    ids: list[int] = []
    marks: list[tuple[int, Any]] = [(0, detokenizer.mark())]
    for step in [*steps, "text", "tail"]:
        if isinstance(step, Push):
            ids.append(step.token_id)
            detokenizer.push(step.token_id)
        elif isinstance(step, Rewind):
            del marks[step.to % len(marks) + 1 :]  # later marks are void
            length, mark = marks[-1]
            del ids[length:]
            detokenizer.rewind(mark)
        elif step == "mark":
            marks.append((len(ids), detokenizer.mark()))
        elif step == "text":
            assert detokenizer.text == whole().rstrip(BROKEN)
        else:
            assert detokenizer.tail() == whole()[len(whole().rstrip(BROKEN)) :]


PIECES_OF_CHARACTERS = [*b"a ", *"é🙂日".encode(), 0x80, 0xC3, 0xFF, 0xEF, 0xBF, 0xBD]


@settings(max_examples=examples(500))
@given(data=st.data(), skip_special_tokens=st.booleans())
def test_the_text_is_the_tokenizers_at_whatever_moments_it_is_read(
    data: st.DataObject, skip_special_tokens: bool
) -> None:
    tokenizer = real_tokenizer()
    pieces = st.sampled_from(byte_ids(bytes(PIECES_OF_CHARACTERS)) + tokenizer.all_special_ids)
    ids = st.one_of(pieces, pieces, st.integers(0, len(tokenizer) - 1))
    check_moments(tokenizer, data.draw(moments(ids)), skip_special_tokens)


@pytest.mark.parametrize("style", LLAMA_STYLES)
@settings(max_examples=examples(300))
@given(data=st.data(), skip_special_tokens=st.booleans())
def test_the_text_with_leading_spaces_is_the_tokenizers_at_whatever_moments_it_is_read(
    data: st.DataObject, skip_special_tokens: bool, style: bool
) -> None:
    """Any tokens but broken runs of bytes: there such a tokenizer changes its mind about characters that are out."""
    words = [i for token, i in llama(style).get_vocab().items() if not token.startswith("<0x")]
    ids = st.sampled_from(words + 4 * llama(style).all_special_ids)
    check_moments(llama(style), data.draw(moments(ids)), skip_special_tokens)


KNOWN = ["Hello", " world", " the", "ing", " ", "a", "é", "日本", "🙂", "\n", BROKEN, "<s>", "</s>"]


@pytest.mark.parametrize("style", LLAMA_STYLES)
@settings(max_examples=examples(250))
@given(data=st.data(), parts=st.lists(st.one_of(st.sampled_from(KNOWN), st.text(max_size=3)), max_size=8))
def test_characters_of_fallback_bytes_are_out_at_the_end_at_whatever_moments_they_are_read(
    data: st.DataObject, parts: list[str], style: bool
) -> None:
    ids = llama(style).encode("".join(parts), add_special_tokens=False)
    detokenizer, text = IncrementalDetokenizer(llama(style)), ""
    for token_id in ids:
        detokenizer.push(token_id)
        if data.draw(st.booleans()):
            assert detokenizer.text.startswith(text) and not detokenizer.text.endswith(BROKEN)
            text = detokenizer.text
    assert detokenizer.text + detokenizer.tail() == decode_all(llama(style), ids, skip_special_tokens=True)


@pytest.mark.parametrize("style", LLAMA_STYLES)
@given(data=st.data())
def test_broken_fallback_bytes_never_take_text_back_and_never_end_in_half_a_character(
    data: st.DataObject, style: bool
) -> None:
    vocabulary = llama(style).get_vocab()
    pieces = [vocabulary[name] for name in ["▁the", "▁", "a", *fallback("é日🙂"), "<0xFF>"]]
    ids = data.draw(st.lists(st.sampled_from(pieces), max_size=12))
    detokenizer, text = IncrementalDetokenizer(llama(style)), ""
    for token_id in ids:
        detokenizer.push(token_id)
        assert detokenizer.text.startswith(text) and not detokenizer.text.endswith(BROKEN)
        text = detokenizer.text
    unread = pushed(ids, llama(style))
    assert (unread.text, unread.tail()) == (text, detokenizer.tail()), "reading in between changes nothing"


def test_every_token_alone_and_after_another_comes_out_as_the_tokenizer_decodes_it() -> None:
    tokenizer = real_tokenizer()
    for token_id in range(len(tokenizer)):
        for ids in ([token_id], [5, token_id, token_id]):
            detokenizer = pushed(ids)
            assert detokenizer.text + detokenizer.tail() == decode_all(tokenizer, ids, skip_special_tokens=True)


# --- the shipped tokenizer --------------------------------------------------------------------------------------------


def test_each_of_the_256_bytes_has_a_token_of_its_own() -> None:
    data = bytes(range(256))
    assert len(set(byte_ids(data))) == 256
    assert decode_all(real_tokenizer(), byte_ids(data), skip_special_tokens=False) == data.decode(errors="replace")


# --- characters that arrive in pieces ---------------------------------------------------------------------------------


def fallback(text: str) -> list[str]:
    """The names of the tokens that are the bytes of `text`."""
    return [f"<0x{byte:02X}>" for byte in text.encode()]


@pytest.mark.parametrize("style", LLAMA_STYLES)
@pytest.mark.parametrize(
    ("tokens", "added"),
    [
        (["▁Hello", "</s>", "▁world", "</s>", "</s>", "▁the"], ["Hello", "", " world", "", "", " the"]),
        (["▁Hello", *fallback("日é"), "▁the"], ["Hello", "", "", "日", "", "é", " the"]),
    ],
    ids=["the space after a skipped special token is not lost", "fallback bytes appear with the last one"],
)
def test_text_grows_as_it_does_when_it_is_decoded_whole(tokens: list[str], added: list[str], style: bool) -> None:
    """Decoded alone, ` world` is the beginning of a text, and the tokenizer strips its space."""
    vocabulary = llama(style).get_vocab()
    assert growth([vocabulary[token] for token in tokens], llama(style)) == added


def test_one_token_alone_is_named_with_its_text() -> None:
    detokenizer = IncrementalDetokenizer(real_tokenizer())
    (end,) = real_tokenizer().encode("<|im_end|>")
    assert detokenizer.token_text(end) == "<|im_end|>", "also where special tokens are left out of the text"
    assert detokenizer.token_text(byte_ids(b"\xc3")[0]) == BROKEN
    assert detokenizer.token_text(byte_ids(b"a")[0]) == "a"
    assert detokenizer.text == ""


# --- calls of the tokenizer -------------------------------------------------------------------------------------------


class Watched:
    """The shipped tokenizer. It notes how many ids it is given, and may be interrupted at one of its calls."""

    def __init__(self, fatal: int | None = None) -> None:
        self.decoded: list[int] = []
        self.fatal = fatal

    def decode(self, ids: list[int], **settings: Any) -> str:
        self.decoded.append(len(ids))
        if len(self.decoded) == self.fatal:
            raise KeyboardInterrupt
        return decode_all(real_tokenizer(), ids, skip_special_tokens=settings["skip_special_tokens"])


def test_tokens_are_decoded_only_when_the_text_is_read_and_many_in_one_go() -> None:
    tokenizer, text = Watched(), "A café and a 🐈. " * 20
    ids = real_tokenizer().encode(text)
    detokenizer = pushed(ids, tokenizer)
    detokenizer.mark()
    assert tokenizer.decoded == []
    assert detokenizer.text + detokenizer.tail() == text
    assert tokenizer.decoded == [len(ids)] * 2, "the text, and the context of what may follow"
    assert detokenizer.text + detokenizer.tail() and len(tokenizer.decoded) == 2, "a second reading decodes nothing"
    for token_id in ids[:9]:
        detokenizer.push(token_id)
        detokenizer.tail()
    assert max(tokenizer.decoded[-4:]) < 9, "what follows is read with a short context again"


class Shouts(PreTrainedTokenizerFast):  # type: ignore[misc]
    """A tokenizer of one's own, which changes how tokens become text."""

    def decode(self, *args: Any, **settings: Any) -> str:
        return str(super().decode(*args, **settings)).upper()


class ShoutsWithin(PreTrainedTokenizerFast):  # type: ignore[misc]
    """The same, one step further down."""

    def _decode(self, *args: Any, **settings: Any) -> str:
        return str(super()._decode(*args, **settings)).upper()


@pytest.mark.parametrize("kind", [Shouts, ShoutsWithin, PreTrainedTokenizerFast])
def test_a_tokenizer_that_decodes_in_its_own_way_is_called(kind: type[PreTrainedTokenizerFast]) -> None:
    tokenizer = kind(tokenizer_object=real_tokenizer().backend_tokenizer)
    ids = real_tokenizer().encode("a café")
    expected = "a café" if kind is PreTrainedTokenizerFast else "A CAFÉ"
    assert "".join(growth(ids, tokenizer)) == expected
    if kind is PreTrainedTokenizerFast:
        tokenizer.decode = lambda *args, **settings: "?"  # not of the class, but of this one
        assert "".join(growth(ids[:1], tokenizer)) == "?"


class DropsASpace(PreTrainedTokenizerFast):  # type: ignore[misc]
    """One that treats the beginning of a text differently, over bytes that do not."""

    def decode(self, *args: Any, **settings: Any) -> str:
        return str(super().decode(*args, **settings)).removeprefix(" ")


def test_a_tokenizer_that_treats_the_beginning_differently_gets_a_context() -> None:
    tokenizer = DropsASpace(tokenizer_object=real_tokenizer().backend_tokenizer)
    ids = real_tokenizer().encode(" the words of a text")
    assert "".join(growth(ids, tokenizer)) == tokenizer.decode(ids) == "the words of a text"


@pytest.mark.parametrize("text", ["plain words", "a café 🙂"])
@pytest.mark.parametrize("every", [1, 3, 100])
def test_an_interrupted_reading_is_made_again_and_doubles_nothing(text: str, every: int) -> None:
    """Ctrl-C while the tokenizer decodes, at each of its calls in turn."""
    ids = byte_ids(text.encode())
    for fatal in range(1, 3 * len(ids)):
        detokenizer = IncrementalDetokenizer(Watched(fatal))  # type: ignore[arg-type]
        for number, token_id in enumerate(ids, start=1):
            detokenizer.push(token_id)
            if number % every == 0:
                with suppress(KeyboardInterrupt):
                    detokenizer.tail()
        with suppress(KeyboardInterrupt):
            detokenizer.tail()
        assert (detokenizer.text, detokenizer.tail()) == (text, "")
