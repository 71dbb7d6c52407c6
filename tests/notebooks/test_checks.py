"""The graders of m1: typical wrong answers fail with a hint that names the mistake. Right ones: `test_lessons.py`."""

import re
from collections import deque

import pytest
import torch

from benchmarks import RESULTS
from benchmarks.m1.trace import traced_steps
from m1_single_request.detokenizer import IncrementalDetokenizer
from m1_single_request.model_loader import head_dim
from m1_single_request.output_processor import OutputProcessor
from m1_single_request.scheduler import Scheduler
from m1_single_request.stop_checker import held_back
from notebooks.checks import check, listing
from tests.notebooks.exercises import M1, assert_refused, open_exercise

LESSON = M1.lesson


# --- wrong answers ----------------------------------------------------------------------------------------------------


def test_an_exercise_where_nothing_is_written_says_so():
    assert repr(check("m1.kv_bytes", open_exercise)) == "m1.kv_bytes: not yet. Nothing is written here yet."


def test_an_answer_that_raises_is_told_what_was_raised():
    assert "raised IndexError: string index out of range" in check("m1.held_back", lambda text, stops: ""[1]).message


def test_an_unknown_exercise_is_refused_with_the_names_of_those_there_are():
    with pytest.raises(KeyError, match=r"m1\.nothing.*m1\.kv_bytes"):
        check("m1.nothing", None)


def layers_times(config, heads, dim):
    return 2 * config.num_hidden_layers * heads * dim


