"""Wrong answers to the exercises about overlapped and captured steps, and right variants.

Most are the solution with a piece of its text changed.
"""

from collections.abc import Callable
from typing import Any

import torch

from m6_multimodal_pd.graph_runner import StepInputs
from tests.notebooks.exercises import M6_OVERLAP
from tests.notebooks.lessons import RightAnswers, WrongAnswers

LESSON = M6_OVERLAP.lesson
WRONG: WrongAnswers = {}
RIGHT: RightAnswers = []

# --- a token after the end --------------------------------------------------------------------------------------------

NOT_DROPPED = "{rid: token for rid, token in tokens.items() if rid not in dropped}"
BOTH, ALONE = "rid in ends and rid in ahead", "elif rid in ends:\n                self.free(rid)"
FREED = "for rid in dropped:\n            self.free(rid)"
changed = LESSON.solution("FreesAtOnce")
WRONG["m6_overlap.ended"] = [
    (LESSON.defined("FreesAtOnce", {}), "That step still uses the row: keep it until the step has arrived"),
    (changed(NOT_DROPPED, "tokens"), "a token after its end"),
    (
        changed(f"if {BOTH}", "if False"),
        "step 4 is in flight with ann, bob: the row of ann is given back",
    ),
    (changed(f"if {BOTH}", "if rid in ends"), "it is not given back"),
    (changed(ALONE, ""), "nothing uses the row of bob any more, and it is not given back"),
    (changed(FREED, ""), "nothing uses the row of ann any more, and it is not given back"),
    (changed(FREED, f"{FREED}\n            self.free(rid)"), "is given back twice"),
    (changed("for rid in dropped:", "for rid in [each for each in dropped if each in tokens]:"), "so it has no token"),
    (changed("for rid in dropped:", "for rid in self.ended:"), "it is not given back"),
    (changed("if rid not in dropped", "if rid not in ahead"), "is to be delivered, yours is"),
    (changed("return delivered", "return None"), "returns the tokens to deliver by request"),
    (changed("return delivered", "return {rid: t for rid, t in delivered.items() if rid not in ends}"), "is to be del"),
]


class OneAtATime:
    """Keeps what has ended in a set, and looks at each token once."""

    def __init__(self, free: Callable[[str], None]) -> None:
        self.free, self.ended = free, set[str]()

    def book(self, tokens: dict[str, str], ends: set[str], ahead: set[str]) -> dict[str, str]:
        """Return the tokens to deliver."""
        before, self.ended = self.ended, {rid for rid in ends & ahead if rid not in self.ended}
        for rid in [*before, *(ends - self.ended - before)]:
            self.free(rid)
        return {rid: token for rid, token in tokens.items() if rid not in before}


RIGHT.append(("m6_overlap.ended", OneAtATime))

# --- a bucket that does not exist -------------------------------------------------------------------------------------

FEW = "[size for size in (1, 2, 4, *range(8, most, 8)) if size < most] + [most]"
changed = LESSON.solution("sizes_up_to")
WRONG["m6_overlap.sizes"] = [
    (LESSON.defined("sizes_up_to", {}), "A step of 12 requests has no bucket"),
    (changed(" + [most]", ""), "`most` is always one itself"),
    (changed("if size < most", ""), "no step has more: 4 is too large"),
    (changed("if size < most", "if size <= most"), "Each size is there once"),
    (changed(FEW, "[1, 2, 4, *range(8, most + 8, 8)]"), "no step has more: 16 is too large"),
    (changed("8, most, 8", "8, most, 16"), "16 is missing"),
    (changed(FEW, "[*range(1, most + 1)]"), "3 is one too many"),
    (lambda most: most, "A list of sizes is wanted"),
]
WRONG["m6_overlap.bucket"] = [
    (LESSON.defined("bucket_of", {}), "yours raises StopIteration. A larger step runs eagerly"),
    (lambda n, sizes: next((size for size in sizes if size > n), None), "A smaller one is large enough"),
    (lambda n, sizes: max(size for size in sizes if size <= n), "The step does not fit"),
    (lambda n, sizes: next((size for size in sizes if size >= n), sizes[-1]), "No bucket holds it, so it runs eagerly"),
    (lambda n, sizes: sizes[-1] if n <= sizes[-1] else None, "A smaller one is large enough"),
    (lambda n, sizes: sizes[[size >= n for size in sizes].index(True)] if n < 13 else sizes[99], "raises IndexError"),
]
RIGHT.append(("m6_overlap.bucket", lambda n, sizes: min((size for size in sizes if size >= n), default=None)))

# --- a buffer that moved ----------------------------------------------------------------------------------------------

