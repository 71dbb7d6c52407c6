"""Graders of the labs and exercises in m6's first notebook, and their engines. The rest comes from `checks.py`."""

import copy
import functools
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from random import Random
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from m1_single_request.tracer import Tracer
from m4_radix_cache.mem_cache.radix_key import decode
from m6_multimodal_pd import PARTS, CacheConfig, LLMEngine, SamplingParams
from m6_multimodal_pd.input_processor import InputProcessor
from m6_multimodal_pd.models.rotary import axes_of_pairs
from m6_multimodal_pd.multimodal.decode_video import FrameSampling, VideoOptions
from m6_multimodal_pd.multimodal.embedding_cache import EmbeddingCache
from m6_multimodal_pd.multimodal.encoder_budget import Cost, EncoderBudget
from m6_multimodal_pd.multimodal.inputs import (
    Modality,
    MultimodalDataItem,
    MultimodalInputs,
    PaddedKey,
    PadValues,
    Range,
    content_hash,
)
from m6_multimodal_pd.multimodal.mrope import Block, get_rope_index

try:  # in the checkout, for the tests
    from notebooks.checks import Mismatch, check, grader, short, show_source
    from notebooks.shapes import Shape, picture
except ModuleNotFoundError:  # beside the notebook
    from checks import Mismatch, check, grader, short, show_source  # type: ignore[no-redef]
    from shapes import Shape, picture  # type: ignore[no-redef]

__all__ = [
    "ONE_MODEL",
    "another_layout",
    "another_shape",
    "check",
    "intake_with",
    "new_engine",
    "show_source",
    "two_wide",
]

ONE_MODEL: dict[str, Any] = {"model_loader": functools.cache(PARTS["model_loader"])}
"""Loads each checkpoint once, however many engines are built."""
KV_TOKENS = 4 * 1024
"""Size of an engine's KV memory, in tokens."""


def new_engine(*, parts: Mapping[str, Any] | None = None, **configs: Any) -> LLMEngine:
    """Return an engine that shares its weights with all others made here; `configs` as of `LLMEngine`."""
    memory = {"cache_config": CacheConfig(max_total_tokens=KV_TOKENS)}
    return LLMEngine(parts=ONE_MODEL | dict(parts or {}), **(memory | configs))