WRONG_KV_BYTES = {
    "two tensors": lambda c, n, b: c.num_hidden_layers * c.num_key_value_heads * head_dim(c) * n * b,
    "Every layer": lambda c, n, b: 2 * c.num_key_value_heads * head_dim(c) * n * b,
    "Only the KV heads": lambda c, n, b: layers_times(c, c.num_attention_heads, head_dim(c)) * n * b,
    "head_dim is not always": lambda c, n, b: (
        layers_times(c, c.num_key_value_heads, c.hidden_size // c.num_attention_heads) * n * b
    ),
    "Every token": lambda c, n, b: layers_times(c, c.num_key_value_heads, head_dim(c)) * b,
    "bytes_per_value": lambda c, n, b: layers_times(c, c.num_key_value_heads, head_dim(c)) * n,
    "you say None": lambda c, n, b: None,
}


@pytest.mark.parametrize("hint", WRONG_KV_BYTES)
def test_a_wrong_size_of_the_kv_is_met_with_the_factor_that_is_missing(hint):
    assert_refused("m1.kv_bytes", WRONG_KV_BYTES[hint], hint)


def test_two_mistakes_in_the_size_of_the_kv_are_both_named():
    assert_refused(
        "m1.kv_bytes",
        lambda c, n, b: layers_times(c, c.num_attention_heads, head_dim(c)) // 2 * n * b,
        "two tensors",
        "Only the KV heads",
    )


def drops_the_token_that_reaches_p(probs, p):
    ranked, order = probs.sort(descending=True)
    return torch.zeros_like(probs).scatter(0, order, ranked * (ranked.cumsum(0) <= p))


def keeps_one_too_many(probs, p):
    ranked, order = probs.sort(descending=True)
    better_but_one = ranked.cumsum(0) - ranked - ranked.roll(1)
    return torch.zeros_like(probs).scatter(0, order, ranked * (better_but_one < p))


def goes_on_where_p_is_reached_exactly(probs, p):
    ranked, order = probs.sort(descending=True)
    return torch.zeros_like(probs).scatter(0, order, ranked * (ranked.cumsum(0) - ranked <= p))


def leaves_the_answer_sorted(probs, p):
    ranked = probs.sort(descending=True).values
    return ranked * (ranked.cumsum(0) - ranked < p)


def keeps_all_above_p(probs, p):
    return probs * (probs >= p)


def makes_the_rest_equal(probs, p):
    ranked, order = probs.sort(descending=True)
    return torch.zeros_like(probs).scatter(0, order, (ranked.cumsum(0) - ranked < p).to(probs.dtype))


def zeroes_its_input(probs, p):
    ranked, order = probs.sort(descending=True)
    probs[order[ranked.cumsum(0) - ranked >= p]] = 0.0
    return probs


WRONG_TOP_P = [
    (drops_the_token_that_reaches_p, "Too few"),
    (keeps_one_too_many, "Too many"),
    (goes_on_where_p_is_reached_exactly, "exactly p is enough"),
    (leaves_the_answer_sorted, "order of token ids"),
    (keeps_all_above_p, "the best one always stays"),
    (makes_the_rest_equal, "ratios have changed"),
    (zeroes_its_input, "changes its input"),
    (lambda probs, p: probs.tolist(), "A tensor of 4 probabilities"),
]


@pytest.mark.parametrize(("answer", "hint"), WRONG_TOP_P)
def test_a_wrong_top_p_is_met_with_a_hint(answer, hint):
    assert_refused("m1.top_p_filter", answer, hint)


def finds_the_shortest_first(text, stops):
    sizes = range(1, len(text) + 1)
    return next((size for size in sizes if any(stop.startswith(text[-size:]) for stop in stops)), 0)


def asks_the_first_stop_only(text, stops):
    return finds_the_longest(text, stops[:1])


def finds_the_longest(text, stops):
    sizes = range(len(text), 0, -1)
    return next((size for size in sizes if any(stop.startswith(text[-size:]) for stop in stops)), 0)


def holds_as_much_as_a_stop_may_need(text, stops):
    return min(len(text), max((len(stop) - 1 for stop in stops), default=0))


WRONG_HELD_BACK = [
    (lambda text, stops: 0, "have to take it back"),
    (finds_the_shortest_first, "have to take it back"),
    (asks_the_first_stop_only, "have to take it back"),
    (holds_as_much_as_a_stop_may_need, "can no longer become a stop string"),
    (lambda text, stops: None, "you return None"),
]


@pytest.mark.parametrize(("answer", "hint"), WRONG_HELD_BACK)
def test_wrongly_held_text_is_met_with_what_would_happen(answer, hint):
    assert_refused("m1.held_back", answer, hint)


def queue_sorted_by(key):
    class Sorted(Scheduler):
        def add_request(self, request):
            super().add_request(request)
            self.waiting = deque(sorted(self.waiting, key=key))

    return Sorted


class SortsOnce(Scheduler):
    """Sorts what waits when the first request is admitted, and never again."""

    def schedule(self):
        if not self.running and not hasattr(self, "sorted"):
            self.sorted = True
            self.waiting = deque(sorted(self.waiting, key=lambda r: r.sequence.get_prompt_len()))
        return super().schedule()


class EqualOnesTurnRound(Scheduler):
    def add_request(self, request):
        super().add_request(request)
        self.waiting = deque(sorted(reversed(self.waiting), key=lambda r: r.sequence.get_prompt_len()))


class Loses(Scheduler):
    """Takes the request out of the queue by hand and forgets to put it back."""

    def add_request(self, request):
        super().add_request(request)
        if request.sequence.get_prompt_len() > 5:
            self.waiting.remove(request)


class ForgetsSuper(Scheduler):
    def add_request(self, request):
        self.waiting = deque(sorted([*self.waiting, request], key=lambda r: r.sequence.get_prompt_len()))


WRONG_POLICIES = [
    (Scheduler, "That is the order of arrival"),
    (queue_sorted_by(lambda r: -r.sequence.get_prompt_len()), "That is the longest first"),
    (EqualOnesTurnRound, "the earlier goes first"),
    (SortsOnce, "A request that arrives later takes part"),
    (ForgetsSuper, "did you call super().add_request(request)?"),
    (Loses, "check_invariants() fails after step 1"),
    (IncrementalDetokenizer, "has no add_request()"),
]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("answer", "hint"), WRONG_POLICIES)
def test_a_wrong_policy_is_met_with_what_it_does(answer, hint):
    assert_refused("m1.shortest_first", answer, hint)


# --- the labs ---------------------------------------------------------------------------------------------------------


def defined_in_the_notebook(name: str) -> object:
    return LESSON.defined(name, {"Scheduler": Scheduler, "OutputProcessor": OutputProcessor})


def test_the_planted_position_bug_is_caught_by_the_books():
    assert_refused(
        "m1.off_by_one",
        defined_in_the_notebook("OffByOne"),
        "check_invariants() fails after step 1: a decoding request has KV for all tokens but the newest",
    )


def test_a_count_of_computed_tokens_that_stands_still_is_caught():
    class StandsStill(Scheduler):
        def update_from_output(self, scheduler_output, sampled):
            changed = super().update_from_output(scheduler_output, sampled)
            for request in changed:
                request.sequence.num_computed_tokens = request.sequence.get_prompt_len()
            return changed

    assert_refused("m1.off_by_one", StandsStill, "check_invariants() fails after step 2")


def test_the_planted_detokenizer_bug_is_caught_at_the_first_half_character():
    assert_refused(
        "m1.detokenizer", defined_in_the_notebook("HastyDetokenizer"), "is shown, which is not how it goes on"
    )