changed = LESSON.solution("Moves")
LENGTHS, TABLES = "self.seq_lens[:num_rows].copy_(metadata.seq_lens)", "self.block_tables[:num_rows, :num_pages].copy_"
WRONG["m6_overlap.pad"] = [
    (LESSON.defined("Moves", {"StepInputs": StepInputs, "torch": torch}), "another tensor in the place of `tokens`"),
    (changed(LENGTHS, "self.seq_lens = metadata.seq_lens.clone().resize_(6)"), "in the place of `seq_lens`"),
    (changed(TABLES, "self.block_tables = self.block_tables.clone()\n        " + TABLES), "of `block_tables`"),
    (changed("self.tokens[0, :num_rows].copy_(input_ids)", "self.tokens = self.tokens.clone()"), "of `tokens`"),
    (changed("self.tokens[0, :num_rows].copy_(input_ids)", ""), "its ids are"),
    (changed("self.tokens[1, :num_rows].copy_(positions)", ""), "its positions are"),
    (changed("self.tokens[2, :num_rows].copy_(metadata.slot_mapping)", ""), "its slots are"),
    (changed(LENGTHS, ""), "its seq_lens are"),
    (changed(f"{TABLES}(metadata.block_tables)", ""), "its block_tables are"),
    (changed("self.tokens[2, num_rows:end].zero_()", ""), "a padded token writes to slot"),
    (changed("self.seq_lens[num_rows:end].zero_()", ""), "a padded row has the length"),
    (
        changed("self.block_tables[:num_rows, :num_pages]", "self.block_tables[:num_rows]"),
        "raised RuntimeError",
    ),
]


class Assigns(StepInputs):
    """Assigns to slices, and fills all that it does not use."""

    def pad_batch(self, input_ids: Any, positions: Any, metadata: Any, bucket: Any) -> None:
        """Copy and pad."""
        for tensor in self.tensors():
            tensor.zero_()
        num_rows, num_pages = metadata.block_tables.shape
        self.tokens[:, :num_rows] = torch.stack([input_ids, positions, metadata.slot_mapping])
        self.seq_lens[:num_rows] = metadata.seq_lens
        self.block_tables[:num_rows, :num_pages] = metadata.block_tables


RIGHT.append(("m6_overlap.pad", Assigns))

# --- tokens that are not known ----------------------------------------------------------------------------------------

changed = LESSON.solution("Ring")
TABLE, PLACES = "self.tokens = [0] * num_rows", "return [-1 - row for row in rows]"
COUNTED = "self.count += len(rows)\n        return [-self.count + i for i in range(len(rows))]"
EMPTIED = "self.tokens = [0] * self.size\n        return [-1 - row for row in rows]"
IN_PLACE = (
    "return [self.tokens",
    "input_ids[:] = [self.tokens",
    "input_ids]\n",
    "input_ids]\n        return input_ids\n",
)
STORED = "self.tokens[-1 - placeholder] = token_id"
WRONG["m6_overlap.futures"] = [
    (LESSON.defined("Ring", {}), "A request may wait for"),
    (changed("[-1 - row for row in rows]", "[-row for row in rows]"), "all are negative, because 0 is a token"),
    (changed("[-1 - row for row in rows]", "[-1 - number for number in range(len(rows))]"), "must still be there"),
    (changed("[-1 - row for row in rows]", "[-1] * len(rows)"), "two requests have the same placeholder"),
    (changed("[-1 - row for row in rows]", "-1"), "a list with one number per row"),
    (changed("token_id < 0", "token_id <= 0"), "Known tokens stay"),
    (changed("token_id < 0", "token_id < -1"), "a placeholder becomes its token"),
    (changed(STORED, f"{STORED} + 1"), "Stored are 11 and 12"),
    (changed(*IN_PLACE), "changes its argument"),
    (changed(TABLE, "self.tokens, self.count = {}, 0", PLACES, COUNTED), "grows without end"),
    (changed(TABLE, f"{TABLE}\n        self.size = num_rows", PLACES, EMPTIED), "must still be there"),
]

# --- the loop ---------------------------------------------------------------------------------------------------------

changed = LESSON.solution("overlapped_loop")


def normal_loop(core: Any) -> None:
    """One step after the other."""
    while (batch := core.schedule()) is not None:
        step = core.launch(batch)
        core.book(step, core.arrive(step))


ARRIVED, NEEDS = "tokens = core.arrive(before)", "core.must_wait(batch)"
WRONG["m6_overlap.loop"] = [
    (normal_loop, "that is the normal order"),
    (changed("batch is None and before is None", "batch is None"), "A step in flight has tokens, too"),
    (changed(NEEDS, "True"), "that is the normal order"),
    (changed(NEEDS, "False"), "needs the tokens of the step before: must_wait(3) is True"),
    (changed(ARRIVED, f"{ARRIVED}\n            core.book(before, tokens)\n            before = None"), "launch first"),
    (changed(" if tokens is None else tokens", ""), "arrives and is booked once"),
    (changed("None if batch is None else core.launch(batch)", "core.launch(batch)"), "there is nothing to launch"),
    (changed("before = step", "before = step or before"), "your loop does not end"),
    (changed("core.book(before, core.arrive(before)", "core.book(before, before"), "is booked with 'step"),
    (changed("core.arrive(before) if tokens", "core.arrive(step) if tokens"), "step"),
    (changed("if batch is None and before is None", "if False"), "your loop does not end"),
]


def one_call_each(core: Any) -> None:
    """As the engine: a call of `call` is one round of the loop."""
    flying: list[Any] = []

    def call() -> bool:
        batch, tokens = core.schedule(), None
        if batch is not None:
            if flying and core.must_wait(batch):
                tokens = core.arrive(flying[0])
            flying.append(core.launch(batch))
        if len(flying) > (batch is not None):
            step = flying.pop(0)
            core.book(step, tokens or core.arrive(step))
            return True
        return batch is not None

    while call():
        pass


RIGHT.append(("m6_overlap.loop", one_call_each))
