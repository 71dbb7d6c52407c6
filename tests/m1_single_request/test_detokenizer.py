"""The text of tokens, whenever it is asked for: it is what the tokenizer makes of all ids, and no half character."""

from contextlib import suppress
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given, settings, strategies as st
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from m1_single_request.detokenizer import IncrementalDetokenizer
from tests.m1_single_request.helpers import byte_tokens, decode_all, real_tokenizer, sentencepiece_tokenizer
from tests.support.amounts import examples

BROKEN = "\ufffd"
HARD_TEXTS = [
    "", " ", "  two  spaces ", "plain words", "line\nbreak\r\n\ttab", "\0", "a\0b",
    "🙂", "👨‍👩‍👧‍👦 family", "👍🏽🇩🇪", "日本語のテキスト", "中文 English 混合", "한국어",
    "e\u0301 combining, \u00e9 composed", "Z\u0351\u036b\u0343a", "مرحبا", "नमस्ते",
    BROKEN, f"a{BROKEN}b", f"{BROKEN}{BROKEN}🙂{BROKEN}", f"end {BROKEN}",
    "\ufeffbom", "\u200b\u200d", "\U0010ffff\ue000", "<|im_end|>", "a<|im_start|>user\n🙂<|im_end|>",
]  # fmt: skip

texts = st.one_of(
    st.text(),
    st.text(alphabet="🙂👨‍👩‍👧é\u0301日本語 \0\ufffda\n", max_size=20),
    st.lists(st.sampled_from(HARD_TEXTS), max_size=4).map("".join),
)


def tokenizer_ids(tokenizer: PreTrainedTokenizerBase) -> st.SearchStrategy[list[int]]:
    """Any ids of the vocabulary; special ones are drawn more often than their share."""
    anything = st.integers(0, len(tokenizer) - 1)
    return st.lists(st.one_of(anything, st.sampled_from(tokenizer.all_special_ids)), max_size=30)


def check(tokenizer: Any, ids: list[int], skip_special_tokens: bool) -> None:
    """Push all ids, asked at every token, and asked at the end only: every property that must hold."""
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    unasked = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    text = ""
    for token_id in ids:
        detokenizer.push(token_id)
        unasked.push(token_id)
        assert detokenizer.text.startswith(text), "text is never taken back"
        text = detokenizer.text
        assert not text.endswith(BROKEN), "text never ends in half a character"
    assert text + detokenizer.tail() == decode_all(tokenizer, ids, skip_special_tokens=skip_special_tokens)
    assert detokenizer.text == text, "asking for the tail changes nothing"
    assert (unasked.tail(), unasked.text) == (detokenizer.tail(), text), "asking in between changes nothing"


def byte_ids(data: bytes) -> list[int]:
    """The bytes as tokens of one byte each."""
    return [byte_tokens()[byte] for byte in data]


# --- the shipped tokenizer: byte-level BPE ----------------------------------------------------------------------------


@pytest.mark.parametrize("text", HARD_TEXTS, ids=ascii)
@pytest.mark.parametrize("skip_special_tokens", [False, True])
def test_hard_texts_come_out_whole(text: str, skip_special_tokens: bool) -> None:
    ids = real_tokenizer().encode(text, add_special_tokens=False)
    check(real_tokenizer(), ids, skip_special_tokens)
    check(real_tokenizer(), byte_ids(text.encode()), skip_special_tokens)


@settings(max_examples=examples(200))
@given(text=texts, skip_special_tokens=st.booleans())
def test_any_text_comes_out_whole(text: str, skip_special_tokens: bool) -> None:
    check(real_tokenizer(), real_tokenizer().encode(text, add_special_tokens=False), skip_special_tokens)


@settings(max_examples=examples(300))
@given(data=st.data(), skip_special_tokens=st.booleans())
def test_any_tokens_come_out_as_the_tokenizer_says(data: st.DataObject, skip_special_tokens: bool) -> None:
    check(real_tokenizer(), data.draw(tokenizer_ids(real_tokenizer())), skip_special_tokens)


