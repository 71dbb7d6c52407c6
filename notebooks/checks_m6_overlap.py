"""Graders of the labs and exercises in m6's third notebook, and what its labs run: late results and a captured step."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from m3_paged_attention.attention.metadata import AttentionMetadata
from m6_multimodal_pd.graph_runner import Bucket, GraphLimits, StepInputs, sizes_up_to as sizes_of_the_engine

try:  # in the checkout, for the tests
    from notebooks.checks import Mismatch, check, grader, short, show_source
    from notebooks.checks_m6 import new_engine
except ModuleNotFoundError:  # beside the notebook
    from checks import Mismatch, check, grader, short, show_source  # type: ignore[no-redef]
    from checks_m6 import new_engine  # type: ignore[no-redef]

__all__ = ["CapturedStep", "check", "decode", "decode_steps", "late_calls", "new_engine", "show_source"]


# --- the first lab: a token after the end -----------------------------------------------------------------------------

STOP = "."
Answers = Mapping[str, Sequence[str | None]]
"""The tokens that the model computes for each request, one a step. After a stop token they go on: the next step was
launched before the stop token was known. None: the row of that step is unusable. An answer without a stop token ends by
its length, which is foreseen."""


class Call(NamedTuple):
    """A call of an overlapped engine: a step is launched, then the step before it arrives and is booked."""

    launched: dict[str, int]
    """The requests of the launched step, each with its row."""
    arrived: dict[str, str | None]
    """The requests of the step that has arrived, each with its token."""
    delivered: dict[str, str]
    freed: list[str]
    wrong: list[str]
    """Rows in which the device found another request."""


class Rows:
    """Rows of a block table. The host writes them, and the device reads them while it runs a step."""

    def __init__(self, num_rows: int) -> None:
        self.names = [""] * num_rows
        self.free_rows = list(range(num_rows))
        self.of: dict[str, int] = {}
        self.freed: list[str] = []

    def take(self, rid: str) -> None:
        """Give a request a row."""
        row = self.of[rid] = self.free_rows.pop(0)
        self.names[row] = rid

    def free(self, rid: str) -> None:
        """Take a row back."""
        self.freed.append(rid)
        self.free_rows.append(self.of[rid])


def late_calls(
    booking_class: Callable[[Callable[[str], None]], Any], answers: Answers, num_rows: int = 2
) -> list[Call]:
    """Serve requests, in the order of `answers`, by overlapped steps, which an object of the reader's class books.

    The device is as late as it can be: it runs a step when the host waits for it.
    """
    rows = Rows(num_rows)
    booking = booking_class(rows.free)
    waiting, running, calls = list(answers), dict[str, int](), list[Call]()
    in_flight: dict[str, tuple[int, int]] = {}  # row, and place in the answer
    while waiting or running or in_flight:
        while waiting and rows.free_rows:
            rows.take(waiting[0])
            running[waiting.pop(0)] = 0
        ahead = {rid: (rows.of[rid], place) for rid, place in running.items() if place < len(answers[rid])}
        if not ahead and not in_flight:
            break  # those that wait get no row, because none is given back
        running = {rid: place + 1 for rid, place in running.items()}
        wrong = [
            f"step {len(calls)} runs {rid} in row {row}, which is {rows.names[row]}'s now"
            for rid, (row, _) in in_flight.items()
            if rows.names[row] != rid
        ]
        arrived = {rid: answers[rid][place] for rid, (_, place) in in_flight.items()}
        rows.freed, delivered = [], {}
        if in_flight:
            ended = {rid for rid, (_, place) in in_flight.items() if place == end_of(answers[rid])}
            tokens = {rid: token for rid, token in arrived.items() if token is not None}
            ends = ended | {rid for rid, token in tokens.items() if token == STOP}
            delivered = booking.book(tokens, ends, set(ahead))
            running = {rid: place for rid, place in running.items() if rid not in ended}
        calls.append(Call({rid: row for rid, (row, _) in ahead.items()}, arrived, delivered, rows.freed, wrong))
        in_flight = ahead
    return calls


def end_of(answer: Sequence[str | None]) -> int:
    """Return the place of the last token that belongs to an answer."""
    return list(answer).index(STOP) if STOP in answer else len(answer) - 1


class ReferenceBooking:
    """As the engine books: what has ended in vain steps is given back first."""

    def __init__(self, free: Callable[[str], None]) -> None:
        self.free, self.ended = free, list[str]()

    def book(self, tokens: dict[str, str], ends: set[str], ahead: set[str]) -> dict[str, str]:
        """Return the tokens of requests that had not ended."""
        dropped, self.ended = self.ended, []
        for rid in dropped:
            self.free(rid)
        delivered = {rid: token for rid, token in tokens.items() if rid not in dropped}
        for rid in delivered:
            if rid in ends and rid in ahead:
                self.ended.append(rid)
            elif rid in ends:
                self.free(rid)
        return delivered


LATE: tuple[Answers, ...] = (
    {"ann": ["I", "see", ".", "And"], "bob": ["a", "long", "answer", "to", "its", "end"], "cid": ["ok", ".", "Then"]},
    {"ann": ["no", "stop"], "bob": ["one"], "cid": ["two", "words"], "dan": ["three"]},
    {"ann": ["ok", ".", "."], "bob": ["a", "b", "c", "d", "e"], "cid": ["x", "y", "z"], "dan": ["u", "v", "w"]},
    {"ann": ["ok", ".", None], "bob": ["a", "b", "c", "d", "e"], "cid": ["x", "y", "z"]},
    {"ann": ["ok", "."], "bob": ["yes", ".", "I"], "cid": ["."], "dan": [".", "No"]},
)


@grader("m6_overlap.ended")
def grade_ended(booking_class: type) -> str:
    """The lab's class, repaired: `book(tokens, ends, ahead)` returns tokens, and calls `free` once per request."""
    rng, cases = Random(0), list(LATE)
    for _ in range(100):
        answers: dict[str, list[str | None]] = {}
        for number in range(rng.randrange(1, 8)):
            answer: list[str | None] = [rng.choice("abcde") for _ in range(rng.randrange(1, 5))]
            behind: list[list[str | None]] = [[], [STOP], [STOP, "f"], [STOP, STOP], [STOP, None]]
            answers[f"r{number}"] = answer + rng.choice(behind)
        cases.append(answers)
    for answers in cases:
        _compare_calls(late_calls(booking_class, answers), late_calls(ReferenceBooking, answers))
    return "By hand and 100 times at random: no token after an end, and each row given back once, when nothing uses it."


