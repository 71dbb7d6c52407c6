"""Contract of m7's mailbox: a slow reader of a stream gets the newest output, delays nobody, and costs no memory."""

import asyncio
import gc
import weakref
from collections.abc import Callable, Coroutine, Mapping
from contextlib import aclosing
from functools import wraps
from random import Random
from typing import Any

from msgspec.structs import asdict

from m1_single_request.outputs import CompletionOutput, RequestMetrics, RequestOutput
from m7_serving import SamplingParams
from tests.contracts.part import Broken, Part, same
from tests.m6_multimodal_pd.shipped import MANY_TOKENS, PROMPTS, answers
from tests.m7_serving.shipped import text_llm

PART = Part(
    name="mailbox",
    target="m7_serving.mailbox:Mailbox",
    lesson="docs/m7_serving.md#mailbox-one-place-for-each-request",
    starter="MyMailbox",
)

WAITS = "it waits"
LONGEST_S = 0.2
"""Within this time a `take` returns that need not wait."""
METRICS = RequestMetrics(0.0, None, None, 3, 0, 0)


def output(request_id: str, text: str) -> RequestOutput:
    """An output with this text so far; a full stop is the end."""
    is_last = text.endswith(".")
    completion = CompletionOutput(0, text, tuple(range(len(text))), None, None, "stop" if is_last else None)
    return RequestOutput(request_id, None, (1, 2, 3), None, (completion,), is_last, METRICS)


def texts(outputs: Any) -> Any:
    """What a `take` has returned: the text of each output, by index."""
    if not isinstance(outputs, Mapping):
        return outputs
    return {index: each.outputs[0].text if isinstance(each, RequestOutput) else each for index, each in outputs.items()}


class Box:
    """A mailbox, and what was done with it."""

    def __init__(self, part: Any, *request_ids: str) -> None:
        self.mailbox = part(list(request_ids))
        self.done = [f"Mailbox({list(request_ids)})"]

    @property
    def on(self) -> str:
        """What was done, as a learner would write it; the last of it."""
        if len(self.done) <= 8:
            return "; ".join(self.done)
        return f"{self.done[0]}; ...; {'; '.join(self.done[-6:])}"

    def put(self, request_id: str, *newer: str) -> None:
        """Put outputs of a request, one after the other."""
        for text in newer:
            self.done.append(f"put({request_id!r}: {text!r})")
            self.mailbox.put(output(request_id, text))

    async def take(self) -> Any:
        """What `take` returns, in texts; `WAITS` if it does not return."""
        self.done.append("take()")
        return await self.ended(asyncio.ensure_future(self.mailbox.take()))

    async def ended(self, taking: "asyncio.Future[Any]") -> Any:
        """What a `take` that has begun returns."""
        await asyncio.wait({taking}, timeout=LONGEST_S)
        if taking.done():
            return texts(taking.result())
        taking.cancel()
        return WAITS

    async def begin(self) -> "asyncio.Future[Any]":
        """A `take` that has to wait."""
        self.done.append("take() in a task")
        taking = asyncio.ensure_future(self.mailbox.take())
        await turns()
        return taking

    async def check(self, wanted: Any, hint: str) -> None:
        """Compare what a `take` returns."""
        same(await self.take(), wanted, on=self.on, hint=hint)


async def turns() -> None:
    """Let the event loop run all that can run."""
    for _ in range(10):
        await asyncio.sleep(0)


def in_a_loop(behaviour: Callable[[Any], Coroutine[Any, Any, None]]) -> Callable[[Any], None]:
    """Run a behaviour in an event loop of its own."""

    @wraps(behaviour)
    def run(part: Any) -> None:
        asyncio.run(behaviour(part))

    return run


@in_a_loop
async def test_what_was_put_is_taken(part: Any) -> None:
    """`take` returns the output that was put, by the index of its request."""
    box = Box(part, "a", "b")
    box.put("b", "x")
    await box.check({1: "x"}, "'b' is the second request, so its index is 1.")


@in_a_loop
async def test_a_newer_output_takes_the_place_of_one_that_was_not_read(part: Any) -> None:
    """Of several outputs of a request only the newest is returned: it has everything so far."""
    box = Box(part, "a", "b")
    box.put("a", "x", "xy")
    box.put("b", "u")
    box.put("a", "xyz")
    hint = "One place for each request: a newer output replaces the one in it."
    await box.check({0: "xyz", 1: "u"}, hint)