@settings(max_examples=examples(300))
@given(
    data=st.lists(
        st.sampled_from([*b"a ", *"é🙂日".encode(), 0x80, 0xC3, 0xE2, 0xF0, 0xFF, 0xEF, 0xBF, 0xBD]), max_size=24
    ).map(bytes)
)
def test_any_bytes_come_out_as_they_would_together(data: bytes) -> None:
    check(real_tokenizer(), byte_ids(data), skip_special_tokens=True)


def test_every_token_alone_and_after_another_comes_out_as_the_tokenizer_says() -> None:
    tokenizer = real_tokenizer()
    for token_id in range(len(tokenizer)):
        for skip_special_tokens in (False, True):
            check(tokenizer, [token_id], skip_special_tokens)
        check(tokenizer, [5, token_id, token_id], skip_special_tokens=True)


@settings(max_examples=examples(300))
@given(text=texts)
def test_every_text_survives_encoding_and_decoding(text: str) -> None:
    ids = real_tokenizer().encode(text, add_special_tokens=False)
    assert decode_all(real_tokenizer(), ids, skip_special_tokens=False) == text


@settings(max_examples=examples(300))
@given(data=st.binary(max_size=64))
@example(data=bytes(range(256)))
def test_every_byte_string_survives_the_tokens_of_single_bytes(data: bytes) -> None:
    """Also bytes that are no text: each of the 256 has a token of its own, and the way back finds the same bytes."""
    ids = byte_ids(data)
    back = {token_id: byte for byte, token_id in byte_tokens().items()}
    assert len(back) == 256
    assert bytes(back[token_id] for token_id in ids) == data
    assert decode_all(real_tokenizer(), ids, skip_special_tokens=False) == data.decode("utf-8", errors="replace")


# --- characters that arrive in pieces ---------------------------------------------------------------------------------


def pushes(ids: list[int], tokenizer: Any = None, **settings: Any) -> list[str]:
    """What each token adds to the text."""
    detokenizer = IncrementalDetokenizer(tokenizer or real_tokenizer(), **settings)
    added = []
    for token_id in ids:
        before = len(detokenizer.text)
        detokenizer.push(token_id)
        added.append(detokenizer.text[before:])
    return added


def test_a_character_appears_with_its_last_byte() -> None:
    assert pushes(byte_ids("aé🙂b".encode())) == ["a", "", "é", "", "", "", "🙂", "b"]


def test_half_a_character_at_the_end_is_the_tail() -> None:
    detokenizer = IncrementalDetokenizer(real_tokenizer())
    for token_id in byte_ids("a🙂".encode()[:-1]):
        detokenizer.push(token_id)
    assert (detokenizer.text, detokenizer.tail()) == ("a", BROKEN)


def test_bytes_that_can_become_no_character_appear_as_soon_as_that_is_clear() -> None:
    broken = b"a\xff\xffb"
    assert pushes(byte_ids(broken)) == ["a", "", "", f"{BROKEN}{BROKEN}b"]


def test_a_real_replacement_character_waits_for_the_next_token_and_is_not_lost() -> None:
    assert pushes(byte_ids(f"a{BROKEN}b".encode())) == ["a", "", "", "", f"{BROKEN}b"]


def test_special_tokens_are_text_only_if_asked_for() -> None:
    (end,) = real_tokenizer().encode("<|im_end|>")
    (a,) = real_tokenizer().encode("a")
    assert pushes([a, end, a]) == ["a", "", "a"]
    assert pushes([a, end, a], skip_special_tokens=False) == ["a", "<|im_end|>", "a"]


def test_a_skipped_special_token_inside_a_character_does_not_break_it() -> None:
    """The tokenizer joins the bytes around it, and so do we."""
    (end,) = real_tokenizer().encode("<|im_end|>")
    first, second = byte_ids("é".encode())
    assert pushes([first, end, second]) == ["", "", "é"]
    assert pushes([first, end, second], skip_special_tokens=False)[:2] == ["", f"{BROKEN}<|im_end|>"]