def _compare_calls(calls: Sequence[Call], wanted: Sequence[Call]) -> None:
    ended, freed = set[str](), set[str]()
    for step, (got, right) in enumerate(zip(calls, wanted, strict=False)):
        where = f"Step {step} is booked, and step {step + 1} is in flight with {', '.join(got.launched) or 'nothing'}: "
        if not isinstance(got.delivered, dict):
            raise Mismatch(f"book() returns the tokens to deliver by request, yours returned {short(got.delivered)}.")
        for rid, token in got.delivered.items():
            if rid in ended:
                raise Mismatch(
                    f"{where}{rid} is given {token!r}, a token after its end. Step {step} was launched before the end "
                    "was known; drop what it has computed for a request that has ended."
                )
        if got.delivered != right.delivered:
            raise Mismatch(f"{where}{short(right.delivered)} is to be delivered, yours is {short(got.delivered)}.")
        _compare_freed(got, right, freed, where)
        freed |= set(got.freed)
        ended |= {rid for rid, token in got.delivered.items() if token == STOP}
    assert len(calls) == len(wanted), "equal calls lead to equal calls"


def _compare_freed(got: Call, right: Call, freed: set[str], where: str) -> None:
    for rid in got.freed:
        if rid in freed or got.freed.count(rid) > 1:
            raise Mismatch(f"{where}the row of {rid} is given back twice, so two requests will get it.")
        if rid not in right.freed:
            why = "That step still uses the row: keep it until the step has arrived."
            raise Mismatch(f"{where}the row of {rid} is given back. {why if rid in got.launched else 'It runs on.'}")
    for rid in right.freed:
        if rid not in got.freed:
            unusable = " Its row in this step was unusable, so it has no token." if got.arrived[rid] is None else ""
            raise Mismatch(f"{where}nothing uses the row of {rid} any more, and it is not given back.{unusable}")


