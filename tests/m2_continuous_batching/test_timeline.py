"""The timeline: lanes and columns of a trace at any width, and the facts of a run; the same from a file."""

from dataclasses import dataclass
from typing import Any

import pytest

from m1_single_request.events import Event
from m1_single_request.trace_readers import Records
from m1_single_request.tracer import TraceRecord
from m2_continuous_batching import TraceConfig
from m2_continuous_batching.demo_tour import facts
from m2_continuous_batching.events import Batch, LeftOut
from m2_continuous_batching.views.timeline import Timeline
from tests.m2_continuous_batching.engines import EXECUTIONS, MakeEngine, greedy, limits, unfinished
from tests.support.views import added, done, ended, fed, text_of

LETTERS = {"P": "prefill", "-": "decode", ".": "queued", "x": "left out"}


def drawn(timeline: Timeline, width: int = 100, **options: Any) -> list[str]:
    """The lines of a timeline on a console of this width, without the legend."""
    lines = text_of(timeline.draw(width, **options), width).splitlines()
    assert all(len(line) <= width for line in lines)
    return lines[: next(i for i, line in enumerate(lines) if line.startswith("x left out"))]


def batch(prefills: str = "", decodes: str = "") -> Batch:
    """A step of requests with names of one letter; prompts have 3 tokens, contexts 5."""
    rids, is_new = (*prefills, *decodes), (*[True] * len(prefills), *[False] * len(decodes))
    return Batch(
        mode="mixed",
        rids=rids,
        extend_lens=tuple(3 if new else 1 for new in is_new),
        prefix_lens=tuple(0 if new else 5 for new in is_new),
        seq_lens=tuple(3 if new else 6 for new in is_new),
        joined=tuple(prefills),
        left=(),
        total_tokens=3 * len(prefills) + len(decodes),
        budget=8,
    )


STEPS = (
    (added("a"), added("b"), batch("ab")),
    (added("c"), added("d"), LeftOut(rids=("b",), available=8), batch("c", "a")),
    (batch("", "bca"), ended("a")),
    (batch("d", "bc"), ended("d"), ended("b")),
    (batch("", "c"), ended("c")),
)


def test_every_request_has_a_lane_and_every_step_a_column() -> None:
    assert drawn(fed(Timeline(), *STEPS)) == [
        "step  1",
        "a     P--|",
        "b     Px--|",
        "c      P---|",
        "d      ..P|",
        "",
    ]


def test_a_full_line_goes_on_below_with_the_lanes_that_are_left() -> None:
    assert drawn(fed(Timeline(), *STEPS), width=10) == [
        "step  1",
        "a     P--|",
        "b     Px-",
        "c      P-",
        "d      ..",
        "",
        "step  4",
        "b     -|",
        "c     --|",
        "d     P|",
        "",
    ]


def test_a_live_view_shows_the_latest_steps_of_every_lane() -> None:
    assert drawn(fed(Timeline(), *STEPS), width=10, latest=True) == [
        "step  3",
        "a     -|",
        "b     --|",
        "c     ---|",
        "d     .P|",
        "",
    ]


def test_a_long_run_has_the_number_of_every_tenth_step_and_none_is_cut() -> None:
    timeline = fed(Timeline(), (added("a"), batch("a")), *[(batch("", "a"),)] * 120, (ended("a"),))
    lines = drawn(timeline, width=79)
    assert [line.split()[1:] for line in lines if line.startswith("step")] == [
        [str(step) for step in range(first, last, 10)] for first, last in ((1, 71), (71, 123))
    ]
    assert "".join(line[6:].rstrip() for line in lines if line.startswith("a")) == f"P{'-' * 120}|"


def test_every_letter_is_explained() -> None:
    legend = text_of(fed(Timeline(), *STEPS).draw(100)).splitlines()[-1]
    for letter, state in LETTERS.items():
        assert f"{letter} {state}" in legend
    assert "| done" in legend


def test_steps_that_interleave_have_the_lanes_of_steps_that_do_not() -> None:
    """The next step begins before the one before ends: with a request that has ended by then, for example."""
    timeline = Timeline()
    stream: list[tuple[int, Event]] = [
        (0, added("a")), (0, added("b")), (1, batch("ab")), (1, added("c")),
        (2, batch("c", "ab")), (1, done()), (1, added("d")),
        (3, LeftOut(rids=("c",), available=8)), (3, batch("d", "ab")), (2, ended("b")), (2, done()),
        (4, batch("", "acd")), (3, ended("a")), (3, done()), (4, ended("c")), (4, ended("d")), (4, done()),
    ]  # fmt: skip
    for step, event in stream:
        timeline.read(TraceRecord(step, 0.0, event))
    assert drawn(timeline) == ["step  1", "a     P--|", "b     P-|", "c      Px-|", "d       P-|", ""]


