"""The graders of m3's notebook, `check` as in `checks.py`, and the picture of blocks that it draws again and again.

The reference is always the package itself: its slot mapping, its KV manager, its scheduler, and the tokens that m1
gives to the same prompts.
"""

import ast
import math
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from m1_single_request.tracer import Tracer, TraceRecord
from m3_paged_attention import CacheConfig, LLMEngine, SamplingParams, SchedulerConfig
from m3_paged_attention.attention.torch_backend import TorchBackend
from m3_paged_attention.block_pool import BlockPool
from m3_paged_attention.input_batch import BatchRow, CachedRequestState
from m3_paged_attention.kv_cache_manager import KVCacheManager
from m3_paged_attention.kv_cache_spec import KVCacheConfig, KVCacheSpec
from m3_paged_attention.model_input import make_model_input
from m3_paged_attention.models.experts_config import ExpertsConfig
from m3_paged_attention.models.qwen3_moe import SparseMLP
from m3_paged_attention.scheduler_events import Preempted
from m3_paged_attention.scheduler_output import NewRequestData
from m3_paged_attention.views.block_map import Frame

try:  # in the checkout, for the tests
    from notebooks.checks import (
        Listing,
        Mismatch,
        check,
        grader,
        ids_of,
        listing,
        run_steps,
        short,
        show_source,
        tokens_alone,
    )
except ModuleNotFoundError:  # beside the notebook
    from checks import (  # type: ignore[no-redef]
        Listing,
        Mismatch,
        check,
        grader,
        ids_of,
        listing,
        run_steps,
        short,
        show_source,
        tokens_alone,
    )

__all__ = ["check", "draw_blocks", "ids_of", "listing", "routed", "show_kernel", "show_source"]

GAP = 0.7  # between blocks, in widths of a slot


def draw_blocks(axis: Any, frames: Sequence[Frame], *, labels: Sequence[str] = ()) -> dict[str, str]:
    """Draw a row of blocks for each frame, a cell for each slot; returns the colour of each request.

    A filled cell holds the KV of a token, and the number in it is the token's position. A block that several requests
    hold has a stripe for each of them.
    """
    first_frame, requests = frames[0], frames[-1].requests
    colours = {request_id: f"C{number % 10}" for number, request_id in enumerate(requests)}
    num_slots = first_frame.num_blocks * first_frame.block_size
    number_size = 7 if num_slots <= 40 else 5.5  # two digits must fit into a cell
    for row, frame in enumerate(frames):
        for block in frame.blocks:
            left = (block.block_id - 1) * (frame.block_size + GAP)
            axis.barh(row, frame.block_size, left=left, height=0.8, color="0.94")
            height = 0.8 / max(1, len(block.holders))
            for number, holder in enumerate(block.holders):
                first = frame.tables[holder].index(block.block_id) * frame.block_size
                top = row - 0.4 + number * height
                for slot in range(max(0, min(frame.num_kv[holder] - first, frame.block_size))):
                    style = {"color": colours[holder], "edgecolor": "white", "align": "edge"}
                    axis.barh(top, 1, left=left + slot, height=height, **style)
                    place = (left + slot + 0.5, top + height / 2)
                    axis.annotate(first + slot, place, color="white", fontsize=number_size, ha="center", va="center")
    blocks = range(first_frame.num_blocks)
    centres = [(first_frame.block_size + GAP) * block + first_frame.block_size / 2 for block in blocks]
    axis.set_xticks(centres, [f"block {block + 1}" for block in blocks], fontsize=8)
    axis.set_yticks(range(len(frames)), labels or [f"step {frame.step}" for frame in frames], fontsize=8)
    axis.tick_params(length=0)
    axis.invert_yaxis()
    axis.spines[:].set_visible(False)
    return colours