# --- the second lab: a bucket that does not exist ---------------------------------------------------------------------

MOSTS = (12, 100, 200, 8, 1, 2, 3, 5, 16, 17, 256, 257)


@grader("m6_overlap.sizes")
def grade_sizes(sizes_up_to: Callable[[int], list[int]]) -> str:
    """`sizes_up_to(most)`: sizes of the buckets, ascending: 1, 2, 4, 8, every eighth number, and `most` itself."""
    for most in (*MOSTS, *range(1, 300)):
        got, wanted = sizes_up_to(most), sizes_of_the_engine(most)
        if not isinstance(got, list | tuple):
            raise Mismatch(f"A list of sizes is wanted, yours is {short(got)}.")
        if list(got) == wanted:
            continue
        case = f"max_num_seqs={most}: the sizes end with {wanted[-3:]}, yours with {list(got)[-3:]}."
        if not got or max(got) < most:
            raise Mismatch(f"{case} A step of {most} requests has no bucket. `most` is always one itself.")
        if max(got) > most:
            raise Mismatch(
                f"{case} The inputs have room for {most} rows, and no step has more: {max(got)} is too large."
            )
        if list(got) != sorted(set(got)):
            raise Mismatch(f"{case} Each size is there once, in ascending order; yours are {short(list(got))}.")
        odd = (sorted(set(wanted) - set(got)) or sorted(set(got) - set(wanted)))[0]
        what = "is missing" if odd in wanted else "is one too many"
        raise Mismatch(f"max_num_seqs={most}: the sizes are {short(wanted)}, yours {short(list(got))}: {odd} {what}.")
    return "For every max_num_seqs up to 299 the sizes of the engine: each step has a bucket, and few rows are padded."


@grader("m6_overlap.bucket")
def grade_bucket(bucket_of: Callable[[int, list[int]], int | None]) -> str:
    """`bucket_of(num_tokens, sizes)`: the smallest size that holds so many tokens; None if none does."""
    for most in MOSTS:
        sizes = sizes_of_the_engine(most)
        for num_tokens in range(1, most + 3):
            wanted = next((size for size in sizes if size >= num_tokens), None)
            case = f"{num_tokens} tokens, sizes {short(sizes)}: the bucket is {wanted}, yours "
            try:
                got = bucket_of(num_tokens, list(sizes))
            except (StopIteration, IndexError) as error:
                raise Mismatch(
                    f"{case}raises {type(error).__name__}. A larger step runs eagerly: return None."
                ) from None
            if got == wanted:
                continue
            hint = ""
            if wanted is None:
                hint = " No bucket holds it, so it runs eagerly: return None."
            elif got is not None and got < num_tokens:
                hint = " The step does not fit."
            elif got in sizes:
                hint = " A smaller one is large enough, and computes fewer rows for nothing."
            raise Mismatch(f"{case}{short(got)}.{hint}")
    return "Every number of tokens finds the smallest bucket that holds it, and larger steps find none."


# --- the third lab: a buffer that moved -------------------------------------------------------------------------------

PAGE_SIZE = 4
LIMITS = GraphLimits(max_num_seqs=6, max_model_len=32)
NUM_SLOTS = PAGE_SIZE + LIMITS.max_num_seqs * LIMITS.max_model_len
"""Slots of page 0, which belongs to no request, and of all requests."""