def test_one_token_alone_is_named_with_its_text() -> None:
    detokenizer = IncrementalDetokenizer(real_tokenizer())
    (end,) = real_tokenizer().encode("<|im_end|>")
    assert detokenizer.token_text(end) == "<|im_end|>", "also where special tokens are left out of the text"
    assert detokenizer.token_text(byte_ids(b"\xc3")[0]) == BROKEN
    assert detokenizer.token_text(byte_ids(b"a")[0]) == "a"
    assert detokenizer.text == ""


# --- mark and rewind --------------------------------------------------------------------------------------------------


@settings(max_examples=examples(300))
@given(data=st.data(), skip_special_tokens=st.booleans())
def test_rewinding_restores_everything(data: st.DataObject, skip_special_tokens: bool) -> None:
    """What follows a rewind is as if the forgotten tokens had never been there."""
    ids = st.lists(
        st.one_of(st.sampled_from(byte_ids("aé🙂".encode())), st.integers(0, len(real_tokenizer()) - 1)), max_size=8
    )
    kept, forgotten, after = data.draw(ids), data.draw(ids), data.draw(ids)
    detokenizer = IncrementalDetokenizer(real_tokenizer(), skip_special_tokens=skip_special_tokens)
    straight = IncrementalDetokenizer(real_tokenizer(), skip_special_tokens=skip_special_tokens)
    for token_id in kept:
        detokenizer.push(token_id)
        straight.push(token_id)
    mark = detokenizer.mark()
    for _ in range(2):  # one mark serves more than once
        for token_id in forgotten:
            detokenizer.push(token_id)
            assert detokenizer.text.startswith(straight.text)
        detokenizer.rewind(mark)
        assert (detokenizer.text, detokenizer.tail()) == (straight.text, straight.tail())
    for token_id in after:
        detokenizer.push(token_id)
        straight.push(token_id)
        assert detokenizer.text == straight.text
    assert (detokenizer.text, detokenizer.tail()) == (straight.text, straight.tail())


def test_rewinding_gives_back_half_a_character() -> None:
    first, second = byte_ids("é".encode())
    detokenizer = IncrementalDetokenizer(real_tokenizer())
    detokenizer.push(first)
    mark = detokenizer.mark()
    detokenizer.push(second)
    assert detokenizer.text == "é"
    detokenizer.rewind(mark)
    assert (detokenizer.text, detokenizer.tail()) == ("", BROKEN)
    detokenizer.push(second)
    assert detokenizer.text == "é"


def test_a_mark_among_tokens_that_nobody_has_read_yet_holds_after_they_were_read() -> None:
    a, first, second, b = byte_ids("aéb".encode())
    detokenizer = IncrementalDetokenizer(real_tokenizer())
    for token_id in (a, first):
        detokenizer.push(token_id)
    mark = detokenizer.mark()
    for token_id in (second, b):
        detokenizer.push(token_id)
    assert detokenizer.text == "aéb"
    detokenizer.rewind(mark)
    detokenizer.push(b)
    assert (detokenizer.text, detokenizer.tail()) == (f"a{BROKEN}b", "")


def test_tokens_that_nobody_has_read_can_be_forgotten_unread() -> None:
    detokenizer = IncrementalDetokenizer(real_tokenizer())
    mark = detokenizer.mark()
    for token_id in byte_ids(b"abc"):
        detokenizer.push(token_id)
    detokenizer.rewind(mark)
    assert (detokenizer.text, detokenizer.tail()) == ("", "")


# --- asked at any moment ----------------------------------------------------------------------------------------------


class Push(NamedTuple):
    token_id: int


class Rewind(NamedTuple):
    to: int
    """Which of the marks, counted round."""


def moments(ids: st.SearchStrategy[int]) -> st.SearchStrategy[list[Any]]:
    """Any order of pushing, asking, marking and rewinding."""
    push = ids.map(Push)
    rewind = st.integers(0, 5).map(Rewind)
    return st.lists(st.one_of(push, push, push, st.sampled_from(["text", "tail", "mark"]), rewind), max_size=30)