@dataclass(frozen=True)
class LaterBatch(Event):
    """A batch of m5: its lanes have other labels."""

    labels: tuple[tuple[str, str], ...]

    def lanes(self) -> tuple[tuple[str, str], ...]:
        return self.labels


def test_batches_of_later_milestones_are_drawn_alike() -> None:
    first, second = LaterBatch((("a", "prefill"),)), LaterBatch((("a", "verify 3"), ("b", "prefill")))
    timeline = fed(Timeline(), (added("a"), first), (added("b"), second), (LaterBatch((("a", "decode"),)), ended("a")))
    assert drawn(timeline) == ["step  1", "a     P--|", "b      P.", ""]


@pytest.mark.parametrize("width", [1, 7, 8, 20, 79])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    assert max(map(len, text_of(fed(Timeline(), *STEPS * 30).draw(width), width).splitlines())) <= width


# --- a real run -------------------------------------------------------------------------------------------------------


Story = tuple[Timeline, Records, dict[str, int], Any]


@pytest.fixture(params=EXECUTIONS)
def story(request: pytest.FixtureRequest, make_engine: MakeEngine) -> Story:
    """Three requests; then three late ones, of which one is as long as the budget; the tokens of each, and totals."""
    timeline, records, lengths = Timeline(), Records(), dict[str, int]()
    engine = make_engine(**limits(3, 24, request.param), trace_config=TraceConfig(readers=(timeline, records)))

    def add(prompt_len: int, max_tokens: int) -> None:
        lengths[engine.add_request(list(range(7, 7 + prompt_len)), greedy(max_tokens))] = max_tokens

    for prompt_len, max_tokens in ((9, 4), (3, 12), (5, 20)):
        add(prompt_len, max_tokens)
    for _ in range(2):
        engine.step()
    for prompt_len, max_tokens in ((24, 3), (4, 2), (6, 5)):
        add(prompt_len, max_tokens)
    for _ in unfinished(engine):
        engine.step()
    return timeline, records, lengths, engine.stats()


def test_a_lane_has_a_place_for_every_token_and_no_step_too_many(story: Story) -> None:
    timeline, _, lengths, _ = story
    for request_id, lane in timeline.lanes.items():
        assert lane.finished and lane.states.count("prefill") == 1
        assert lane.states.count("prefill") + lane.states.count("decode") == lengths[request_id]
    for step in range(len(timeline.steps)):
        states = [lane.states[max(0, step - lane.begin) : step - lane.begin + 1] for lane in timeline.lanes.values()]
        assert 1 <= sum(state in (["prefill"], ["decode"]) for state in states) <= 3
    assert timeline.lanes["req-1"].states.count("left out") == 1


def test_the_facts_have_the_numbers_of_the_run(story: Story) -> None:
    timeline, records, lengths, stats = story
    words = "\n".join(facts(timeline, records, stats))
    for part in (
        "Step 5: No token for req-1, req-2: the budget of 24 is used up.",
        "req-5 waits longest, 7 steps. Step 9: req-5 must wait: max_num_seqs = 3 requests run already.",
        "44.0 KiB of ",
        f"21 steps made {sum(lengths.values())} output tokens. One request after the other takes "
        f"{sum(lengths.values())} steps.",
    ):
        assert part in words, part


def test_the_facts_say_what_was_padding_and_what_was_reserved(make_engine: MakeEngine) -> None:
    words = {}
    for execution in EXECUTIONS:
        timeline, records = Timeline(), Records()
        engine = make_engine(**limits(2, None, execution), trace_config=TraceConfig(readers=(timeline, records)))
        engine.generate_batch([[5, 6, 7], [5, 6, 7, 8, 9]], [greedy(2), greedy(2)])
        words[execution] = "\n".join(facts(timeline, records, engine.stats()))
    assert "Step 1: Forward of all prefills: 2 x 5, 2 of 10 places are padding" in words["padded"]
    assert "Padding: 2 of 12 places in the tensors of all steps hold no token (17%)" in words["padded"]
    assert "Padding: 0 of 10 places" in words["per_request"] and "Forward" not in words["per_request"]