@in_a_loop
async def test_an_output_is_taken_once(part: Any) -> None:
    """The next `take` returns what is new since the last one, and what was taken stays as it was."""
    box = Box(part, "a", "b")
    box.put("a", "x")
    box.put("b", "u")
    first = await box.mailbox.take()
    box.done.append("take()")
    box.put("a", "xy")
    on = f"{box.on}; the result of the take() before"
    same(texts(first), {0: "x", 1: "u"}, on=on, hint="The reader has this dictionary now: begin a new one.")
    await box.check({0: "xy"}, "'b' has nothing new: its output was taken before.")


@in_a_loop
async def test_take_waits_for_an_output(part: Any) -> None:
    """Without a new output `take` waits, without stopping the event loop, and the next `put` ends the wait."""
    box = Box(part, "a")
    taking = await box.begin()
    hint = "Nothing has come and the request goes on: wait for a `put`, for example for an `asyncio.Event`."
    same(texts(taking.result()) if taking.done() else WAITS, WAITS, on=box.on, hint=hint)
    box.put("a", "x")
    same(await box.ended(taking), {0: "x"}, on=box.on, hint="A `put` must wake the `take` that waits.")
    taking = await box.begin()
    hint = "An empty result is the end of the stream. Here nothing is new, and the end has not come: wait again."
    same(texts(taking.result()) if taking.done() else WAITS, WAITS, on=box.on, hint=hint)
    box.put("a", "xy", "xyz")
    hint = "Both were put before the event loop came back to `take`: it returns the newest."
    same(await box.ended(taking), {0: "xyz"}, on=box.on, hint=hint)


async def whole_life(part: Any) -> None:
    """A mailbox from its first output to the end."""
    box = Box(part, "a")
    taking = await box.begin()
    box.put("a", "x")
    same(await box.ended(taking), {0: "x"}, on=box.on, hint="A `put` must wake the `take` that waits.")
    box.put("a", "xy", "xy.")
    await box.check({0: "xy."}, "The request has ended, and its last output was not read yet.")
    for _ in range(2):
        await box.check({}, "Nothing will come any more: do not wait.")


@in_a_loop
async def test_the_last_output_is_never_lost(part: Any) -> None:
    """The last output of a request is returned like the others, and after it every `take` returns an empty result."""
    await whole_life(part)
    await Box(part).check({}, "A call without requests has no outputs.")


@in_a_loop
async def test_it_ends_with_the_last_request(part: Any) -> None:
    """The result is empty only after the last output of all requests."""
    box = Box(part, "a", "b")
    box.put("a", "x.")
    await box.check({0: "x."}, "The last output of one of the requests.")
    taking = await box.begin()
    hint = "'b' goes on: an empty result would end its stream."
    same(texts(taking.result()) if taking.done() else WAITS, WAITS, on=box.on, hint=hint)
    box.put("b", "u.")
    same(await box.ended(taking), {1: "u."}, on=box.on, hint="'b' ends last, and wakes the reader.")
    await box.check({}, "Both have ended.")


@in_a_loop
async def test_unfinished_requests_are_known(part: Any) -> None:
    """`unfinished` has the index of each request whose last output has not been put; then it is removed."""
    box = Box(part, "a", "b", "c")
    on = f"{box.on}; unfinished"
    same(dict(box.mailbox.unfinished), {"a": 0, "b": 1, "c": 2}, on=on, hint="Requests are numbered from 0.")
    box.put("b", "x", "x.")
    on = f"{box.on}; unfinished"
    hint = "If the reader goes away, the requests that are named here are aborted: 'b' has ended already."
    same(dict(box.mailbox.unfinished), {"a": 0, "c": 2}, on=on, hint=hint)
    await box.take()
    same(dict(box.mailbox.unfinished), {"a": 0, "c": 2}, on=f"{box.on}; unfinished", hint="`take` changes nothing.")


async def raised(taking: Any) -> Any:
    """The error that a `take` raises, or its result."""
    try:
        return texts(await asyncio.wait_for(taking, LONGEST_S))
    except TimeoutError:
        return WAITS
    except ValueError as error:
        return error


@in_a_loop
async def test_an_error_ends_it(part: Any) -> None:
    """After `fail` the next `take` raises the error in place of unread outputs, and no request is unfinished."""
    error = ValueError("the engine was lost")
    box = Box(part, "a", "b")
    box.put("a", "x")
    box.put("b", "u.")
    box.mailbox.fail(error)
    box.done.append("fail(error)")
    hint = "The requests have ended: there is nothing to abort."
    same(dict(box.mailbox.unfinished), {}, on=f"{box.on}; unfinished", hint=hint)
    box.done.append("take()")
    hint = "The error comes before outputs that were not read."
    same(await raised(box.mailbox.take()), error, on=box.on, hint=hint)


