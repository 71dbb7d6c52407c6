"""Graders of the labs and exercises in m7's notebook. Its server, clients and engines are in `journey.py`."""

import asyncio
import functools
import gc
import math
import weakref
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from random import Random
from typing import Any

from transformers import AutoTokenizer

from m1_single_request.detokenizer import IncrementalDetokenizer
from m1_single_request.output_processor import OutputProcessor
from m1_single_request.outputs import CompletionOutput, RequestMetrics, RequestOutput
from m1_single_request.request import Request, Sequence as RequestSequence
from m1_single_request.sampling_params import SamplingParams
from m1_single_request.stop_checker import StopChecker
from m6_multimodal_pd.config import DEFAULT_MODEL

try:  # in the checkout, for the tests
    from notebooks.checks import Mismatch, check, grader, short, show_source
    from notebooks.checks_m6 import new_engine
except ModuleNotFoundError:  # beside the notebook
    from checks import Mismatch, check, grader, short, show_source  # type: ignore[no-redef]
    from checks_m6 import new_engine  # type: ignore[no-redef]

__all__ = ["check", "new_engine", "outputs_of_text", "show_source", "tokenizer"]


# --- what graders use -------------------------------------------------------------------------------------------------


class Scripted:
    """An engine without a model: a step gives every running request one token of its `max_tokens`."""

    def __init__(self) -> None:
        self.deliver: Callable[[dict[str, RequestOutput]], None] = lambda outputs: None
        self.running: dict[str, list[int]] = {}
        self.aborted: list[str] = []

    def add(self, rid: str, prompt: Any, params: SamplingParams) -> None:
        """Queue a request."""
        self.running[rid] = [0, params.max_tokens or 0]

    def abort(self, rid: str) -> None:
        """Abort a request."""
        self.aborted.append(rid)
        self.running.pop(rid, None)

    def step(self) -> None:
        """Run a step, and deliver its outputs."""
        outputs = {}
        for rid, counts in list(self.running.items()):
            counts[0] += 1
            outputs[rid] = output_of(rid, *counts)
            if outputs[rid].finished:
                del self.running[rid]
        self.deliver(outputs)


def output_of(rid: str, num_tokens: int, max_tokens: int) -> RequestOutput:
    """Return the output of a request that has so many tokens."""
    reason = "length" if num_tokens == max_tokens else None
    completion = CompletionOutput(0, "x" * num_tokens, tuple(range(num_tokens)), None, None, reason)
    metrics = RequestMetrics(0.0, 0.0, None, 1, 0, num_tokens)
    return RequestOutput(rid, None, (1,), None, (completion,), reason is not None, metrics)


