"""An engine that sees says what transformers says, in every way of asking."""

from typing import Any

import pytest

from m6_multimodal_pd import SamplingParams
from m6_multimodal_pd.multimodal.prompt import ChatPrompt
from tests.equivalence.harness import check_answer, check_cuts
from tests.m6_multimodal_pd.engines import MakeEngine, Recorder, counts, finish, setting
from tests.m6_multimodal_pd.seeing import MOST_TOKENS, Theirs, asking

PARAMS = SamplingParams(max_tokens=MOST_TOKENS, ignore_eos=True)
QUESTIONS: dict[str, tuple[str | int, ...]] = {
    "a text": (1,),
    "an image": ("a", 1),
    "an image behind the text": (2, "b"),
    "several images among texts": ("a", 1, "b", "c", 2),
    "the same image twice": ("a", "a", 3),
    "an image of one token": ("d",),
    "a clip": ("v", 1),
    "a clip between images": ("b", "v", "d", 4),
    "two clips": (1, "w", "v"),
}


def test_text_behind_an_image_is_where_the_image_has_put_it(engine: Any, their_model: Theirs) -> None:
    """An image of 5 x 4 tokens takes 5 positions, so all tokens behind it sit 15 positions before their places. That
    holds for tokens that are decoded, and for the same tokens behind the image in a prompt."""
    recorder = Recorder(engine.tracer)
    prompt = engine.chat_prompt(asking("c", 1))
    said = engine.generate(prompt, SamplingParams(max_tokens=5, ignore_eos=True, logprobs=0)).outputs[0]
    whole = ChatPrompt([*prompt, *said.token_ids], prompt.multimodal_inputs)
    read = engine.generate(whole, SamplingParams(max_tokens=1, prompt_logprobs=0)).prompt_logprobs[len(prompt) :]
    assert [event.delta for event in recorder.events("positions_assigned")] == [-15, -15]
    expected = their_model.logits(whole).log_softmax(-1)[len(prompt) - 1 : -1]
    for token_id, decoded, prefilled, row in zip(said.token_ids, said.logprobs, read, expected, strict=True):
        assert decoded[token_id].logprob == pytest.approx(row[token_id].item(), abs=1e-4)
        assert prefilled[token_id].logprob == pytest.approx(row[token_id].item(), abs=1e-4)


def test_all_ways_of_asking_give_the_same_answer(engine: Any, their_model: Theirs) -> None:
    messages = asking("a", 1, "v")
    wanted = their_model.answer(engine.chat_prompt(messages)).token_ids
    assert engine.chat(messages, PARAMS).token_ids == wanted
    assert engine.generate(messages, PARAMS).token_ids == wanted
    assert next(iter(engine.generate_batch([messages, "text"], PARAMS).values())).token_ids == wanted
    assert [output.token_ids for output in engine.stream(messages, PARAMS)][-1] == wanted
    rid = engine.add_request(engine.chat_prompt(messages), PARAMS)
    assert finish(engine)[rid].token_ids == wanted


def test_pictures_clips_and_texts_run_in_one_batch(engine: Any, their_model: Theirs) -> None:
    prompts = [engine.chat_prompt(asking(*question)) for question in QUESTIONS.values()]
    references = [their_model.answer(prompt) for prompt in prompts]
    outputs = engine.generate_batch(prompts, PARAMS)
    for reference, output, name in zip(references, outputs.values(), QUESTIONS, strict=True):
        check_answer(reference, output.token_ids, name)
    check_cuts(references)
    runs, items, _ = counts(engine)
    assert items == 6 and runs < items, "several requests' pictures are encoded together"


CLIPS_FIRST = """\
{%- for part in messages[0].content if part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>{% endfor %}
{%- for part in messages[0].content if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% endfor %}
{%- for part in messages[0].content if part.type == 'text' %}{{ part.text }}{% endfor %}"""


def test_a_template_may_write_clips_before_images(make_engine: MakeEngine, their_model: Theirs) -> None:
    engine: Any = make_engine(**setting(), chat_template=CLIPS_FIRST)
    prompt = engine.chat_prompt(asking("a", 1, "v", "b"))
    alone = [engine.chat_prompt(asking(name)).multimodal_inputs.mm_items[0].hash for name in "vab"]
    assert [item.hash for item in prompt.multimodal_inputs.mm_items] == alone
    check_answer(their_model.answer(prompt), engine.generate(prompt, PARAMS).token_ids, "clips first")


def test_prompt_and_output_hold_tokens_of_the_vocabulary_only(engine: Any) -> None:
    prompt = engine.chat_prompt(asking("a", 1))
    output = engine.generate(prompt, PARAMS)
    assert output.prompt_token_ids == tuple(prompt) and max(prompt) < 4096