@in_a_loop
async def test_an_error_ends_a_wait(part: Any) -> None:
    """`fail` wakes a `take` that waits, with the error."""
    error = ValueError("the engine was lost")
    box = Box(part, "a")
    taking = await box.begin()
    box.mailbox.fail(error)
    box.done.append("fail(error)")
    same(await raised(taking), error, on=box.on, hint="No `put` will come any more: `fail` must wake the reader.")


class Traced(RequestOutput):
    """An output whose end can be seen."""


@in_a_loop
async def test_it_keeps_one_output_of_each_request(part: Any) -> None:
    """However many outputs a reader has not read, the mailbox keeps one of each request."""
    mailbox = part(["a", "b"])
    alive: list[weakref.ref[Any]] = []
    for number in range(500):
        made = output("ab"[number % 2], "x" * (number + 1))
        traced = Traced(**asdict(made))
        alive.append(weakref.ref(traced))
        mailbox.put(traced)
    del traced, made
    gc.collect()
    kept = sum(reference() is not None for reference in alive)
    hint = "An output has everything so far, so one that is older is never needed again."
    if kept > 2:
        raise Broken("2 requests, 250 outputs of each, and no take()", "2 outputs in memory", f"{kept}", hint)


@in_a_loop
async def test_it_is_right_in_any_order(part: Any) -> None:
    """Whatever is put and taken in whatever order, each `take` returns what a dictionary of the newest has."""
    rng = Random(1)
    for _ in range(30):
        ids = ["a", "b", "c"][: rng.randrange(1, 4)]
        box, newest, going = Box(part, *ids), dict[int, str](), dict.fromkeys(ids, "")
        taking: asyncio.Future[Any] | None = None
        while going or newest:
            if going and (taking is not None or rng.random() < 0.6):
                for _ in range(rng.randrange(1, 3)):
                    name = rng.choice(sorted(going))
                    going[name] += rng.choice("xyz.")
                    box.put(name, going[name])
                    newest[ids.index(name)] = going[name]
                    if going[name].endswith("."):
                        del going[name]
                    if not going:
                        break
            if taking is not None or newest:
                found = await (box.take() if taking is None else box.ended(taking))
                same(found, newest, on=box.on)
                taking, newest = None, {}
            elif going:
                taking = await box.begin()
                same(taking.done(), False, on=f"{box.on}; is it done?", hint="Nothing is new: the reader waits.")
        await box.check({}, "All have ended.")


async def read(llm: Any, prompt: str, pause_s: float) -> list[RequestOutput]:
    """All outputs that a reader gets who pauses after each."""
    found: list[RequestOutput] = []
    async with aclosing(llm.generate(prompt, SamplingParams(max_tokens=MANY_TOKENS))) as outputs:
        async for each in outputs:
            found.append(each)
            if len(found) > 2 * MANY_TOKENS:
                hint = "The stream has no end: after the last output the result is empty."
                raise Broken(f"a reader of {prompt!r}", f"{MANY_TOKENS} outputs at most", f"{len(found)}", hint)
            await asyncio.sleep(pause_s)
    return found


@in_a_loop
async def test_slow_and_fast_readers_get_whole_answers(part: Any) -> None:
    """Of an engine a fast and a slow reader get their whole answers, the slow one in fewer outputs."""
    await whole_life(part)  # if that fails, an engine takes long to show it
    async with text_llm() as llm:
        readers = [read(llm, prompt, pause_s) for prompt, pause_s in zip(PROMPTS, (0.0, 0.1), strict=True)]
        fast, slow = await asyncio.wait_for(asyncio.gather(*readers), 5)
    on = "an engine, a reader who reads at once, and one who pauses for 0.1 s after each output"
    found = tuple(each[-1].token_ids if each else () for each in (fast, slow))
    same(found, answers(), on=on, hint="The last output that each of them gets is the whole answer.")
    hint = "Outputs that were not read are replaced, and do not wait in a queue."
    if len(slow) >= MANY_TOKENS:
        raise Broken(on, f"the slow one gets fewer than {MANY_TOKENS} outputs", str(len(slow)), hint)