def in_a_loop(work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Run a coroutine function in an event loop of its own; a notebook has one that runs already."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: asyncio.run(work())).result()


async def settled(task: "asyncio.Task[Any]") -> bool:
    """Let all other tasks run until they wait, and return whether this one is done."""
    for _ in range(20):
        await asyncio.sleep(0)
    return task.done()


# --- the labs ---------------------------------------------------------------------------------------------------------


@grader("m7.zombie")
def grade_zombie(front_class: Callable[[Any], Any]) -> str:
    """The lab's front, repaired: a request whose reader is gone is aborted, and no other one."""
    in_a_loop(lambda: _grade_zombie(front_class))
    return "Readers leave before the first token, in the middle and at the end: each abort is sent, and no other one."


async def _grade_zombie(front_class: Callable[[Any], Any]) -> None:
    for num_read, leaves in ((1, "cancelled"), (0, "cancelled"), (3, "closed"), (5, "at the end"), (5, "closed")):
        engine = Scripted()
        front = front_class(engine)
        engine.deliver = front.deliver
        when = f"after {num_read} of 5 tokens" if num_read else "before the first token"
        seen: dict[str, int] = {"ann": 0, "bob": 0}
        stop_at = num_read if leaves == "closed" else None
        ann, bob = (asyncio.create_task(_read(front, rid, seen, at)) for rid, at in (("ann", stop_at), ("bob", None)))
        await settled(ann)
        for _ in range(num_read):
            engine.step()
            await settled(ann)
        if leaves == "cancelled":
            ann.cancel()
        if not await settled(ann):
            raise Mismatch(f"ann's reader is {leaves} {when}, and its task does not end.")
        _check_left(front, engine, f"{leaves} {when}", has_ended=num_read == 5)
        front.deliver({"ann": output_of("ann", 4, 5)})  # of the step that ran meanwhile
        while engine.running:
            engine.step()
            await settled(bob)
        await asyncio.wait([bob], timeout=1.0)
        if not bob.done() or bob.exception() or seen["bob"] != 5:
            raise Mismatch(f"bob reads on while ann's reader is {leaves} {when}: he gets {seen['bob']} of 5 tokens.")
        if "bob" in engine.aborted:
            raise Mismatch("bob's answer has ended, and then it is aborted: his id may be another request's by now.")
        if left := [rid for rid in ("ann", "bob") if rid in front.mailboxes]:
            raise Mismatch(f"All readers are gone, and the mailbox of {' and '.join(left)} is kept: memory grows.")


async def _read(front: Any, rid: str, seen: dict[str, int], stop_at: int | None) -> None:
    async with aclosing(front.stream(rid, "a prompt", SamplingParams(max_tokens=5))) as outputs:
        async for output in outputs:
            seen[rid] = len(output.token_ids)
            if seen[rid] == stop_at:
                return


def _check_left(front: Any, engine: Scripted, leaves: str, *, has_ended: bool) -> None:
    if "bob" in engine.aborted and not has_ended:
        raise Mismatch("ann's reader leaves, and bob's request is aborted: he still reads.")
    if has_ended:
        if engine.aborted:
            raise Mismatch(
                f"The answer of {engine.aborted[0]} has ended, and then it is aborted: the id may be another request's "
                f"by now. An abort is for unfinished requests."
            )
        return
    if "ann" not in engine.aborted:
        known = "has" if "ann" in front.mailboxes else "does not have"
        raise Mismatch(
            f"ann's reader is {leaves}, and the engine gets no abort: it computes the rest of her answer for "
            f"nobody. The front {known} her mailbox by now."
        )
    if engine.aborted.count("ann") > 1:
        raise Mismatch("ann's request is aborted twice.")


@functools.cache
def tokenizer() -> Any:
    """Return the tokenizer of the model that ships."""
    return AutoTokenizer.from_pretrained(DEFAULT_MODEL)


def outputs_of_text(text: str, *stop: str) -> list[RequestOutput]:
    """Return the outputs of an engine whose model writes `text`, one for each token."""
    params = SamplingParams(max_tokens=999, stop=list(stop))
    sequence = RequestSequence("req", [1, 2, 3], params, IncrementalDetokenizer(tokenizer()))
    request = Request("req", None, sequence, 0, 0.0)
    checker = StopChecker(eos_token_ids=[tokenizer().eos_token_id], max_model_len=2000)
    outputs = []
    for token_id in [*tokenizer().encode(text, add_special_tokens=False), tokenizer().eos_token_id]:
        verdict = checker.check(sequence, [token_id])
        sequence.add_token_id(token_id, None)
        sequence.text_end, request.finish_reason = verdict.text_end, verdict.finish_reason
        outputs.append(OutputProcessor().make_output(request))
        if request.finish_reason is not None:
            break
    return outputs


ANSWERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("a plain text", ()),
    ("Grüße 🙂 from 日本", ()),
    ("🙂🙂 twice, and é", ()),
    ("The answer is 42. Observation: none", ("Observation:",)),
    ("no stop string, but its beginning: Obs", ("Observation:",)),
    ("日本 is Japan STOP and more", ("STOP",)),
)


@grader("m7.half_character")
def grade_half_character(chunks_class: Callable[[Any], Any]) -> str:
    """The lab's chunks, repaired: together they are the answer, at any moment, for readers of any speed."""
    rng = Random(0)
    for turn in range(40):
        text, stop = ANSWERS[turn % len(ANSWERS)]
        outputs = outputs_of_text(text, *stop)
        if turn >= len(ANSWERS):  # a slow reader gets some of them
            outputs = [output for output in outputs[:-1] if rng.random() < 0.5] + outputs[-1:]
        chunks, sent = chunks_class(tokenizer()), ""
        for output in outputs:
            chunk = chunks.next(output)
            if not isinstance(chunk, str):
                raise Mismatch(f"The text of a chunk is a str, yours is {short(chunk)}.")
            before, sent = sent, sent + chunk
            if sent != output.text:
                raise Mismatch(_wrong_chunk(before, chunk, output, stop))
    return "Forty answers with characters of several tokens, stop strings and slow readers: chunks and whole agree."