def variant(**methods):
    """The folded detokenizer with some methods replaced."""
    return type("Variant", (LESSON.folded_solutions()["HastyDetokenizer"],), methods)


def hold_everything(self, token_id):
    self.ids.append(token_id)


def show_nothing_while_anything_is_broken(self, token_id):
    self.ids.append(token_id)
    text = self.decode(self.ids)
    self.text = "" if "\ufffd" in text else text


def keep_the_ids(self, mark):
    self.text = self.text[: mark[1]]


def wait_while_anything_is_broken(self, token_id):
    self.ids.append(token_id)
    text = self.decode(self.ids)
    if "\ufffd" not in text:
        self.text = text


def show_special_tokens(self, ids):
    return self.tokenizer.decode(ids)


def skip_special_tokens(self, ids):
    return self.tokenizer.decode(ids, skip_special_tokens=True)


WRONG_DETOKENIZERS = [
    ({"push": hold_everything}, "Nothing there needs to wait"),
    ({"push": show_nothing_while_anything_is_broken}, "was shown and then taken back"),
    ({"tail": lambda self: ""}, "tail() together"),
    ({"rewind": keep_the_ids}, "After mark(), a token and rewind()"),
    ({"push": wait_while_anything_is_broken}, "Only an end that is broken may wait"),
    ({"decode": show_special_tokens}, "skip_special_tokens=True"),
    ({"decode": skip_special_tokens}, "a special token, to be shown"),
]


@pytest.mark.parametrize(("methods", "hint"), WRONG_DETOKENIZERS)
def test_a_half_repaired_detokenizer_is_met_with_a_hint(methods, hint):
    assert_refused("m1.detokenizer", variant(**methods), hint)


def test_the_planted_output_processor_is_caught_when_it_takes_text_back():
    assert_refused("m1.output_processor", defined_in_the_notebook("HastyOutput"), "and then took it back")


def showing(visible_text):
    """An output processor with this `visible_text`, for a request that runs or ends without a stop string."""

    class Showing(OutputProcessor):
        def visible_text(self, request):
            if request.sequence.text_end is not None:
                return super().visible_text(request)
            return visible_text(request)

    return Showing


def longest_stop_less_one(request):
    text, stops = request.sequence.detokenizer.text, request.sampling_params.stop
    if request.is_finished:
        return text + request.sequence.detokenizer.tail()
    return text[: max(0, len(text) - max((len(stop) - 1 for stop in stops), default=0))]


def held_to_the_end(request):
    text = request.sequence.detokenizer.text
    return text[: len(text) - held_back(text, request.sampling_params.stop)]


def without_the_tail(request):
    text = request.sequence.detokenizer.text
    return text if request.is_finished else held_to_the_end(request)


def cut_by_minus_held(request):
    detokenizer = request.sequence.detokenizer
    if request.is_finished:
        return detokenizer.text + detokenizer.tail()
    return detokenizer.text[: -held_back(detokenizer.text, request.sampling_params.stop)]


def ignoring_text_end():
    return type("Ignoring", (OutputProcessor,), {"visible_text": lambda _, r: r.sequence.detokenizer.text})


WRONG_OUTPUT_PROCESSORS = [
    (showing(longest_stop_less_one), "held back too long"),
    (showing(held_to_the_end), "When a request has finished, nothing waits any more"),
    (showing(without_the_tail), "An end in half a character: at the end 'Look ' is shown"),
    (showing(cut_by_minus_held), "held back too long"),
    (showing(lambda request: None), "must return a text"),
    (ignoring_text_end(), "at the end 'Look! Observation:"),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("answer", "hint"), WRONG_OUTPUT_PROCESSORS)
def test_a_half_repaired_output_processor_is_met_with_a_hint(answer, hint):
    assert_refused("m1.output_processor", answer, hint)


# --- the notebook and the page ----------------------------------------------------------------------------------------


def test_a_listing_is_the_source_of_the_package_in_text_and_colours():
    shown = listing(Scheduler.schedule)
    assert repr(shown).startswith("m1_single_request/scheduler.py: Scheduler.schedule\ndef schedule(self)")
    assert "<span" in shown._repr_html_() and "monokai" not in shown._repr_html_()


def test_the_trace_on_the_page_is_what_the_engine_says_today():
    def words(text: str) -> str:  # without line breaks, and without probabilities: machines differ in the last digit
        return re.sub(r"The model's favourites for \S+: .*?%\. For", "For", " ".join(text.split()))

    stored = (RESULTS / "m1_single_request_trace.txt").read_text(encoding="utf-8")
    assert words(stored) == words(traced_steps())
