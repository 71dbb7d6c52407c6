"""What the checkpoint is trained on: enough questions, honest hold-outs, text that tokenises as the template says."""

import re
from random import Random

import pytest

from training import skills
from training.explain import questions
from training.recipe import Recipe, encode
from training.tokenizer import SPECIAL_TOKENS, VOCAB_SIZE, train_tokenizer
from training.words import all_words


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer()


def plain_words(text: str) -> str:
    return re.sub(r"[^a-z0-9 ]", "", text.lower()).strip()


def test_there_are_at_least_120_questions_with_three_wordings_and_one_answer_each():
    assert len(questions()) >= 120
    assert all(len(set(q.asked)) >= 3 for q in questions())
    assert len({q.id for q in questions()}) == len({q.answer for q in questions()}) == len(questions())


def test_no_held_out_wording_is_ever_trained_on():
    trained = {plain_words(wording) for q in questions() for wording in q.asked}
    assert not [q.held_out for q in questions() if plain_words(q.held_out) in trained]


def test_no_wording_belongs_to_two_questions():
    owners: dict[str, set[str]] = {}
    for question in questions():
        for wording in (*question.asked, question.held_out):
            owners.setdefault(plain_words(wording), set()).add(question.id)
    assert not {wording: ids for wording, ids in owners.items() if len(ids) > 1}


def test_answers_are_one_line_of_ascii():
    assert all(q.answer.isascii() and "\n" not in q.answer for q in questions())


@pytest.mark.exhaustive
def test_common_words_digits_and_keys_are_one_token_each(tokenizer):
    for word in all_words():
        assert len(tokenizer.encode(word)) == len(tokenizer.encode(f" {word}")) == 1, word
    assert len(tokenizer.encode("4821")) == 4


def test_the_vocabulary_has_its_size_and_qwens_special_tokens_last(tokenizer):
    assert len(tokenizer) == VOCAB_SIZE
    ids = tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS))
    assert ids == list(range(VOCAB_SIZE - len(SPECIAL_TOKENS), VOCAB_SIZE))


def test_a_dialogue_is_rendered_as_the_chat_template_renders_it(tokenizer):
    turns = [("What is 1?", "One."), ("And 2?", "Two.")]
    messages = [{"role": "system", "content": "Be brief."}]
    for question, answer in turns:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    rendered = "".join(piece.text for piece in skills.chat(turns, system="Be brief."))
    assert rendered == tokenizer.apply_chat_template(messages, tokenize=False)


@pytest.mark.sample(1)
@pytest.mark.parametrize("progress", [0.0, 0.2, 0.4, 0.99])
def test_pieces_tokenise_like_the_whole_text(tokenizer, progress):
    """The model is trained on pieces and used on whole texts: the tokens must be the same."""
    recipe, rng = Recipe(tokenizer, steps=100), Random(f"pieces/{progress}")
    for make in (recipe._recall, recipe._repeat, recipe._explain):
        for _ in range(20):
            pieces = make(rng, max(0.1, progress))
            whole = tokenizer.encode("".join(piece.text for piece in pieces), add_special_tokens=False)
            assert [token for token, _ in encode(tokenizer, pieces)] == whole
