"""The comparison itself: it must be strict where the reference is clear, and lenient nowhere else."""

from pathlib import Path

import pytest

from tests.equivalence.harness import NEAR_TIE, VARIANTS, WAYS, Comparison, Reference, compare

ROOT = Path(__file__).parents[2]


def reference(*token_ids: int, close_at: int | None = None) -> Reference:
    """An answer with clear gaps, but for one position."""
    gaps = [1.0] * len(token_ids)
    if close_at is not None:
        gaps[close_at] = NEAR_TIE / 2
    return Reference((1, 2), token_ids, tuple(gaps))


CLEAR = [reference(n, n + 1, n + 2) for n in range(49)]
CLEAR_ANSWERS = [(n, n + 1, n + 2) for n in range(49)]


def test_equal_answers_pass() -> None:
    assert compare(CLEAR, CLEAR_ANSWERS) == Comparison(num_prompts=49, num_cut=0)


@pytest.mark.parametrize(
    ("answer", "at"),
    [((9, 6, 7), 0), ((5, 6, 9), 2), ((5, 6), 2), ((5, 6, 7, 8), 3), ((), 0)],
    ids=["first token", "last token", "too short", "too long", "empty"],
)
def test_a_wrong_answer_fails_and_says_where(answer: tuple[int, ...], at: int) -> None:
    answers = [*CLEAR_ANSWERS[:5], answer, *CLEAR_ANSWERS[6:]]
    with pytest.raises(AssertionError, match=f"prompt 5 differs at output {at}"):
        compare(CLEAR, answers)


def test_answers_may_part_at_a_near_tie_and_anything_may_follow() -> None:
    close = reference(7, 8, 9, 10, close_at=2)
    for answer in [(7, 8, 9, 10), (7, 8, 1, 2), (7, 8, 1), (7, 8)]:
        assert compare([*CLEAR, close], [*CLEAR_ANSWERS, answer]) == Comparison(num_prompts=50, num_cut=1)


def test_before_the_near_tie_nothing_is_forgiven() -> None:
    close = reference(7, 8, 9, 10, close_at=2)
    for answer in [(7, 1, 9, 10), (7,), ()]:
        with pytest.raises(AssertionError, match="prompt 49 differs"):
            compare([*CLEAR, close], [*CLEAR_ANSWERS, answer])


def test_a_gap_at_the_limit_is_clear() -> None:
    at_limit = Reference((1,), (4, 5), (NEAR_TIE, NEAR_TIE))
    with pytest.raises(AssertionError, match="differs at output 0"):
        compare([at_limit], [(9, 5)])


def test_more_than_two_percent_of_cuts_fail() -> None:
    close = reference(7, 8, 9, close_at=1)
    assert compare([*CLEAR, close], [*CLEAR_ANSWERS, (7, 8, 9)]).num_cut == 1  # 1 of 50 is 2 %
    with pytest.raises(AssertionError, match="2 of 50 prompts were cut"):
        compare([*CLEAR[:48], close, close], [*CLEAR_ANSWERS[:48], (7, 8, 9), (7, 8, 9)])


def test_a_missing_answer_fails() -> None:
    with pytest.raises(ValueError):
        compare(CLEAR, CLEAR_ANSWERS[:-1])


def test_every_milestone_with_an_engine_is_held_to_the_comparison() -> None:
    """m7 has m6's engine, and so has each rank of m8: their own tests compare them to it."""
    on_disk = {path.parent.name for path in ROOT.glob("m[1-6]_*/llm_engine.py")}
    assert on_disk == {variant.milestone for variant in VARIANTS}


def test_with_several_kernels_every_variant_says_which_and_all_are_asked() -> None:
    paged = [variant for variant in VARIANTS if variant.milestone >= "m3"]
    assert {(variant.milestone, variant.backend) for variant in paged} == {
        (variant.milestone, backend) for variant in paged for backend in ("torch", "native")
    }


def test_every_milestone_is_asked_in_every_way_and_in_one_of_them_all_prompts() -> None:
    assert len({str(variant) for variant in VARIANTS}) == len(VARIANTS)
    for milestone in {variant.milestone for variant in VARIANTS}:
        shares = [share for v in VARIANTS if v.milestone == milestone for share in v.ways.items()]
        assert {way for way, _ in shares} == WAYS.keys()
        assert min(share for _, share in shares) == 1