def decode(kv: Tensor, ids: Tensor, positions: Tensor, slots: Tensor, seq_lens: Tensor, block_tables: Tensor) -> Tensor:
    """Run a decode step of the simplest model: the KV of a token is one number, attention the sum of a row's KV.

    `kv` is `[num_slots]`, the result `[num_rows]`, all int64.
    """
    kv[slots] = 100 * ids + positions
    places = torch.arange(block_tables.shape[1] * PAGE_SIZE)
    held = kv[block_tables[:, places // PAGE_SIZE] * PAGE_SIZE + places % PAGE_SIZE]
    return (held * (places < seq_lens[:, None])).sum(1)


class CapturedStep:
    """`decode` as a CUDA graph runs it: on the tensors that it was captured with, whatever is in their place now."""

    def __init__(self, kv: Tensor, inputs: StepInputs, bucket: Bucket) -> None:
        layout = inputs.metadata(bucket)
        ids, positions, slots = inputs.tokens[:, : bucket.num_tokens]
        self.tensors = (kv, ids, positions, slots, layout.seq_lens, layout.block_tables)

    def replay(self) -> Tensor:
        """Run the step again."""
        return decode(*self.tensors)


class DecodeStep(NamedTuple):
    """A decode step as the scheduler makes it."""

    input_ids: Tensor
    positions: Tensor
    metadata: AttentionMetadata
    bucket: Bucket


def decode_steps(sizes: Sequence[int], rng: Random | None = None) -> Iterator[DecodeStep]:
    """Yield steps of so many requests, each with one new token: the first ones, or with `rng` any."""
    lengths, pages = [0] * LIMITS.max_num_seqs, LIMITS.max_model_len // PAGE_SIZE
    tokens = rng or Random(0)
    for size in sizes:
        rows = list(range(size)) if rng is None else rng.sample(range(LIMITS.max_num_seqs), size)
        context = [lengths[row] for row in rows]
        tables = [[1 + row * pages + page for page in range(max(context) // PAGE_SIZE + 1)] for row in rows]
        slots = [PAGE_SIZE + row * LIMITS.max_model_len + length for row, length in zip(rows, context, strict=True)]
        metadata = AttentionMetadata.build([1] * size, context, np.array(tables, dtype=np.int32), np.array(slots))
        for row in rows:
            lengths[row] += 1
        ids = torch.tensor([tokens.randrange(1, 100) for _ in rows])
        bucket = next(each for each in reversed(LIMITS.buckets()) if each.num_tokens >= size)
        yield DecodeStep(ids, torch.tensor(context), metadata, bucket)


@grader("m6_overlap.pad")
def grade_pad(inputs_class: type[StepInputs]) -> str:
    """The lab's class, repaired: `pad_batch` fills the tensors that were captured."""
    for turn in range(20):
        rng = Random(turn)
        sizes = (6, 3, 1, 5, 6, 2) if not turn else [rng.randrange(1, 7) for _ in range(12)]
        inputs = inputs_class(LIMITS, PAGE_SIZE, torch.device("cpu"))
        for tensor in inputs.tensors():
            tensor.fill_(PAGE_SIZE + 3)  # what other steps have left
        kv, expected = (torch.zeros(NUM_SLOTS, dtype=torch.int64) for _ in range(2))
        before = {name: tensor for name, tensor in vars(inputs).items() if isinstance(tensor, Tensor)}
        addresses = {name: tensor.data_ptr() for name, tensor in before.items()}
        captured = {bucket: CapturedStep(kv, inputs, bucket) for bucket in LIMITS.buckets()}
        for step in decode_steps(sizes, rng if turn else None):
            inputs.pad_batch(step.input_ids, step.positions, step.metadata, step.bucket)
            for name, address in addresses.items():
                now = getattr(inputs, name)
                if not isinstance(now, Tensor) or now.data_ptr() != address:
                    raise Mismatch(
                        f"A step of {len(step.input_ids)} requests: your pad_batch puts another tensor in the place of "
                        f"`{name}`. The captured step reads the old one, at its address, where the values of an "
                        "earlier step are. Copy into it."
                    )
            _check_padded(step, *captured[step.bucket].tensors[1:])
            layout = step.metadata
            eager = decode(
                expected, step.input_ids, step.positions, layout.slot_mapping, layout.seq_lens, layout.block_tables
            )
            got = captured[step.bucket].replay()[: len(eager)]
            assert torch.equal(got, eager) and torch.equal(kv[PAGE_SIZE:], expected[PAGE_SIZE:])
    return "20 times at random: all addresses stay, and every replay gives what the step gives eagerly."


def _check_padded(
    step: DecodeStep, ids: Tensor, positions: Tensor, slots: Tensor, lens: Tensor, tables: Tensor
) -> None:
    size, layout = len(step.input_ids), step.metadata
    case = f"A step of {size} requests, in the bucket of {step.bucket.num_tokens}: "
    for name, filled, wanted in (
        ("ids", ids, step.input_ids),
        ("positions", positions, step.positions),
        ("slots", slots, layout.slot_mapping),
        ("seq_lens", lens, layout.seq_lens),
        ("block_tables", tables[:, : layout.block_tables.shape[1]], layout.block_tables),
    ):
        if not torch.equal(filled[:size], wanted):
            raise Mismatch(f"{case}its {name} are {short(wanted.tolist())}, yours {short(filled[:size].tolist())}.")
    if bool((slots[size:] >= PAGE_SIZE).any()):
        raise Mismatch(
            f"{case}a padded token writes to slot {int(slots[size:].max())}, which belongs to a request: the slots of "
            "padded tokens are 0, in page 0."
        )
    if lens[size:].any():
        raise Mismatch(
            f"{case}a padded row has the length {int(lens[size:].max())} of an earlier step, and so many tokens are "
            "read for nothing: padded rows have no length."
        )


# --- exercises: tokens that are not known -----------------------------------------------------------------------------


@grader("m6_overlap.futures")
def grade_futures(futures_class: type) -> str:
    """A class with `placeholders(rows)`, `store(placeholders, token_ids)` and `resolve(input_ids)`."""
    _grade_first_steps(futures_class(4))
    for turn in range(30):
        _grade_traffic(futures_class, Random(turn), num_rows=1 + turn % 4)
    return "By hand and 30 times at random: every placeholder becomes the newest token of its own request."


def _grade_first_steps(futures: Any) -> None:
    first = futures.placeholders([0, 3])
    if not isinstance(first, list | tuple) or len(first) != 2:
        raise Mismatch(f"placeholders([0, 3]) is a list with one number per row, yours {short(first)}.")
    if any(isinstance(each, bool) or not isinstance(each, int) or each >= 0 for each in first):
        raise Mismatch(f"placeholders([0, 3]): all are negative, because 0 is a token. Yours: {short(first)}.")
    if first[0] == first[1]:
        raise Mismatch(f"placeholders([0, 3]): two requests have the same placeholder, {first[0]}.")
    futures.store(list(first), [11, 12])
    asked = [5, first[1], 0, first[0]]
    before, got = list(asked), futures.resolve(asked)
    if asked != before:
        raise Mismatch("resolve() changes its argument. Return a new list.")
    if not isinstance(got, list | tuple) or list(got) != [5, 12, 0, 11]:
        raise Mismatch(
            f"Stored are 11 and 12 for the placeholders {list(first)}; then {asked} is [5, 12, 0, 11], yours "
            f"{short(got)}. Known tokens stay, and a placeholder becomes its token."
        )


class Launched(NamedTuple):
    """A step whose input has placeholders, and what it computes."""

    number: int
    rows: list[int]
    input_ids: list[int]
    known: list[tuple[int, int, int] | None]
    """The placeholder, the token and the step of each row's input; None for a prompt."""
    placeholders: list[int]
    token_ids: list[int]


def _grade_traffic(futures_class: type, rng: Random, *, num_rows: int) -> None:
    """Launch 200 steps, each before the device has run the one before."""
    futures, newest = futures_class(num_rows), dict[int, tuple[int, int, int]]()
    in_flight, used = None, set[int]()
    for number in range(200):
        rows = sorted(rng.sample(range(num_rows), rng.randrange(1, num_rows + 1)))
        if num_rows > 1 and number % 20 < 12:
            rows = [row for row in rows if row] or [1]  # row 0 waits for twelve steps
        leaves = rows.pop() if len(rows) > 1 and rng.random() < 0.2 else None  # retracted, and the next has a prompt
        known = [newest.get(row) for row in rows]
        input_ids = [rng.randrange(100) if each is None else each[0] for each in known]
        placeholders = list(futures.placeholders(list(rows)))
        token_ids = [1000 + 10 * number + row for row in rows]
        newest |= {row: (place, token, number) for row, place, token in zip(rows, placeholders, token_ids, strict=True)}
        if in_flight is not None:
            _run_on_device(futures, in_flight, num_rows)
        if leaves in newest:
            place, token, when = newest.pop(leaves)
            if (mine := list(futures.resolve([place]))) != [token]:
                raise Mismatch(
                    f"Row {leaves} is retracted at step {number}: {place} is the token {token} of step {when}, which "
                    f"has arrived; yours is {short(mine)}."
                )
        in_flight = Launched(number, rows, input_ids, known, placeholders, token_ids)
        used |= set(placeholders)
    if len(used) > 8 * num_rows:
        raise Mismatch(
            f"{len(used)} different placeholders for {num_rows} rows in 200 steps: the table of tokens grows without "
            "end. On a device it is a tensor of fixed size."
        )


def _run_on_device(futures: Any, step: Launched, num_rows: int) -> None:
    got = list(futures.resolve(list(step.input_ids)))
    for row, asked, known, mine in zip(step.rows, step.input_ids, step.known, got, strict=True):
        if known is None and mine != asked:
            raise Mismatch(f"{num_rows} rows, step {step.number}: {asked} is a token of a prompt, yours is {mine}.")
        if known is not None and mine != known[1]:
            raise Mismatch(
                f"{num_rows} rows, step {step.number}: the input of row {row} is {asked}, the token {known[1]} of step "
                f"{known[2]}; yours is {mine}. A request may wait for {step.number - known[2] - 1} steps, and its "
                "token must still be there."
            )
    futures.store(step.placeholders, step.token_ids)


# --- exercises: the loop ----------------------------------------------------------------------------------------------


class FakeCore:
    """An engine core that records its calls. Batches are numbers; `needy` ones need the tokens of the step before on
    the host. None among them: nothing can be scheduled until all steps are booked."""

    def __init__(self, batches: Sequence[int | None], needy: Sequence[int] = ()) -> None:
        self.left, self.needy = list(batches), set(needy)
        self.log: list[str] = []
        self.num_open = self.num_empty = 0

    def schedule(self) -> int | None:
        """Return the next batch, or None if there is none now."""
        while self.left and self.left[0] is None and not self.num_open:
            self.left.pop(0)
        if not self.left or self.left[0] is None:
            self.num_empty += 1
            if self.num_empty > 100:
                raise Mismatch("schedule() has returned None 100 times: your loop does not end.")
            return None
        batch = self.left.pop(0)
        self.log.append(f"schedule {batch}")
        return batch

    def must_wait(self, batch: int) -> bool:
        """Return whether the tokens of the step before must be on the host before this batch is launched."""
        return batch in self.needy

    def launch(self, batch: int) -> str:
        """Start a step, and return it."""
        if batch is None:
            raise Mismatch("launch(None): where schedule() returns None there is nothing to launch.")
        self.num_open += 1
        self.log.append(f"launch {batch}")
        return f"step {batch}"

    def arrive(self, step: str) -> str:
        """Wait for a step, and return its tokens."""
        self.log.append(f"arrive {_number(step, 'arrive')}")
        return step.replace("step", "tokens")

    def book(self, step: str, tokens: str) -> None:
        """Update the requests of a step."""
        number = _number(step, "book")
        if tokens != f"tokens {number}":
            raise Mismatch(f"book(step, tokens): step {number} is booked with {short(tokens)}.")
        self.num_open -= 1
        self.log.append(f"book {number}")


def _number(step: object, verb: str) -> str:
    name, _, number = str(step).partition(" ")
    if name != "step":
        raise Mismatch(f"{verb}() takes a step, as launch() returned it; yours is {short(step)}.")
    return number


def reference_loop(core: Any) -> None:
    """Overlap steps as the engine does."""
    before = None
    while (batch := core.schedule()) is not None or before is not None:
        tokens = None
        if before is not None and batch is not None and core.must_wait(batch):
            tokens = core.arrive(before)
        step = None if batch is None else core.launch(batch)
        if before is not None:
            core.book(before, core.arrive(before) if tokens is None else tokens)
        before = step


LOOPS: tuple[tuple[list[int | None], list[int]], ...] = (
    ([1, 2, 3], []),
    ([1], []),
    ([], []),
    ([1, 2, 3, 4], [3]),
    ([1, 2, None, 3, 4], []),
    ([1, 2, None, 3, None, 4], [3, 4]),
    ([1, 2, 3], [1, 2, 3]),
)


@grader("m6_overlap.loop")
def grade_loop(overlapped: Callable[[Any], None]) -> str:
    """`overlapped(core)`: the order of schedule, launch, arrive and book, until nothing is left."""
    rng, cases = Random(0), list(LOOPS)
    for _ in range(50):
        batches: list[int | None] = []
        for number in range(1, rng.randrange(2, 9)):
            batches += [number] if rng.random() < 0.8 else [None, number]
        cases.append((batches, [number for number in range(9) if rng.random() < 0.2]))
    for batches, needy in cases:
        mine, right = FakeCore(batches, needy), FakeCore(batches, needy)
        overlapped(mine)
        reference_loop(right)
        if mine.log != right.log:
            raise Mismatch(_loop_hint(mine.log, right.log, needy))
    return "57 runs: each step is launched before the one before is booked, those that must wait do, and none is lost."


def _loop_hint(mine: list[str], right: list[str], needy: Sequence[int]) -> str:
    at = next((i for i, (got, wanted) in enumerate(zip(mine, right, strict=False)) if got != wanted), None)
    if at is None:
        at = min(len(mine), len(right))
    got, wanted = (log[at] if at < len(log) else "the end" for log in (mine, right))
    so_far = f"After {', '.join(right[:at][-3:]) or 'nothing'} comes {wanted!r}, yours has {got!r}."
    verb, number = wanted.partition(" ")[0], got.partition(" ")[2]
    if got == "the end":
        return f"{so_far} A step in flight has tokens, too, and more can be scheduled when it is booked: go on."
    if verb == "launch" and got.startswith("book"):
        return f"{so_far} The tokens are there: launch first, then book, so that the device has work meanwhile."
    if verb in ("launch", "schedule"):
        return f"{so_far} While the host waits and books, the device has nothing to do: that is the normal order."
    if verb == "arrive" and got.startswith("launch") and int(number) in needy:
        return f"{so_far} This batch needs the tokens of the step before: must_wait({number}) is True."
    return f"{so_far} Each step is launched, arrives and is booked once, and at most one is in flight behind it."