def intake_with(
    *, positions: Callable[..., Any] = get_rope_index, content_hash: Callable[..., str] = content_hash
) -> dict[str, Any]:
    """Return the parts of an engine whose intake computes positions, or hashes, with another function."""

    class Intake(InputProcessor):
        def apply_chat_template(self, messages: Any, options: Any = None) -> list[int]:
            prompt: Any = super().apply_chat_template(messages, options)
            inputs: MultimodalInputs | None = getattr(prompt, "multimodal_inputs", None)
            if inputs is not None:
                blocks = [
                    Block(start, item.grid_thw[1] // 2, item.grid_thw[2] // 2)
                    for item in inputs.mm_items
                    for start, _ in item.offsets
                ]
                where, delta = positions(len(prompt), blocks)
                items = tuple(
                    replace(item, hash=content_hash(item.modality, item.feature, item.grid_thw, inputs.options_key))
                    for item in inputs.mm_items
                )
                prompt.multimodal_inputs = replace(
                    inputs, mm_items=items, mrope_positions=where, mrope_position_delta=delta
                )
            return prompt

    return {"input_processor": Intake}


def another_layout(axes: Callable[[Sequence[int], int], Sequence[int]]) -> dict[str, Any]:
    """Return the parts of an engine whose model assigns the pairs of a head to axes with another function."""

    def load(config: Any, kv_cache_dtype: Any) -> Any:
        loaded = ONE_MODEL["model_loader"](config, kv_cache_dtype)
        model = copy.copy(loaded.model)  # the weights stay shared
        model.mrope = copy.copy(model.mrope)
        model.mrope.axes = torch.tensor(axes(SECTION, PAIRS))
        return replace(loaded, model=model)

    return {"model_loader": load}


def another_shape(pixels: np.ndarray, side: int = 32) -> np.ndarray:
    """Return the same squares of `side` x `side` pixels in the same order, in a picture whose height is the width of
    `pixels`."""
    height, width = pixels.shape[:2]
    rows, columns = height // side, width // side
    squares = pixels.reshape(rows, side, columns, side, 3).swapaxes(1, 2)
    return np.ascontiguousarray(squares.reshape(columns, rows, side, side, 3).swapaxes(1, 2)).reshape(width, height, 3)


# --- exercises: the cache's key ---------------------------------------------------------------------------------------

Ranges = Sequence[Range]
VOCABULARY = 4096


def item_of(content: str, ranges: Ranges) -> MultimodalDataItem:
    """Return an image, or a video with a frame for each range; only its places and its hash have a meaning."""
    return MultimodalDataItem(
        modality=Modality.IMAGE if len(ranges) == 1 else Modality.VIDEO,
        offsets=tuple(ranges),
        feature=np.zeros((4, 1), dtype=np.float32),
        grid_thw=(len(ranges), 2, 2),
        hash=content,
        size=(32, 32),
    )


def inputs_of(num_tokens: int, items: Sequence[tuple[str, Ranges]]) -> MultimodalInputs:
    """Return the pictures of a prompt of `num_tokens`, of which `items` are content and ranges."""
    made = tuple(item_of(*each) for each in items)
    return MultimodalInputs(made, np.zeros((3, num_tokens), dtype=np.int64), 0)


PROMPTS: tuple[tuple[list[int], list[tuple[str, list[Range]]], str], ...] = (
    ([5, 6, 7], [], "A text is its own key."),
    ([5, 9, 9, 9, 6], [("star", [(1, 4)])], "Each placeholder becomes the number, and nothing else."),
    ([5, 9, 9, 9, 6], [("moon", [(1, 4)])], "Another content has another number, the next one."),
    ([9, 9, 5, 6], [("star", [(0, 2)])], "A content that came before keeps its number."),
    ([9, 9, 5, 8, 8, 6], [("star", [(0, 2)]), ("sun", [(3, 5)])], "Two contents in a prompt, two numbers."),
    ([9, 9, 5, 9, 9, 6], [("moon", [(0, 2)]), ("moon", [(3, 5)])], "The same content twice is the same number twice."),
    ([1, 8, 8, 2, 8, 8, 3], [("clip", [(1, 3), (4, 6)])], "A clip has one number in all of its frames."),
)


@grader("m6.key")
def grade_key(key: Callable[[list[int], list[tuple[str, list[Range]]], dict[str, int], int], list[int]]) -> str:
    """`key(token_ids, items, known, vocab_size)`: the prompt as a key of the prefix cache."""
    known, reference = {}, PadValues(VOCABULARY)
    for token_ids, items, hint in PROMPTS:
        _compare_key(key, token_ids, items, known, reference, hint)
    rng, at_random = Random(0), {}
    reference = PadValues(VOCABULARY)
    for _ in range(100):
        _compare_key(key, *_random_prompt(rng), at_random, reference, "")
    return (
        "By hand and 100 times at random: one number for each content, no number twice, none that a text can contain."
    )


def _random_prompt(rng: Random) -> tuple[list[int], list[tuple[str, list[Range]]]]:
    token_ids, items = [rng.randrange(VOCABULARY)], []
    for _ in range(rng.randrange(4)):
        ranges = []
        for _ in range(rng.choice((1, 1, 2))):
            ranges.append((len(token_ids), len(token_ids) + rng.randrange(1, 6)))
            token_ids += [4094] * (ranges[-1][1] - ranges[-1][0]) + [rng.randrange(4000)]
        items.append((rng.choice("abcdefgh"), ranges))
    return token_ids, items


def _compare_key(
    key: Any,
    token_ids: list[int],
    items: list[tuple[str, list[Range]]],
    known: dict[str, int],
    reference: PadValues,
    hint: str,
) -> None:
    wanted = decode(PaddedKey(token_ids, None, inputs_of(0, items).with_pad_values(reference).mm_items).data)
    given = list(token_ids)
    before = dict(known)
    got = key(given, [(content, list(ranges)) for content, ranges in items], known, VOCABULARY)
    case = f"key({short(token_ids)}, {short(items)}, {short(before)}, {VOCABULARY})"
    if given != token_ids:
        raise Mismatch(f"{case} changes the prompt itself: the model still needs its tokens. Work on a copy.")
    if not isinstance(got, list) or got != wanted:
        if isinstance(got, list) and any(
            isinstance(new, int) and token != new < VOCABULARY <= right
            for token, new, right in zip(token_ids, got, wanted, strict=False)
        ):
            hint = f"No text may contain a number that stands for a picture: begin at vocab_size. {hint}".rstrip()
        raise Mismatch(f"{case} is {short(wanted)}, yours {short(got)}.{' ' if hint else ''}{hint}")
    for content, _ in items:
        if content not in known:
            raise Mismatch(f"{case}: `known` must have {content!r} afterwards, or it is not found when it comes again.")


# --- exercises: rows --------------------------------------------------------------------------------------------------

PIECES: tuple[tuple[list[Range], int, int, str], ...] = (
    ([(5, 14)], 0, 20, "A piece with all of a picture takes all rows."),
    ([(5, 14)], 0, 8, "A piece that ends inside it takes the first rows."),
    ([(5, 14)], 8, 16, "A piece that begins inside it does not begin with row 0."),
    ([(5, 14)], 7, 10, "A piece may begin and end inside it."),
    ([(5, 14)], 14, 20, "After it no row is taken."),
    ([(5, 14)], 0, 5, "Before it no row is taken."),
    (
        [(3, 7), (9, 13)],
        0,
        20,
        "The rows of a clip are numbered through: its second frame begins where the first one ends.",
    ),
    ([(3, 7), (9, 13)], 5, 11, "Each frame that the piece holds a part of is a run of its own."),
    ([(3, 7), (9, 13)], 10, 20, "Rows of frames before the piece count."),
)


@grader("m6.rows")
def grade_rows(rows: Callable[[list[Range], int, int], list[tuple[int, int, int]]]) -> str:
    """`rows(ranges, start, end)`: which embeddings of an item belong to the prompt's tokens `start` to `end`."""
    for ranges, start, end, hint in PIECES:
        _compare_rows(rows, ranges, start, end, hint)
    rng = Random(0)
    for _ in range(80):
        at, ranges = 0, []
        for _ in range(rng.randrange(1, 5)):
            at += rng.randrange(1, 5)
            ranges.append((at, at + rng.randrange(1, 9)))
            at = ranges[-1][1]
        num_tokens = at + rng.randrange(1, 5)
        cuts = sorted(rng.sample(range(1, num_tokens), min(rng.randrange(5), num_tokens - 1)))
        for start, end in itertools.pairwise([0, *cuts, num_tokens]):
            _compare_rows(rows, ranges, start, end, "")
    return (
        "By hand, and 80 prompts cut into pieces at random: each piece takes its own rows, and so all pieces together "
        "take each row once."
    )


def _compare_rows(rows: Any, ranges: list[Range], start: int, end: int, hint: str) -> None:
    wanted, got = item_of("x", ranges).rows(start, end), rows(list(ranges), start, end)
    runs = [tuple(run) for run in got] if isinstance(got, list) else None
    if runs == wanted:
        return
    hint = _wrong_field(runs, wanted, start) or hint
    raise Mismatch(
        f"rows({short(ranges)}, {start}, {end}) is {short(wanted)}, yours {short(got)}.{' ' if hint else ''}{hint}"
    )


def _wrong_field(runs: Any, wanted: list[tuple[int, int, int]], start: int) -> str:
    """Return a hint if the same one of the three numbers is wrong in every run, and nothing else; else an empty one."""
    if runs == [(place - start, *rows) for place, *rows in wanted]:
        return "The place is counted from the beginning of the prompt, and not of the piece."
    if runs == [(place, first, end - 1) for place, first, end in wanted]:
        return "The third number is one more than the last row, like the end of a range."
    return ""


# --- exercises: the encoder's budget ----------------------------------------------------------------------------------

Item = tuple[str, list[Range]]
LOADS: tuple[tuple[list[Item], int, int, int, int, set[str], str], ...] = (
    ([], 0, 20, 0, 12, set(), "The tokens of a text are not encoded."),
    ([("a", [(5, 14)])], 0, 20, 0, 12, set(), "A picture that the budget has room for runs."),
    ([("a", [(5, 14)])], 0, 20, 9, 12, set(), "9 and 9 are more than 12: the piece ends before the picture."),
    ([("a", [(5, 14)])], 0, 20, 3, 12, set(), "Exactly the whole budget is no more than the budget."),
    ([("a", [(5, 14)])], 0, 20, 9, 12, {"a"}, "A picture that is encoded already costs nothing."),
    ([("a", [(5, 45)])], 0, 50, 0, 12, set(), "The first one of a step runs even if it is larger than the budget."),
    (
        [("a", [(5, 45)]), ("b", [(47, 48)])],
        0,
        60,
        0,
        12,
        set(),
        "After one that is larger than the budget no other is encoded.",
    ),
    ([("a", [(5, 14)])], 0, 6, 9, 12, set(), "All of a picture is encoded at once, even if the piece ends inside it."),
    ([("a", [(5, 14)])], 8, 20, 9, 12, set(), "A piece that begins inside the picture has no tokens before it to run."),
    (
        [("a", [(5, 14)])],
        0,
        20,
        15,
        12,
        {"a"},
        "An item that costs nothing is never too much, whatever is spent already.",
    ),
    ([("a", [(5, 14)]), ("a", [(16, 25)])], 0, 30, 0, 12, set(), "The same content twice is encoded once."),
    (
        [("a", [(5, 45)]), ("a", [(47, 87)])],
        0,
        90,
        0,
        12,
        set(),
        "A content that came before in this piece costs nothing.",
    ),
    ([("a", [(5, 14)]), ("b", [(16, 25)])], 0, 30, 0, 12, set(), "The first picture runs, the second does not."),
    ([("a", [(5, 14)]), ("b", [(16, 25)])], 14, 30, 0, 12, set(), "A picture before the piece is no part of it."),
    ([("a", [(5, 9), (12, 16)])], 10, 20, 6, 12, set(), "A clip is encoded as a whole, all of its frames."),
    ([("a", [(5, 9), (12, 16)])], 0, 4, 9, 12, set(), "A piece without pictures costs nothing."),
)


@grader("m6.piece")
def grade_piece(piece: Callable[[list[Item], int, int, int, int, set[str]], int]) -> str:
    """`piece(items, start, num_tokens, spent, budget, known)`: how many tokens from `start` on may run."""
    cases = list(LOADS)
    rng = Random(0)
    for _ in range(300):
        at, items = 0, []
        for _ in range(rng.randrange(4)):
            ranges = []
            for _ in range(rng.choice((1, 1, 1, 2))):
                at += rng.randrange(1, 5)
                ranges.append((at, at + rng.randrange(1, 12)))
                at = ranges[-1][1]
            items.append((rng.choice("abcd"), ranges))
        start = rng.randrange(at + 3)
        known = set(rng.sample("abcd", rng.choice((0, 0, 1, 2))))
        case = (items, start, rng.randrange(1, 30), rng.choice((0, 0, 4, 9, 15)), rng.choice((4, 12, 20)), known, "")
        cases.append(case)
    for items, start, num_tokens, spent, budget, known, hint in cases:
        wanted = _engines_piece(items, start, num_tokens, spent, budget, known)
        got = piece([(name, list(ranges)) for name, ranges in items], start, num_tokens, spent, budget, set(known))
        if got != wanted or isinstance(got, bool):
            raise Mismatch(
                f"{items}: of the {num_tokens} tokens from {start} on, with {spent} of {budget} spent and "
                f"{short(sorted(known)) if known else 'nothing'} known, {wanted} may run, yours {short(got)}."
                f"{' ' if hint else ''}{hint}"
            )
    return "By hand and 300 times at random: each piece ends where the engine's ends."


def _engines_piece(items: Sequence[Item], start: int, num_tokens: int, spent: int, budget: int, known: set[str]) -> int:
    cache = EmbeddingCache(capacity_bytes=2**40, tracer=Tracer())
    for content in known:
        cache.put(content, torch.zeros(1), in_use=())
    limit = EncoderBudget(max_tokens=budget, bytes_per_token=1, cache=cache)
    limit.spent = Cost(spent, spent)
    req: Any = SimpleNamespace(multimodal_inputs=inputs_of(0, items))
    return limit.most(req, start, num_tokens)


# --- exercises: frames ------------------------------------------------------------------------------------------------

CLIPS: tuple[tuple[int, float, float, int, int, str], ...] = (
    (120, 24.0, 2.0, 4, 768, "Five seconds, two frames in each: 10 frames."),
    (24, 24.0, 2.0, 4, 768, "One second is two frames, and `at_least` is more."),
    (3, 24.0, 2.0, 4, 768, "A video has no more frames than `total`."),
    (24000, 24.0, 2.0, 4, 768, "1,000 seconds would be more than `at_most`."),
    (100, 24.0, 2.0, 4, 768, "8.33 frames are 8."),
    (8, 2.0, 2.0, 4, 768, "If as many are wanted as there are, all are taken."),
    (13, 4.0, 2.0, 4, 768, "6.5 frames are 6."),
    (2, 30.0, 2.0, 4, 768, "Two frames."),
    (500, 25.0, 1.0, 4, 16, "`at_most` may be small."),
)
"""Arguments, and a hint why there are so many frames."""


@grader("m6.sample_frames")
def grade_sample_frames(sample_frames: Callable[[int, float, float, int, int], Sequence[int]]) -> str:
    """`sample_frames(total, video_fps, fps, at_least, at_most)`: the frames of a video that are read."""
    rng = Random(0)
    cases = list(CLIPS)
    for _ in range(100):
        cases.append((rng.randrange(2, 900), rng.choice((10.0, 24.0, 25.0, 30.0)), 2.0, 4, rng.choice((16, 768)), ""))
    for total, video_fps, fps, at_least, at_most, hint in cases:
        sampling = FrameSampling(fps=fps, min_frames=at_least, max_frames=at_most)
        wanted = list(sampling.indices(total, video_fps, VideoOptions(), "video"))
        got = sample_frames(total, video_fps, fps, at_least, at_most)
        frames = _whole_numbers(got)
        if frames is None or not _are_the_nearest(frames, wanted, total):
            more = _wrong_frames(frames, wanted, total) or hint
            raise Mismatch(
                f"{total} frames, {video_fps:g} a second, {fps:g} a second wanted, {at_least} to {at_most} of them: "
                f"{len(wanted)} frames, {short(wanted)}; yours {short(got)}.{' ' if more else ''}{more}"
            )
    return "By hand and 100 clips at random: the frames that the engine reads."


def _whole_numbers(got: Any) -> list[int] | None:
    """Return `got` as a list if it is a sequence or an array of whole numbers; else None."""
    if not isinstance(got, Sequence | np.ndarray) or isinstance(got, str):
        return None
    frames = list(got)
    return [int(i) for i in frames] if all(isinstance(i, int | np.integer) for i in frames) else None


def _are_the_nearest(frames: list[int], wanted: list[int], total: int) -> bool:
    """Return whether these frames are `wanted`, or differ only where a place is halfway between two frames."""
    gaps = len(wanted) - 1
    return len(frames) == len(wanted) and all(
        frame == right or 2 * abs(frame * gaps - i * (total - 1)) == gaps
        for i, (frame, right) in enumerate(zip(frames, wanted, strict=True))
    )


def _wrong_frames(frames: list[int] | None, wanted: list[int], total: int) -> str:
    """Return a hint for frames whose number is right; else an empty text."""
    if frames is None:
        return "The answer is a list or an array of whole numbers."
    if len(frames) != len(wanted):
        return ""
    if (frames[0], frames[-1]) != (0, total - 1):
        return "Evenly spread, from the first to the last one, and not with a fixed step."
    return "Evenly spread, each rounded to the nearest frame."


# --- the labs ---------------------------------------------------------------------------------------------------------

SECTION, PAIRS = (12, 10, 10), 32
"""Of the checkpoint: how many of a head's pairs turn with time, height and width."""
LAYOUTS: tuple[tuple[int, list[Block], str], ...] = (
    (6, [], "In a text each position is the place, on all three axes."),
    (6, [Block(1, 2, 2)], "Two rows of two, between two texts."),
    (10, [Block(2, 3, 2)], "Three rows of two: tokens come row by row."),
    (10, [Block(2, 2, 3)], "Two rows of three: tokens come row by row."),
    (12, [Block(1, 1, 5)], "One row."),
    (12, [Block(1, 5, 1)], "One column."),
    (30, [Block(5, 3, 3), Block(16, 2, 4)], "Two pictures."),
)


@grader("m6.swapped")
def grade_swapped(positions: Callable[[int, list[Block]], tuple[np.ndarray, int]]) -> str:
    """The lab's positions, repaired: time, height and width of every token, and the delta."""
    cases = list(LAYOUTS)
    rng = Random(0)
    for _ in range(100):
        at, blocks = 0, []
        for _ in range(rng.randrange(4)):
            blocks.append(Block(at + rng.randrange(1, 5), rng.randrange(1, 6), rng.randrange(1, 6)))
            at = blocks[-1].end
        cases.append((at + rng.randrange(1, 5), blocks, ""))
    for num_tokens, blocks, hint in cases:
        _compare_positions(positions, num_tokens, blocks, hint)
    return "By hand and 100 prompts at random: every token has the engine's positions, and so has the answer."


def _compare_positions(positions: Any, num_tokens: int, blocks: list[Block], hint: str) -> None:
    wanted, wanted_delta = get_rope_index(num_tokens, blocks)
    got, delta = positions(num_tokens, list(blocks))
    layout = ", ".join(f"{b.height} rows of {b.width} from {b.start} on" for b in blocks) or "no picture"
    case, more = f"{num_tokens} tokens, {layout}", f" {hint}" if hint else ""
    if np.shape(got) != wanted.shape:
        raise Mismatch(f"{case}: positions are [3, {num_tokens}], yours {list(np.shape(got))}.{more}")
    got = np.asarray(got)
    if (got != wanted).any():
        first = int((got != wanted).any(0).argmax())
        if any(block.end <= first for block in blocks) and not any(
            block.start <= first < block.end for block in blocks
        ):
            more = " Up to the end of the picture it is right. The text after it continues after its longer side."
    for axis, name in enumerate(("time", "height", "width")):
        if got[axis].tolist() != wanted[axis].tolist():
            swapped = axis == 1 and got[1].tolist() == wanted[2].tolist()
            raise Mismatch(
                f"{case}: {name} is {short(wanted[axis].tolist())}, yours {short(got[axis].tolist())}.{more}"
                f"{' Those are the positions of the other side: height and width are swapped.' if swapped else ''}"
            )
    if delta != wanted_delta:
        raise Mismatch(
            f"{case}: the answer begins at place + {wanted_delta}, yours at place + {delta}. The delta is the next "
            f"position minus the number of tokens."
        )


@grader("m6.layout")
def grade_layout(axes: Callable[[tuple[int, int, int], int], Sequence[int]]) -> str:
    """The lab's layout, repaired: the axis of each of a head's pairs, 0 time, 1 height, 2 width."""
    in_turn = "In turn: time, height, width, time, ...; once height and width have had their share, the rest is time's."
    cases = [
        (SECTION, PAIRS, in_turn),
        ((24, 20, 20), 64, in_turn),
        ((2, 1, 1), 4, in_turn),
        ((4, 4, 4), 12, "All three have the same share."),
        ((8, 0, 0), 8, "Time alone."),
        ((6, 2, 1), 9, "Width has had its share before height."),
        ((6, 1, 2), 9, "An axis that has had its share gives its turn to time, not to the next axis."),
    ]
    for section, pairs, hint in cases:
        wanted, got = axes_of_pairs(section, pairs), axes(section, pairs)
        if list(got) != wanted:
            sections = [axis for axis, count in enumerate(section) for _ in range(count)]
            more = " Yours stand one section after another, as in Qwen2-VL." if list(got) == sections != wanted else ""
            raise Mismatch(f"Sections {list(section)}: {_letters(wanted)}, yours {_letters(got)}. {hint}{more}")
    shown = picture(Shape("big", "red", "star", "left"), Shape("small", "blue", "circle", "bottom"))
    with new_engine() as own, new_engine(parts=another_layout(axes)) as yours:
        if _answer_of(own, shown) != _answer_of(yours, shown):
            raise Mismatch("The layouts agree, and yet the answer is another one.")
    return "Seven shapes of heads, and the model's own: each pair turns with the axis that it was trained with."


def _letters(axes: Any) -> str:
    try:
        return short("".join("THW"[axis] for axis in axes))
    except (TypeError, IndexError):
        return short(axes)


def _answer_of(engine: LLMEngine, shown: Any) -> Any:
    content = [{"type": "image", "image": shown}, {"type": "text", "text": "Describe the picture."}]
    output = engine.chat([{"role": "user", "content": content}], SamplingParams(max_tokens=40, logprobs=1))
    logprobs = output.outputs[0].logprobs or ()
    return output.token_ids, [next(iter(each.values())).logprob for each in logprobs]


@grader("m6.content")
def grade_content(content: Callable[[Modality, np.ndarray, tuple[int, int, int], bytes], str]) -> str:
    """The lab's hash, repaired: equal for equal pictures, and for no others."""
    rng = np.random.default_rng(0)
    feature = rng.random((48, 6), dtype=np.float32)
    other = feature.copy()
    other[-1, -1] += 1
    first = content(Modality.IMAGE, feature, (1, 6, 8), b"options")
    if not isinstance(first, str) or not re.fullmatch("[0-9a-fA-F]{32,}", first):
        raise Mismatch(
            f"A hash is a text of at least 32 hex digits, 128 bits: with fewer, two of many contents would share one "
            f"by chance. (Python's own hash() has 16, and they differ in every process.) Yours is {short(first)}."
        )
    if content(Modality.IMAGE, feature.copy(), (1, 6, 8), b"options") != first:
        raise Mismatch("The same picture must have the same hash each time, or it is never found again.")
    if _salted(content)(Modality.IMAGE, feature, (1, 6, 8), b"options") != first:
        raise Mismatch("Python's own hash() is salted: in another process the same picture would have another hash.")
    for grid in ((1, 8, 6), (1, 4, 12), (2, 6, 4), (1, 12, 4)):
        if content(Modality.IMAGE, feature, grid, b"options") == first:
            raise Mismatch(
                f"The same numbers as a grid of 1 x 6 x 8 and of {' x '.join(map(str, grid))} patches have one hash. "
                f"They are two pictures: the shape belongs to the content."
            )
    if content(Modality.IMAGE, other, (1, 6, 8), b"options") == first:
        raise Mismatch("Two pictures that differ in one number have one hash: all of the pixels belong to the content.")
    small = rng.random((44, 1), dtype=np.float32)
    grids = [(1, 22, 2), (1, 2, 22), (12, 2, 2), (1, 2, 2)]
    if len({content(Modality.IMAGE, small, grid, b"") for grid in grids}) < len(grids):
        raise Mismatch(f"Two of the grids {grids} have one hash. Do 1, 22, 2 and 12, 2, 2 become the same text?")
    large = rng.random((1028, 1), dtype=np.float32)
    grids = [(1, 2, 514), (1, 514, 2)]
    if len({content(Modality.IMAGE, large, grid, b"") for grid in grids}) < len(grids):
        raise Mismatch(f"The grids {grids} have one hash. Is a byte enough for a number? 514 is 2 * 256 + 2.")
    for question in ("Describe the picture.", "Where is the red star?"):
        _grade_two_shapes(content, question)
    return "Grids that are easily mixed up, and two pictures of the same bytes: each gets an answer about itself."


def _salted(function: Any) -> Any:
    """Return the function as in another process: with a `hash` of another salt."""
    if not isinstance(function, FunctionType):
        return function
    names = {**function.__globals__, "hash": lambda value: hash((value, "another process"))}
    salted = FunctionType(function.__code__, names, None, function.__defaults__, function.__closure__)
    salted.__kwdefaults__ = function.__kwdefaults__
    return salted


def _grade_two_shapes(content: Any, question: str) -> None:
    """Ask about two pictures with the same squares in the same order, then about the first once more."""
    wide = two_wide()
    with new_engine() as own:
        wanted = [_answer(own, shown, question).text for shown in (wide, another_shape(wide))]
    with new_engine(parts=intake_with(content_hash=content)) as yours:
        got = [_answer(yours, shown, question).text for shown in (wide, another_shape(wide))]
        runs = yours.stats().num_encoder_runs
        _answer(yours, wide, question)
        again = yours.stats().num_encoder_runs - runs
    if got != wanted:
        raise Mismatch(
            f"{question!r}: about the second of two pictures of the same bytes the engine answers {got[1]!r}. That is "
            f"an answer about the first; right is {wanted[1]!r}."
        )
    if again:
        raise Mismatch("A picture that was shown before is encoded again: its hash must not change.")


def _answer(engine: LLMEngine, shown: Any, question: str) -> Any:
    content = [{"type": "image", "image": shown}, {"type": "text", "text": question}]
    return engine.chat([{"role": "user", "content": content}], SamplingParams(max_tokens=40))


def two_wide() -> np.ndarray:
    """Return 128 x 96 pixels: a small circle in its first row, a small star in its last, each in its own square."""
    ground = np.array(picture())[:32, :32]
    pixels = np.tile(ground, (3, 4, 1))
    for shape, row, column in ((Shape("small", "red", "star"), 2, 0), (Shape("small", "blue", "circle"), 0, 3)):
        square = np.array(picture(shape))[32:64, 32:64]
        pixels[32 * row : 32 * row + 32, 32 * column : 32 * column + 32] = square
    return pixels