def show_kernel(name: str) -> None:
    """Show a Triton kernel in a notebook. It is read from its file: Triton need not be installed."""
    from IPython.display import display  # not needed for grading

    module = "m3_paged_attention.attention.triton_attention"
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None
    lines = Path(spec.origin).read_text(encoding="utf-8")
    (node,) = [n for n in ast.parse(lines).body if isinstance(n, ast.FunctionDef) and n.name == name]
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    source = "\n".join(lines.splitlines()[first - 1 : node.end_lineno])
    display(Listing(f"{module.replace('.', '/')}.py: {name}", source))


# --- exercises --------------------------------------------------------------------------------------------------------

PLACES = (
    ([7, 2, 9], 16, 33, 1),  # a decode
    ([7, 2, 9], 4, 0, 9),  # a prompt
    ([3, 8], 4, 4, 1),  # the first token of a block
    ([5, 1], 4, 3, 2),  # from one block into the next
    ([6], 4, 0, 4),  # a block that is exactly full
    ([5, 1, 8], 1, 0, 3),  # a block for each token
)
"""Block table, block size, position of the first new token, number of new tokens."""

WRONG_SLOTS: Mapping[str, Callable[[Sequence[int], int, int, int], list[int]]] = {
    "Those are positions, as if the blocks lay in order. Look the block up in the table.": (
        lambda table, size, start, num: list(range(start, start + num))
    ),
    "The new tokens begin at `start`, not at position 0.": (
        lambda table, size, start, num: [table[p // size] * size + p % size for p in range(num)]
    ),
    "Inside the block only position % block_size counts.": (
        lambda table, size, start, num: [table[p // size] * size + p for p in range(start, start + num)]
    ),
    "Slot 0 is the first of block 0, which is there, though nobody owns it: block 1 begins at slot block_size.": (
        lambda table, size, start, num: [(table[p // size] - 1) * size + p % size for p in range(start, start + num)]
    ),
    "The blocks of a table need not be neighbours: look each one up.": (
        lambda table, size, start, num: [table[0] * size + p for p in range(start, start + num)]
    ),
}
"""Typical mistakes, by what is to be said of them."""


@grader("m3.slots")
def grade_slots(slots: Callable[[Sequence[int], int, int, int], list[int]]) -> str:
    """`slots(block_table, block_size, start, num_tokens)`: where the K and V of the new tokens are written."""
    for table, size, start, num in PLACES:
        got, wanted = list(slots(list(table), size, start, num)), _slots(table, size, start, num)
        if got != wanted:
            hints = [hint for hint, wrong in WRONG_SLOTS.items() if _or_none(wrong, table, size, start, num) == got]
            raise Mismatch(
                f"{num} new tokens from position {start} on, blocks of {size}, block table {list(table)}: the slots "
                f"are {wanted}, you say {short(got)}.{' ' if hints else ''}{''.join(hints[:1])}"
            )
    return f"{len(PLACES)} rows: your slots are those that the runner computes."


def _or_none(function: Callable[..., list[int]], *args: Any) -> list[int] | None:
    try:
        return function(*args)
    except IndexError:
        return None


def _slots(table: Sequence[int], size: int, start: int, num: int) -> list[int]:
    """What the engine's own runner computes."""
    data = NewRequestData("", [0] * (start + num), SamplingParams(), 0, frozenset(), block_ids=list(table))
    row = BatchRow(CachedRequestState(data, table_row=0), start, num, False)
    tables = np.array([table], dtype=np.int32)
    return make_model_input([row], tables, size).attn_metadata.slot_mapping.tolist()


Piece = tuple[Tensor, Tensor]


@grader("m3.join")
def grade_join(join: Callable[[Tensor, Tensor, Tensor, Tensor], Piece]) -> str:
    """`join(out_a, lse_a, out_b, lse_b)`: two finished softmaxes over disjoint positions become one."""
    rng = torch.Generator().manual_seed(0)
    heads, positions, dim = 3, 10, 4
    values = torch.randn(heads, positions, dim, generator=rng, dtype=torch.float64)
    cases = (
        ("Two pieces of equal length", 5, 1.0, "A piece counts by the weight of all its positions, e^lse."),
        ("Pieces of 2 and 8 positions", 2, 1.0, "The longer piece has more weight."),
        ("Pieces of 9 and 1 positions", 9, 3.0, "The order of the pieces does not matter."),
        ("Scores of more than a thousand", 4, 2000.0, "e^1000 is no number: take the larger lse away first."),
    )
    for what, cut, size, hint in cases:
        scores = size * torch.randn(heads, positions, generator=rng, dtype=torch.float64)
        pieces = _softmax(scores[:, :cut], values[:, :cut]) + _softmax(scores[:, cut:], values[:, cut:])
        _compare_piece(what, join(*(t.clone() for t in pieces)), _softmax(scores, values), hint)
    whole = _softmax(scores, values)
    empty = torch.full((heads, dim), math.nan, dtype=torch.float64), torch.full_like(whole[1], -math.inf)
    hint = "A piece without positions has lse = -inf and nothing valid in it: not even 0 times what is there may count."
    _compare_piece("The second piece is empty", join(*whole, *empty), whole, hint)
    _compare_piece("The first piece is empty", join(*empty, *whole), whole, hint)
    nothing = torch.zeros_like(whole[0]), empty[1]
    hint = "Nothing and nothing is zeros with lse = -inf; -inf - -inf is NaN."
    _compare_piece("Both pieces are empty", join(*empty, *empty), nothing, hint)
    return "Pieces of any length, large scores, empty pieces: joined they are the softmax of the whole."


def _softmax(scores: Tensor, values: Tensor) -> Piece:
    """`[heads, dim]` and the log-sum-exp `[heads]` of `[heads, positions]` scores over values."""
    return torch.einsum("hp,hpd->hd", scores.softmax(-1), values), scores.logsumexp(-1)


def _compare_piece(what: str, got: Any, wanted: Piece, hint: str) -> None:
    if not (isinstance(got, tuple) and len(got) == 2 and all(isinstance(t, Tensor) for t in got)):
        raise Mismatch(f"Two tensors are wanted, the joined output and its lse; you return {short(got)}.")
    for name, mine, right in zip(("output", "lse"), got, wanted, strict=True):
        if mine.shape != right.shape:
            raise Mismatch(f"{what}: the {name} should be {list(right.shape)}, yours is {list(mine.shape)}.")
        if mine.isnan().any():
            raise Mismatch(f"{what}: the {name} has NaN in it. {hint}")
        if not torch.allclose(mine, right, rtol=1e-9, atol=1e-12):
            raise Mismatch(f"{what}: the {name} is not that of the softmax of the whole. {hint}")


NUM_BLOCKS, BLOCK_SIZE = 12, 4
KEPT = "the block that it wrote into before still belongs to the others"


@grader("m3.shared_blocks")
def grade_shared_blocks(blocks_class: type) -> str:
    """`start`, `fork`, `append`, `release`: tables of blocks that are shared until somebody writes."""
    _grade_blocks_by_hand(blocks_class(NUM_BLOCKS, BLOCK_SIZE))
    for seed in range(20):
        _grade_random_blocks(blocks_class(NUM_BLOCKS, BLOCK_SIZE), Random(seed))
    return "20 random histories: the same blocks are shared, copied and free as in the engine's own manager."


def _grade_blocks_by_hand(mine: Any) -> None:
    def expect(what: str, got: object, wanted: object, why: str) -> None:
        if got != wanted:
            raise Mismatch(
                f"With {NUM_BLOCKS} blocks of {BLOCK_SIZE}: {what} is {wanted!r}, yours is {short(got)}. {why}"
            )

    mine.start("a", 6)
    expect("the number of free blocks after start('a', 6)", mine.num_free, 10, "6 tokens need 2 blocks.")
    mine.fork("a", "b")
    expect("num_free after fork('a', 'b')", mine.num_free, 10, "A fork takes no block.")
    expect("the table of 'b'", list(mine.tables["b"]), list(mine.tables["a"]), "It shares all blocks of 'a'.")
    before = mine.tables["a"][1]
    copy = mine.append("a")
    after = mine.tables["a"][1]
    why = "Token 6 goes into a block that 'b' holds, too: 'a' gets a block of its own, and the copy is (old, new)."
    expect("append('a')", copy, (before, after) if after != before else "a copy", why)
    expect("the last block of 'b' then", mine.tables["b"][1], before, "Only the table of the writer changes.")
    expect("num_free then", mine.num_free, 9, f"One block was taken; {KEPT}.")
    expect("append('b')", mine.append("b"), None, "'b' is alone with its block now: it writes in place.")
    mine.append("b")
    expect("append('b'), the third time,", mine.append("b"), None, "A new block is no copy.")
    expect("the length of the table of 'b'", len(mine.tables["b"]), 3, "Token 8 is the first of a third block.")
    mine.release("a")
    still_held = "Its own block is free again; the other one is still held by 'b'."
    expect("num_free after release('a')", mine.num_free, 9, still_held)
    mine.release("b")
    expect("num_free after release('b')", mine.num_free, 12, "Nobody holds anything any more.")


def _grade_random_blocks(mine: Any, rng: Random) -> None:
    spec = KVCacheSpec(block_size=BLOCK_SIZE, num_layers=1, num_kv_heads=1, head_dim=1, dtype=torch.float32)
    right = KVCacheManager(kv_cache_config=KVCacheConfig(spec=spec, num_blocks=NUM_BLOCKS), tracer=Tracer())
    lengths: dict[str, int] = {}
    history: list[str] = []
    for number in range(60):
        rid, name = rng.choice([*lengths, ""]), f"r{number}"
        what = rng.choice(["append", "append", "append", "fork", "release"]) if rid else "start"
        if what == "start":
            length = rng.randint(1, 9)
            if not right.can_hold(name, length):
                continue
            lengths[name] = length
            history.append(f"start({name!r}, {length})")
            right.reserve(name, length)
            mine.start(name, length)
        elif what == "fork":
            lengths[name] = lengths[rid]
            history.append(f"fork({rid!r}, {name!r})")
            right.fork(rid, name, lengths[rid])
            mine.fork(rid, name)
        elif what == "append":
            if not right.can_hold(rid, lengths[rid] + 1):
                continue
            lengths[rid] += 1
            history.append(f"append({rid!r})")
            right.reserve(rid, lengths[rid])
            copied, copy = bool(right.take_moves().copies), mine.append(rid)
            if (copy is not None) != copied:
                needed = "a copy is needed" if copied else "no copy is needed"
                raise Mismatch(f"{_last(history)}: {needed}, you return {short(copy)}.")
        else:
            del lengths[rid]
            history.append(f"release({rid!r})")
            right.release(rid)
            mine.release(rid)
        _compare_tables(mine, right, history)


def _compare_tables(mine: Any, right: KVCacheManager, history: Sequence[str]) -> None:
    owned = right.owned()
    if mine.num_free != right.num_free:
        raise Mismatch(f"{_last(history)}: {right.num_free} blocks should be free, with you {mine.num_free} are.")
    if set(mine.tables) != set(owned):
        raise Mismatch(f"{_last(history)}: tables are left of {sorted(mine.tables)}, not of {sorted(owned)}.")
    for rid, table in owned.items():
        if len(mine.tables[rid]) != len(table):
            raise Mismatch(f"{_last(history)}: {rid!r} should have {len(table)} blocks, not {len(mine.tables[rid])}.")
    for one, other in combinations(owned, 2):
        wanted, got = _common(owned[one], owned[other]), _common(mine.tables[one], mine.tables[other])
        if got != wanted or len({*mine.tables[one]} & {*mine.tables[other]}) != len(wanted):
            raise Mismatch(
                f"{_last(history)}: {one!r} and {other!r} should share the blocks {wanted} of their tables, counted "
                f"from 0; with you they share {got}."
            )


def _common(one: Sequence[int], other: Sequence[int]) -> list[int]:
    """Where two tables have the same block."""
    return [index for index, pair in enumerate(zip(one, other, strict=False)) if pair[0] == pair[1]]


def _last(history: Sequence[str]) -> str:
    return f"After {', '.join(history[-4:])}"


class Victims:
    """A trace reader that keeps who was preempted."""

    def __init__(self) -> None:
        self.rids: list[str] = []

    def read(self, record: TraceRecord) -> None:
        """Keep a preemption."""
        if isinstance(record.event, Preempted):
            self.rids.append(record.event.rid)

    def close(self) -> None:
        """Nothing to release."""


SMALL = {
    "cache_config": CacheConfig(block_size=4, num_blocks=14),
    "scheduler_config": SchedulerConfig(max_num_seqs=4),
}
LENGTHS = {"first": 9, "second": 3, "third": 7, "fourth": 5}


FIRST_CAME_BACK = "when 'first' was away and came back"
VICTIM_HINTS = {
    "first": "That one has the fewest outputs, as the engine's own policy has it.",
    "second": "The last of the list was admitted last. Who comes back stands there, however old it is.",
}
"""What to say of a wrong victim."""


@grader("m3.newest_first")
def grade_newest_first(policy_class: type) -> str:
    """A preemption policy: whoever arrived last loses its blocks."""
    _grade_policy_alone(policy_class())
    finished, victims = _run_squeezed({"preemption": policy_class})
    alone = tokens_alone(LENGTHS.values(), num=16)
    if missing := [rid for rid in LENGTHS if rid not in finished]:
        raise Mismatch(f"In a small pool these requests never finished: {', '.join(missing)}.")
    if any(tokens != alone[LENGTHS[rid]] for rid, tokens in finished.items()):
        raise Mismatch("In a small pool the tokens of a request have changed.")
    if not victims or victims[0] != "fourth" or "first" in victims:
        raise Mismatch(f"In a small pool the newest should go first, and the oldest never; you took {victims}.")
    return f"Alone and in a small pool: the newest goes ({', '.join(victims)}), and everybody's tokens stay the same."


def _grade_policy_alone(policy: Any) -> None:
    with LLMEngine() as engine:
        processor = engine.engine_core.input_processor
    running = []
    for number, (rid, length, outputs) in enumerate((("first", 9, 1), ("second", 3, 5), ("third", 7, 3)), start=1):
        request = processor.process_request(
            rid, ids_of(length), SamplingParams(), number=number, arrival_time=float(number)
        )
        request.number = number
        for token_id in ids_of(outputs):
            request.sequence.add_token_id(token_id)
        running.append(request)
    orders = {
        "running in the order of arrival": running,
        "when 'second' was away and came back": [running[0], running[2], running[1]],
        FIRST_CAME_BACK: [running[1], running[2], running[0]],
    }
    for what, order in orders.items():
        given = list(order)
        victim = policy.choose_victim(given)
        if given != order:
            raise Mismatch("choose_victim() changes the list of running requests. The scheduler takes the victim out.")
        rid = getattr(victim, "request_id", None)
        if rid != "third":
            hint = VICTIM_HINTS["second" if what == FIRST_CAME_BACK else rid] if rid in VICTIM_HINTS else ""
            raise Mismatch(f"Of three requests, {what}, the newest is 'third'; you choose {rid!r}. {hint}")
    if policy.choose_victim(running[:1]) is not running[0]:
        raise Mismatch("Of one running request that one must be chosen.")


def _run_squeezed(parts: Mapping[str, Any]) -> tuple[dict[str, tuple[int, ...]], list[str]]:
    """Four requests in too few blocks: their tokens, and who was preempted."""
    watch, params = Victims(), SamplingParams(max_tokens=16, ignore_eos=True)
    with LLMEngine(**SMALL, parts=dict(parts)) as engine:
        engine.tracer.attach(watch)
        for rid, length in LENGTHS.items():
            engine.add_request(ids_of(length), params, request_id=rid)
        finished = dict(run_steps(engine, limit=200))
    return finished, watch.rids


# --- the lab ----------------------------------------------------------------------------------------------------------

ASKED = {"first": ("Why is decode memory-bound?", 2, 24), "late": ("What is a block table?", 1, 12)}
"""Question, n, and max_tokens; `late` arrives when the two answers to `first` have parted."""
ROOM = CacheConfig(block_size=16, num_blocks=12)


def with_pool(pool_class: type) -> type:
    """The engine's own KV manager over another pool of blocks."""

    class Manager(KVCacheManager):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            self.pool = pool_class(self.num_blocks)

    return Manager


@grader("m3.freed_block")
def grade_freed_block(pool_class: type) -> str:
    """The lab's pool, repaired: a block stays as long as anybody holds it, and no longer."""
    wanted = _answers(BlockPool, checked=False)
    got = _answers(pool_class, checked=True)
    if got != wanted:
        raise Mismatch("The books are in order, but the answers of a request have changed.")
    _grade_pool_alone(pool_class(4))
    return "Both answers and the late one are what they are alone, nothing is freed too early, and nothing stays."


def _answers(pool_class: type, *, checked: bool) -> dict[str, list[tuple[int, ...]]]:
    """The tokens of all answers, in an engine over this pool."""
    answers: dict[str, list[tuple[int, ...]]] = {}
    waiting = list(ASKED.items())
    with LLMEngine(cache_config=ROOM, parts={"kv_manager": with_pool(pool_class)}) as engine:
        while waiting or engine.has_unfinished_requests():
            if waiting and engine.stats().num_steps in (0, 2):
                rid, (question, n, max_tokens) = waiting.pop(0)
                prompt = engine.chat_prompt([{"role": "user", "content": question}])
                engine.add_request(prompt, SamplingParams(n=n, max_tokens=max_tokens), request_id=rid)
            for rid, output in engine.step().items():
                if output.error is not None:
                    raise Mismatch(f"The request {rid!r} failed: {output.error}")
                if output.finished:
                    answers[rid] = [each.token_ids for each in output.outputs]
            if checked:
                _check_books(engine)
        if left := engine.stats().num_blocks - engine.stats().num_free_blocks:
            raise Mismatch(f"All requests have ended, and {left} blocks are still in use: nobody will ever free them.")
    return answers


def _check_books(engine: LLMEngine) -> None:
    try:
        engine.engine_core.scheduler.check_invariants()
    except AssertionError as error:
        what = str(error).splitlines()[0]
        raise Mismatch(f"check_invariants() fails after step {engine.stats().num_steps}: {what}.") from error


def _grade_pool_alone(pool: Any) -> None:
    block_ids = pool.allocate(2)
    pool.share(block_ids)
    if list(pool.free(block_ids)) or pool.num_free != 2:
        raise Mismatch("Two blocks with two holders each: after one free() they are still in use.")
    if sorted(pool.free(block_ids)) != sorted(block_ids) or pool.num_free != 4:
        raise Mismatch("Two blocks with two holders each: after the second free() they are free, and it returns them.")
    try:
        pool.free(block_ids[:1])
    except ValueError:
        return
    raise Mismatch(
        "A block that nobody holds was freed once more, and nothing was said. By then it may belong to somebody: raise "
        "ValueError."
    )


# --- the labs: a router, and the experts of a checkpoint --------------------------------------------------------------

HIDDEN, EXPERTS = 8, 6


def routed(mlp_class: type, logits: Tensor, *, top_k: int = 2, normalizes: bool = True) -> tuple[Tensor, Tensor]:
    """What the router of a sparse layer chooses, and with which weights, for these logits."""
    config = ExpertsConfig(
        num_experts=logits.shape[1], top_k=top_k, intermediate_size=4, normalizes=normalizes, layers=frozenset([0])
    )
    rows, dtype = logits.shape[1], logits.dtype
    weights = [torch.zeros(shape, dtype=dtype) for shape in ((rows, HIDDEN), (rows * 8, HIDDEN), (rows * HIDDEN, 4))]
    chosen: tuple[Tensor, Tensor] = mlp_class(config, *weights, TorchBackend()).choose(logits)
    return chosen


@grader("m3.router")
def grade_router(mlp_class: type) -> str:
    """The lab's router, repaired: the weights of the chosen experts are those of the engine, to the last bit."""
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.randn(200, EXPERTS).to(dtype)
        for normalizes, top_k in ((True, 2), (True, 3), (False, 2), (True, 1)):
            what = f"{short(dtype)}, top_k = {top_k}{'' if normalizes else ', not normalized'}"
            try:
                experts, weights = routed(mlp_class, logits, top_k=top_k, normalizes=normalizes)
            except Exception as error:
                raise Mismatch(f"{what}: {type(error).__name__}: {error}") from error
            wanted, right = routed(SparseMLP, logits, top_k=top_k, normalizes=normalizes)
            _compare_choice(what, experts, weights, wanted, right)
    return (
        "800 tokens, in float32 and bfloat16: the same experts, and in bfloat16 the same bits of their routing weights."
    )


def _compare_choice(what: str, experts: Tensor, weights: Tensor, wanted: Tensor, right: Tensor) -> None:
    if experts.shape != wanted.shape or not torch.equal(experts, wanted):
        raise Mismatch(
            f"{what}: other experts than the {wanted.shape[1]} most probable ones, the best first. Are the "
            f"probabilities float32, and does torch.topk decide between equal ones?"
        )
    if weights.dtype != right.dtype:
        raise Mismatch(f"{what}: the weights are {short(weights.dtype)}; they must be in the precision of the logits.")
    is_float32 = right.dtype == torch.float32
    if torch.allclose(weights, right, rtol=1e-6, atol=0) if is_float32 else torch.equal(weights, right):
        return
    row = int((weights != right).any(1).nonzero()[0])
    got, should = (", ".join(f"{value:.6f}" for value in each[row].tolist()) for each in (weights, right))
    share = float((weights != right).float().mean())
    raise Mismatch(
        f"{what}: {share:.0%} of the weights are others. For one token they should be {should}, and yours are {got}. "
        + (
            "Are the probabilities over all experts, and divided by their sum only if self.normalizes?"
            if is_float32
            else "In which precision do you divide, and when do you round?"
        )
    )


@grader("m3.expert_layout")
def grade_expert_layout(read: Callable[[Tensor, Tensor, int, int], tuple[Tensor, Tensor]]) -> str:
    """The lab's loader, repaired: experts are found in both layouts, whatever the sizes are."""
    for hidden, width in ((8, 5), (8, 4), (8, 8), (6, 12), (4, 2)):
        gate_up, down = torch.randn(EXPERTS, 2 * width, hidden), torch.randn(EXPERTS, hidden, width)
        for name, stored in (
            ("as they are", (gate_up, down)),
            ("transposed", (gate_up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous())),
        ):
            what = (
                f"hidden size {hidden}, width {width}, stored {name} ({list(stored[0].shape)} and "
                f"{list(stored[1].shape)})"
            )
            try:
                found = read(*stored, hidden, width)
                pairs = list(zip(("gate_up", "down"), found, (gate_up, down), strict=True))
            except Exception as error:
                raise Mismatch(f"{what}: {type(error).__name__}: {error}") from error
            for tensor, mine, right in pairs:
                if mine.shape != right.shape:
                    raise Mismatch(f"{what}: {tensor} should be {list(right.shape)}, yours is {list(mine.shape)}.")
                if mine.shape[1] == mine.shape[2] and torch.equal(mine.transpose(1, 2), right):
                    raise Mismatch(
                        f"{what}: {tensor} has the right shape and is transposed. Its own shape does not show it; "
                        f"does the other tensor's?"
                    )
                if not torch.equal(mine, right):
                    raise Mismatch(
                        f"{what}: {tensor} has the right shape, and its numbers are in other places. transpose(1, 2) "
                        f"swaps rows and columns of each expert; reshape does not."
                    )
    return "Five pairs of sizes, both layouts: every expert is read as it was."