def _wrong_chunk(before: str, chunk: str, output: RequestOutput, stop: Sequence[str]) -> str:
    case = f"{short(before)} is sent, the output has {short(output.text)}, and the next chunk is {short(chunk)}."
    sent = before + chunk
    if "\ufffd" in chunk:
        return f"{case} A token of it is a part of a character: what was sent cannot be taken back."
    if before and chunk.startswith(before):
        return f"{case} A chunk has what is new, and not everything so far."
    if output.text.startswith(sent):
        return f"{case} The output has more, and it is not sent: a part of the answer comes late, or never."
    if stop and sent.startswith(output.text):
        return f"{case} What may begin a stop string is no part of the text yet, and a stop string never is."
    return f"{case} The chunks together must be the text so far."


@grader("m7.slow_reader")
def grade_slow_reader(queues_class: Callable[[], Any]) -> str:
    """The lab's queues, repaired: a put never waits, and a reader gets the newest output once."""
    in_a_loop(lambda: _grade_slow_reader(queues_class))
    return "300 steps beside a reader that does not read: no put waits, one output is kept, and the last one comes."


async def _grade_slow_reader(queues_class: Callable[[], Any]) -> None:
    queues, steps = queues_class(), 300
    for rid in ("fast", "slow"):
        queues.open(rid)
    kept: list[weakref.ref[RequestOutput]] = []
    for step in range(1, steps + 1):
        newest = {rid: output_of(rid, step, steps) for rid in ("slow", "fast")}
        kept.append(weakref.ref(newest["slow"]))
        for rid in sorted(newest, reverse=bool(step % 2)):
            await _put(queues, rid, newest[rid], f"The slow reader has read nothing, and step {step} is over")
        got = await _take(queues, "fast", f"step {step} is over, and the fast reader takes")
        if got is not newest["fast"]:
            raise Mismatch(f"After step {step} the fast reader gets {_named(got)}, and not its own newest output.")
        del newest, got
    gc.collect()
    if (alive := sum(each() is not None for each in kept)) > 2:
        raise Mismatch(
            f"The slow reader has read nothing for {steps} steps, and {alive} of its outputs are kept: each has "
            f"everything so far, so one is enough."
        )
    got = await _take(queues, "slow", "the slow reader takes at last")
    if got.request_id != "slow" or not got.finished:
        raise Mismatch(f"The slow reader takes at last, and gets {_named(got)}: the newest one, its end, is missing.")
    await _grade_waiting(queues_class())


async def _grade_waiting(queues: Any) -> None:
    """A reader waits for an output that is new, and gets it once."""
    queues.open("ann")
    waiting = asyncio.create_task(queues.take("ann"))
    if await settled(waiting):
        raise Mismatch(f"There is no output yet, and take() returns {short(waiting.result())}: it must wait.")
    first = output_of("ann", 1, 9)
    await _put(queues, "ann", first, "A reader waits")
    if not await settled(waiting) or waiting.result() is not first:
        raise Mismatch("A reader waits in take(), an output is put, and the reader does not get it.")
    again = asyncio.create_task(queues.take("ann"))
    if await settled(again):
        raise Mismatch("An output was taken, no other one came, and take() returns once more: it must wait.")
    again.cancel()


async def _put(queues: Any, rid: str, output: RequestOutput, when: str) -> None:
    task = asyncio.create_task(queues.put(rid, output))
    if not await settled(task):
        task.cancel()
        raise Mismatch(f"{when}: put() waits, and with it the outputs of all other requests.")
    task.result()


async def _take(queues: Any, rid: str, when: str) -> RequestOutput:
    task = asyncio.create_task(queues.take(rid))
    if not await settled(task):
        task.cancel()
        raise Mismatch(f"{when[:1].upper()}{when[1:]}: take() waits, though an output is there.")
    found: Any = task.result()
    if not isinstance(found, RequestOutput):
        raise Mismatch(f"take() returns the output that was put, yours returns {short(found)}.")
    return found


def _named(output: RequestOutput) -> str:
    return f"the output of step {len(output.token_ids)} of the {output.request_id} reader"


# --- exercises --------------------------------------------------------------------------------------------------------