def check_moments(tokenizer: Any, steps: list[Any], skip_special_tokens: bool) -> None:
    """Whenever it is asked, and whatever was asked before: what the tokenizer makes of all ids that are there."""

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
def test_the_text_is_the_tokenizers_at_whatever_moments_it_is_asked(
    data: st.DataObject, skip_special_tokens: bool
) -> None:
    tokenizer = real_tokenizer()
    pieces = st.sampled_from(byte_ids(bytes(PIECES_OF_CHARACTERS)) + tokenizer.all_special_ids)
    ids = st.one_of(pieces, pieces, st.integers(0, len(tokenizer) - 1))
    check_moments(tokenizer, data.draw(moments(ids)), skip_special_tokens)


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


def test_a_token_is_decoded_only_when_somebody_asks_and_many_in_one_go() -> None:
    tokenizer, text = Watched(), "A café and a 🐈. " * 20
    ids = real_tokenizer().encode(text)
    detokenizer = IncrementalDetokenizer(tokenizer)  # type: ignore[arg-type]
    for token_id in ids:
        detokenizer.push(token_id)
        detokenizer.mark()
    assert tokenizer.decoded == []
    assert detokenizer.text + detokenizer.tail() == text
    assert tokenizer.decoded == [len(ids)] * 2, "the text, and the context of what may follow"
    assert detokenizer.text + detokenizer.tail() and len(tokenizer.decoded) == 2, "asking again reads nothing"
    for token_id in ids[:9]:
        detokenizer.push(token_id)
        detokenizer.tail()
    assert max(tokenizer.decoded[-4:]) < 9, "what follows is read with a short context again"


class Shouts(PreTrainedTokenizerFast):  # type: ignore[misc]
    """Somebody's own, who changed how tokens become text."""

    def decode(self, *args: Any, **settings: Any) -> str:
        return str(super().decode(*args, **settings)).upper()


class ShoutsWithin(PreTrainedTokenizerFast):  # type: ignore[misc]
    """The same, one step further down."""

    def _decode(self, *args: Any, **settings: Any) -> str:
        return str(super()._decode(*args, **settings)).upper()


@pytest.mark.parametrize("kind", [Shouts, ShoutsWithin, PreTrainedTokenizerFast])
def test_a_tokenizer_that_decodes_in_its_own_way_is_asked(kind: type[PreTrainedTokenizerFast]) -> None:
    tokenizer = kind(tokenizer_object=real_tokenizer().backend_tokenizer)
    ids = real_tokenizer().encode("a café")
    expected = "a café" if kind is PreTrainedTokenizerFast else "A CAFÉ"
    assert "".join(pushes(ids, tokenizer)) == expected
    if kind is PreTrainedTokenizerFast:
        tokenizer.decode = lambda *args, **settings: "?"  # not of the class, but of this one
        assert "".join(pushes(ids[:1], tokenizer)) == "?"


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


# --- tokenizers that treat the first token of a text differently ------------------------------------------------------

LLAMA_STYLES = [False, True]  # with the Metaspace decoder
KNOWN = ["Hello", " world", " the", "ing", " ", "a", "é", "日本", "🙂", "\n", BROKEN, "<s>", "</s>"]


def llama(style: bool) -> PreTrainedTokenizerBase:
    return sentencepiece_tokenizer(style)


def llama_ids(style: bool, tokens: list[str]) -> list[int]:
    """The ids of tokens by name."""
    vocabulary = llama(style).get_vocab()
    return [vocabulary[token] for token in tokens]


def fallback(text: str) -> list[str]:
    """The names of the tokens that are the bytes of `text`."""
    return [f"<0x{byte:02X}>" for byte in text.encode()]


@pytest.mark.parametrize("style", LLAMA_STYLES)
@pytest.mark.parametrize(
    "text",
    ["Hello world", " Hello", "the 日本語 the", "  two  spaces", "🙂 é🙂", "hello\nworld", BROKEN, f"a {BROKEN}🙂"],
)
def test_a_tokenizer_with_leading_spaces_and_byte_fallback_comes_out_whole(text: str, style: bool) -> None:
    for skip_special_tokens in (False, True):
        check(llama(style), llama(style).encode(text, add_special_tokens=False), skip_special_tokens)


