"""Text token by token: the pieces joined are what the tokenizer makes of all ids, and no half character is shown."""

from typing import Any

import pytest
from hypothesis import example, given, settings, strategies as st
from transformers import PreTrainedTokenizerBase

from m1_single_request.detokenizer import IncrementalDetokenizer
from tests.m1_single_request.helpers import byte_tokens, decode_all, real_tokenizer, sentencepiece_tokenizer

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
    """Push all ids: every property that must hold at every token and at the end."""
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    joined = ""
    for token_id in ids:
        before = detokenizer.text
        new = detokenizer.push(token_id)
        joined += new
        assert detokenizer.text == before + new == joined, "text grows by what was returned and is never taken back"
        assert not joined.endswith(BROKEN), "text never ends in half a character"
    assert joined + detokenizer.tail() == decode_all(tokenizer, ids, skip_special_tokens=skip_special_tokens)
    assert detokenizer.text == joined, "asking for the tail changes nothing"


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


@settings(max_examples=200)
@given(text=texts, skip_special_tokens=st.booleans())
def test_any_text_comes_out_whole(text: str, skip_special_tokens: bool) -> None:
    check(real_tokenizer(), real_tokenizer().encode(text, add_special_tokens=False), skip_special_tokens)


@settings(max_examples=300)
@given(data=st.data(), skip_special_tokens=st.booleans())
def test_any_tokens_come_out_as_the_tokenizer_says(data: st.DataObject, skip_special_tokens: bool) -> None:
    check(real_tokenizer(), data.draw(tokenizer_ids(real_tokenizer())), skip_special_tokens)


@settings(max_examples=300)
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


@settings(max_examples=300)
@given(text=texts)
def test_every_text_survives_encoding_and_decoding(text: str) -> None:
    ids = real_tokenizer().encode(text, add_special_tokens=False)
    assert decode_all(real_tokenizer(), ids, skip_special_tokens=False) == text


@settings(max_examples=300)
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
    detokenizer = IncrementalDetokenizer(tokenizer or real_tokenizer(), **settings)
    return [detokenizer.push(token_id) for token_id in ids]


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


@settings(max_examples=300)
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
        assert detokenizer.push(token_id) == straight.push(token_id)
    mark = detokenizer.mark()
    for _ in range(2):  # one mark serves more than once
        for token_id in forgotten:
            detokenizer.push(token_id)
        detokenizer.rewind(mark)
        assert (detokenizer.text, detokenizer.tail()) == (straight.text, straight.tail())
    for token_id in after:
        assert detokenizer.push(token_id) == straight.push(token_id)
    assert (detokenizer.text, detokenizer.tail()) == (straight.text, straight.tail())


def test_rewinding_gives_back_half_a_character() -> None:
    first, second = byte_ids("é".encode())
    detokenizer = IncrementalDetokenizer(real_tokenizer())
    detokenizer.push(first)
    mark = detokenizer.mark()
    assert detokenizer.push(second) == "é"
    detokenizer.rewind(mark)
    assert (detokenizer.text, detokenizer.tail()) == ("", BROKEN)
    assert detokenizer.push(second) == "é"


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
@settings(max_examples=150)
@given(
    parts=st.lists(st.one_of(st.sampled_from(KNOWN), st.text(max_size=3)), max_size=8),
    skip_special_tokens=st.booleans(),
)
def test_any_text_comes_out_whole_with_byte_fallback(parts: list[str], skip_special_tokens: bool, style: bool) -> None:
    check(llama(style), llama(style).encode("".join(parts), add_special_tokens=False), skip_special_tokens)


@pytest.mark.parametrize("style", LLAMA_STYLES)
@settings(max_examples=300)
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
    detokenizer, joined = IncrementalDetokenizer(llama(style)), ""
    for token_id in data.draw(st.lists(st.sampled_from(pieces), max_size=12)):
        joined += detokenizer.push(token_id)
        assert detokenizer.text == joined and not joined.endswith(BROKEN)