STREAMS: tuple[tuple[list[bytes], list[str], str], ...] = (
    ([b"data: a\n\ndata: b\n\n"], ["a", "b"], "One read may bring several events."),
    ([b"data: a", b"b\n", b"\n"], ["ab"], "One event may need several reads."),
    ([b": keep-alive\n\ndata: a\n\n"], ["a"], "A line with a colon in front is a comment. No data line, no event."),
    ([b"data: one\ndata: two\n\n"], ["one\ntwo"], "Several data lines of one event are joined by a line break."),
    ([b"data: a\n\ndata: b\n"], ["a"], "An event ends with an empty line; the last one has none."),
    (["data: ü".encode()[:-1], "ü\n\n".encode()[1:]], ["ü"], "A read may end inside a character."),
    ([b"event: error\ndata: a\nid: 7\n\n"], ["a"], "Other fields are not part of the data."),
    ([b"data:a\n\n"], ["a"], "One space behind the colon is left out if it is there."),
    ([], [], "A stream may be empty."),
)


@grader("m7.read_events")
def grade_read_events(read_events: Callable[[list[bytes]], list[str]]) -> str:
    """`read_events(reads)`: the data of each event in a stream whose bytes came in these reads."""
    rng, cases = Random(0), list(STREAMS)
    for _ in range(200):
        data = [rng.choice(["{}", "[DONE]", "日本", "a\nb", "🙂", ""]) for _ in range(rng.randrange(5))]
        parts = []
        for each in data:
            parts.append(": ping\n\n" * rng.randrange(2))
            parts += [f"data: {line}\n" for line in each.split("\n")] + ["\n"]
        stream = "".join(parts).encode()
        cuts = sorted(rng.randrange(len(stream) + 1) for _ in range(rng.randrange(6)))
        reads = [stream[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
        cases.append((reads, data, ""))
    for reads, wanted, hint in cases:
        got = read_events(list(reads))
        if not isinstance(got, list) or got != wanted:
            more = f" {hint}" if hint else ""
            raise Mismatch(f"The reads {short(reads)} have the events {short(wanted)}; yours: {short(got)}.{more}")
    return "By hand and 200 streams, cut at random bytes."


Buckets = list[tuple[float, int]]
COUNTED: tuple[tuple[float, Buckets, float | None, str], ...] = (
    (0.5, [(1.0, 0), (2.0, 10), (math.inf, 10)], 1.5, "Half of the ten lie in the lower half of their bucket."),
    (0.5, [(1.0, 4), (2.0, 10), (math.inf, 10)], 1.0 + 1 / 6, "Counts are cumulative: the bucket has 6 of its own."),
    (0.25, [(1.0, 4), (2.0, 8), (math.inf, 8)], 0.5, "The first bucket begins at 0."),
    (0.99, [(1.0, 1), (2.0, 2), (math.inf, 100)], 2.0, "Nothing is known above the last finite bound: return it."),
    (0.5, [(1.0, 0), (math.inf, 0)], None, "Nothing was observed: None."),
    (1.0, [(1.0, 5), (2.0, 5), (math.inf, 5)], 1.0, "The bucket is the first one whose count reaches the rank."),
)


@grader("m7.quantile")
def grade_quantile(quantile: Callable[[float, Buckets], float | None]) -> str:
    """`quantile(q, buckets)`: a quantile of a histogram, as `histogram_quantile` of Prometheus estimates it."""
    rng, cases = Random(0), list(COUNTED)
    for _ in range(200):
        bounds = sorted(rng.sample(range(1, 60), rng.randrange(1, 6)))
        counts = sorted(rng.randrange(40) for _ in range(len(bounds) + 1))
        buckets = list(zip([*map(float, bounds), math.inf], counts, strict=True))
        q = rng.uniform(0.01, 1.0)
        cases.append((q, buckets, _quantile(q, buckets), ""))
    for q, buckets, wanted, hint in cases:
        got = quantile(q, list(buckets))
        is_number = isinstance(got, int | float)
        if is_number != (wanted is not None) or (
            wanted is not None and not math.isclose(got or 0.0, wanted, rel_tol=1e-9)
        ):
            shown = ", ".join(f"{count} up to {bound:g}" for bound, count in buckets)
            more = f" {hint}" if hint else ""
            value = "None" if wanted is None else f"{wanted:.4g}"
            raise Mismatch(f"q={q:.3g} of {shown}: it is {value}, yours {short(got)}.{more}")
    return "By hand and 200 histograms at random."


def _quantile(q: float, buckets: Buckets) -> float | None:
    rank = q * buckets[-1][1]
    if not rank:
        return None
    lower, below = 0.0, 0
    for bound, count in buckets:
        if count >= rank:
            return lower if math.isinf(bound) else lower + (bound - lower) * (rank - below) / (count - below)
        lower, below = bound, count
    raise AssertionError("the last bucket has all")