@pytest.mark.parametrize("style", LLAMA_STYLES)
@settings(max_examples=examples(150))
@given(
    parts=st.lists(st.one_of(st.sampled_from(KNOWN), st.text(max_size=3)), max_size=8),
    skip_special_tokens=st.booleans(),
)
def test_any_text_comes_out_whole_with_byte_fallback(parts: list[str], skip_special_tokens: bool, style: bool) -> None:
    check(llama(style), llama(style).encode("".join(parts), add_special_tokens=False), skip_special_tokens)


@pytest.mark.parametrize("style", LLAMA_STYLES)
@settings(max_examples=examples(300))
@given(data=st.data(), skip_special_tokens=st.booleans())
def test_any_tokens_come_out_as_a_tokenizer_with_leading_spaces_says(
    data: st.DataObject, skip_special_tokens: bool, style: bool
) -> None:
    """Any tokens but broken runs of bytes: there such a tokenizer changes its mind about characters that are out."""
    words = [i for token, i in llama(style).get_vocab().items() if not token.startswith("<0x")]
    ids = st.lists(st.sampled_from(words + 4 * llama(style).all_special_ids), max_size=12)
    check(llama(style), data.draw(ids), skip_special_tokens)


@pytest.mark.parametrize("style", LLAMA_STYLES)
def test_the_space_after_a_skipped_special_token_is_not_lost(style: bool) -> None:
    """Asked alone, the tokenizer takes ` world` for the beginning of a text and strips its space."""
    ids = llama_ids(style, ["▁Hello", "</s>", "▁world", "</s>", "</s>", "▁the"])
    assert pushes(ids, llama(style)) == ["Hello", "", " world", "", "", " the"]


@pytest.mark.parametrize("style", LLAMA_STYLES)
def test_a_character_of_fallback_bytes_appears_with_its_last_byte(style: bool) -> None:
    ids = llama_ids(style, ["▁Hello", *fallback("日é"), "▁the"])
    assert pushes(ids, llama(style)) == ["Hello", "", "", "日", "", "é", " the"]


@pytest.mark.parametrize("style", LLAMA_STYLES)
@given(data=st.data())
def test_broken_fallback_bytes_never_take_text_back_and_never_end_in_half_a_character(
    data: st.DataObject, style: bool
) -> None:
    pieces = llama_ids(style, ["▁the", "▁", "a", *fallback("é日🙂"), "<0xFF>"])
    ids = data.draw(st.lists(st.sampled_from(pieces), max_size=12))
    detokenizer, unasked, text = IncrementalDetokenizer(llama(style)), IncrementalDetokenizer(llama(style)), ""
    for token_id in ids:
        detokenizer.push(token_id)
        unasked.push(token_id)
        assert detokenizer.text.startswith(text) and not detokenizer.text.endswith(BROKEN)
        text = detokenizer.text
    assert (unasked.text, unasked.tail()) == (text, detokenizer.tail()), "asking in between changes nothing"


@pytest.mark.parametrize("style", LLAMA_STYLES)
@settings(max_examples=examples(300))
@given(data=st.data(), skip_special_tokens=st.booleans())
def test_the_text_with_leading_spaces_is_the_tokenizers_at_whatever_moments_it_is_asked(
    data: st.DataObject, skip_special_tokens: bool, style: bool
) -> None:
    words = [i for token, i in llama(style).get_vocab().items() if not token.startswith("<0x")]
    ids = st.sampled_from(words + 4 * llama(style).all_special_ids)
    check_moments(llama(style), data.draw(moments(ids)), skip_special_tokens)


@pytest.mark.parametrize("style", LLAMA_STYLES)
@given(data=st.data(), parts=st.lists(st.sampled_from(KNOWN), max_size=8))
def test_characters_of_fallback_bytes_are_out_at_the_end_at_whatever_moments_they_are_asked(
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
