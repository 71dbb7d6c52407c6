"""Graders of the labs and exercises in m6's second notebook, and groups of engines with a planted bug."""

import dataclasses
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import msgspec
import numpy as np
import torch

from m3_paged_attention.kv_cache_spec import KVCacheConfig, KVCacheSpec
from m3_paged_attention.kv_storage import KVStorage
from m6_multimodal_pd import CacheConfig, DisaggregationConfig, LLMEngine, RequestOutput, SamplingParams
from m6_multimodal_pd.disaggregation.page_store import PageStore
from m6_multimodal_pd.disaggregation.poll import KVReceiver, KVSender
from m6_multimodal_pd.disaggregation.runtime.in_process import InProcessSegments
from m6_multimodal_pd.disaggregation.staging import StagedSource, StagedTarget
from m6_multimodal_pd.errors import TransferError
from m6_multimodal_pd.multimodal.mrope import Block, get_rope_index

try:  # in the checkout, for the tests
    from notebooks.checks import Mismatch, check, grader, short, show_source
    from notebooks.checks_m6 import KV_TOKENS, ONE_MODEL, new_engine
    from notebooks.shapes import Shape, picture
except ModuleNotFoundError:  # beside the notebook
    from checks import Mismatch, check, grader, short, show_source  # type: ignore[no-redef]
    from checks_m6 import KV_TOKENS, ONE_MODEL, new_engine  # type: ignore[no-redef]
    from shapes import Shape, picture  # type: ignore[no-redef]

__all__ = ["check", "line_of", "new_engine", "new_group", "outputs_of", "show_source"]


def new_group(
    *,
    delta: Callable[[np.ndarray], int] | None = None,
    source: type[StagedSource] | None = None,
    num_frames: int = 8,
    debug: bool = False,
    **configs: Any,
) -> LLMEngine:
    """Return a group of a prefill and a decode engine in this process, which run in turns and share their weights with
    all engines made here.

    `delta`: computes `mrope_position_delta` from the positions of a prompt with pictures, on the decode side. `source`:
    class of the prefill side's transport, with `num_frames` frames. `debug`: send a checksum with each page.
    """
    memory = {"cache_config": CacheConfig(page_size=4, max_total_tokens=KV_TOKENS, debug=debug)}
    engine = LLMEngine(
        parts=ONE_MODEL, disaggregation_config=DisaggregationConfig(transport="in_process"), **(memory | configs)
    )
    core: Any = engine.engine_core
    engines = core.router.links.engines
    if delta is not None:
        _replace_delta(engines["decode-0"].side, delta)
    if source is not None:
        prefill = engines["prefill-0"]
        own = prefill.side.transport
        prefill.side.transport = source(own.store, own.segments, num_frames=num_frames, checksums=own.checksums)
    return engine


def _replace_delta(side: Any, delta: Callable[[np.ndarray], int]) -> None:
    """Replace the delta of every prompt with pictures that `side` receives."""
    begin = side.begin

    def begin_with_delta(message: Any) -> None:
        media = message.job.media
        if media is not None:
            changed = dataclasses.replace(media, mrope_position_delta=int(delta(media.mrope_positions)))
            message = msgspec.structs.replace(message, job=msgspec.structs.replace(message.job, media=changed))
        begin(message)

    side.begin = begin_with_delta


def outputs_of(
    group: LLMEngine, prompts: Sequence[list[int]], params: SamplingParams, *, most_steps: int = 500
) -> list[RequestOutput | None]:
    """Return the last output of each prompt; None for one that has not finished after `most_steps`."""
    rids, last = [group.add_request(prompt, params) for prompt in prompts], {}
    for _ in range(most_steps):
        if not group.has_unfinished_requests():
            break
        last.update(group.step())
    return [last[rid] if rid in last and last[rid].finished else None for rid in rids]


def line_of(record: Any, rid: str) -> tuple[str, str] | None:
    """Return the engine of an event about a request, or `router`, and its sentence; None for other requests' events."""
    event = record.event
    if rid not in event.request_ids() and rid not in getattr(event, "rids", ()):
        return None
    if event.kind == "reported":
        return event.engine, event.text
    return "router", event.explain()


# --- the labs ---------------------------------------------------------------------------------------------------------


@grader("m6_pd.delta")
def grade_delta(delta: Callable[[np.ndarray], int]) -> str:
    """The lab's delta, repaired: the position of the first token after a prompt minus its place."""
    cases: list[tuple[int, list[Block], str]] = [
        (6, [], "A text's delta is 0: the answer begins at its place."),
        (12, [Block(2, 3, 3)], "Nine tokens take three positions: the answer begins six earlier."),
        (30, [Block(5, 3, 3), Block(16, 2, 4)], "Every picture adds to it."),
        (12, [Block(2, 2, 5)], "A picture takes as many positions as its longer side has tokens."),
        (10, [Block(2, 4, 2)], "A prompt may end with a picture: then the largest position is not time's."),
    ]
    rng = Random(0)
    for _ in range(100):
        at, blocks = 0, []
        for _ in range(rng.randrange(4)):
            blocks.append(Block(at + rng.randrange(1, 5), rng.randrange(1, 6), rng.randrange(1, 6)))
            at = blocks[-1].end
        cases.append((at + rng.randrange(1, 5), blocks, ""))
    for num_tokens, blocks, hint in cases:
        positions, wanted = get_rope_index(num_tokens, blocks)
        got = delta(positions.copy())
        if isinstance(got, bool) or not isinstance(got, int | np.integer) or got != wanted:
            layout = ", ".join(f"a picture of {b.height} x {b.width} from {b.start} on" for b in blocks) or "no picture"
            off = isinstance(got, int | np.integer) and abs(got - wanted) == 1
            more = f"{f' {hint}' if hint else ''}{' Yours is one off.' if off else ''}"
            raise Mismatch(
                f"{num_tokens} tokens, {layout}: the largest position is {positions.max()}, so the answer begins at "
                f"{positions.max() + 1}, {wanted} from its place; yours is {short(got)}.{more}"
            )
    shown = picture(Shape("big", "red", "star", "left"), Shape("small", "blue", "circle", "bottom"))
    with new_engine() as alone, new_group(delta=delta) as group:
        if _answer_of(alone, shown) != _answer_of(group, shown):
            raise Mismatch("The numbers agree, and yet the answer of two engines is not that of one.")
    return "By hand and 100 prompts at random; and two engines answer about a picture as one does."


def _answer_of(engine: LLMEngine, shown: Any) -> Any:
    content = [{"type": "image", "image": shown}, {"type": "text", "text": "Describe the picture."}]
    output = engine.chat([{"role": "user", "content": content}], SamplingParams(max_tokens=40))
    if output.error is not None:
        raise output.error
    return output.token_ids


@grader("m6_pd.rooms")
def grade_rooms(rooms_class: type) -> str:
    """The lab's rooms, repaired: `enter(rid, make)` returns a room, `find(room)` its receiver."""
    rng = Random(0)
    for turn in range(60):
        rooms, made, given = rooms_class(), {}, []
        rids = ["ann", "bob"] if not turn else [f"r{i}" for i in range(rng.randrange(1, 5))]
        for _ in range(4 if not turn else rng.randrange(2, 12)):
            rid = rng.choice(rids)
            seen: list[int] = []

            def make(room: int, seen: list[int] = seen) -> KVReceiver:
                seen.append(room)
                return KVReceiver(room, num_tokens=16, page_size=4, on_change=lambda *_: None)

            room = rooms.enter(rid, make)
            _check_room(rooms, room, seen, rid, given, made)
            given.append(room)
            made[rid] = (room, rooms.find(room))
        if rooms.find(max(given) + 1000) is not None:
            raise Mismatch("No request has entered this room: find returns None.")
    return (
        "60 times at random: no room is used twice, late messages find no receiver, and all other receivers are found."
    )


def _check_room(rooms: Any, room: Any, seen: list[int], rid: str, given: list[int], made: dict[str, Any]) -> None:
    if isinstance(room, bool) or not isinstance(room, int):
        raise Mismatch(f"A room is a whole number, yours is {short(room)}.")
    if room in given:
        raise Mismatch(
            f"{rid} gets room {room}, which an attempt had before. Late messages of that attempt are accepted as "
            f"{rid}'s: a room is never used again, not even for the same request."
        )
    if seen != [room]:
        raise Mismatch(f"enter({rid!r}, make) makes one receiver, for its own room {room}; yours were for {seen}.")
    found = rooms.find(room)
    if not isinstance(found, KVReceiver) or found.room != room:
        raise Mismatch(f"find({room}) must return the receiver that was made for room {room}; yours is {short(found)}.")
    if rid in made:
        before, old = made[rid]
        late = rooms.find(before)
        if late is not None and not late.state.is_final:
            raise Mismatch(
                f"{rid} is in room {room} now, and room {before}, of its first attempt, still accepts messages: "
                f"remove its receiver, or let it fail."
            )
        if late is not None and late is not old:
            raise Mismatch(f"A message to the old room {before} reaches another receiver.")
    for other, (its_room, receiver) in made.items():
        if other != rid and rooms.find(its_room) is not receiver:
            raise Mismatch(f"{rid} enters, and {other} is not found in its room {its_room} any more.")


PAGES = 64


@grader("m6_pd.frames")
def grade_frames(source_class: type[StagedSource]) -> str:
    """The lab's source, repaired: each page arrives as it was sent, however late it is read."""
    spec = KVCacheSpec(block_size=4, num_layers=1, num_kv_heads=1, head_dim=4, dtype=torch.float32)
    here, there = (KVStorage(KVCacheConfig(spec=spec, num_blocks=PAGES), device=torch.device("cpu")) for _ in range(2))
    for page in range(PAGES + 1):
        here.blocks[:, page] = page
    segments = InProcessSegments()
    source, target = source_class(PageStore([here]), segments, num_frames=8), StagedTarget(PageStore([there]), segments)
    rng, in_transit, has_waited = Random(0), [], False
    for _ in range(400):
        if rng.random() < 0.6:
            pages = rng.sample(range(1, PAGES + 1), rng.randrange(1, 5))
            ticket = source.send("decode", pages)
            held = sum(len(own) for own, _ in in_transit)
            if ticket is None:
                has_waited = True
                if held + len(pages) <= 8 and not in_transit:
                    raise Mismatch(
                        f"All 8 frames were released, and {len(pages)} pages find no free frames: nothing is freed."
                    )
            else:
                if held + len(pages) > 8:
                    raise Mismatch(
                        f"{held} pages are in 8 frames and not read yet, and {len(pages)} more were sent: they "
                        f"overwrite others. A frame is free when its target has read it (`release`), not before."
                    )
                in_transit.append((pages, ticket))
        elif in_transit:
            pages, ticket = in_transit.pop(0)
            target.receive("prefill", ticket, pages).write()
            for page in pages:
                if not bool((there.blocks[:, page] == page).all()):
                    came = int(there.blocks[0, page].flatten()[0])
                    why = (
                        "They were sent together, in another order: the frames of a ticket are in the order of `pages`."
                        if came in pages
                        else "It was copied into a frame before the other page in that frame was read. When `send` "
                        "returns the pages are only copied; a frame is free only when its target has read it "
                        "(`release`)."
                    )
                    raise Mismatch(f"Page {came} arrives as page {page}. {why}")
            source.release("decode", ticket.number)
    if not has_waited:
        raise Mismatch("No `send` had to wait for free frames, so pages that were not read yet were overwritten.")
    prompt = [300 + 7 * i % 3000 for i in range(90)]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    with new_engine() as alone, new_group(source=source_class) as group:
        (output,) = outputs_of(group, [prompt], params)
        if output is None:
            raise Mismatch("All pages arrive, and yet a request waits without end: not all frames are freed.")
        if alone.generate(prompt, params).token_ids != output.token_ids:
            raise Mismatch("All pages arrive, and yet the answer is another one.")
    return (
        "400 times at random through eight frames: every page arrives as it was sent, and no request waits without end."
    )


# --- exercises: pages that may be sent --------------------------------------------------------------------------------

PROGRESS: tuple[tuple[int, int, int, int, str], ...] = (
    (20, 1, 35, 4, "20 tokens are five whole pages; the first is cached on the other side."),
    (22, 0, 35, 4, "A page that is half full waits: the rest of it is computed in the next step."),
    (35, 6, 35, 4, "With the end of the prompt its last page is sent, full or not."),
    (32, 0, 32, 4, "A prompt of whole pages has no further page."),
    (3, 0, 35, 4, "No page is full yet."),
    (20, 5, 35, 4, "All full pages were sent already."),
    (35, 9, 35, 4, "Everything was sent already."),
    (8, 3, 35, 4, "The other side may have more pages than are computed here."),
    (1, 0, 1, 16, "One token is one page."),
)


@grader("m6_pd.pages_ready")
def grade_pages_ready(pages_ready: Callable[[int, int, int, int], range]) -> str:
    """`pages_ready(num_computed, next_page, num_tokens, page_size)`: the pages that may be sent now."""
    rng, cases = Random(0), list(PROGRESS)
    for _ in range(300):
        num_tokens, page_size = rng.randrange(1, 70), rng.choice((1, 4, 16))
        computed = rng.choice((num_tokens, rng.randrange(num_tokens + 1)))
        cases.append((computed, rng.randrange(-(-num_tokens // page_size) + 1), num_tokens, page_size, ""))
    for computed, next_page, num_tokens, page_size, hint in cases:
        sender = KVSender(0, num_tokens=num_tokens, page_size=page_size, on_change=lambda *_: None)
        sender.next_page = next_page
        wanted = list(sender.pages_ready(computed, at_most=num_tokens))
        got = pages_ready(computed, next_page, num_tokens, page_size)
        if not isinstance(got, range | list | tuple) or list(got) != wanted:
            raise Mismatch(
                f"{computed} of {num_tokens} tokens are computed, pages of {page_size}, page {next_page} is next: "
                f"{short(wanted)} may be sent, yours {short(got if not isinstance(got, range) else list(got))}."
                f"{f' {hint}' if hint else ''}"
            )
    return "By hand and 300 times at random: the pages that the engine sends."


# --- exercises: bytes -------------------------------------------------------------------------------------------------

MOVED: tuple[tuple[int, int, int, int, str], ...] = (
    (32, 0, 16, 4096, "Two whole pages."),
    (20, 0, 16, 4096, "Whole pages are sent, the last one too, though it is not full."),
    (20, 16, 16, 4096, "A page that the other side has is not sent again."),
    (36, 32, 4, 4096, "Nine pages, of which it has eight."),
    (32, 32, 16, 4096, "If it has all pages, nothing is sent."),
    (1, 0, 16, 100, "One token is a page."),
)


@grader("m6_pd.bytes_moved")
def grade_bytes_moved(bytes_moved: Callable[[int, int, int, int], int]) -> str:
    """`bytes_moved(num_tokens, num_cached, page_size, bytes_per_token)`: the bytes that a transfer sends."""
    rng, cases = Random(0), list(MOVED)
    for _ in range(200):
        page_size, num_tokens = rng.choice((1, 4, 16)), rng.randrange(1, 300)
        cached = rng.randrange(num_tokens // page_size + 1) * page_size
        cases.append((num_tokens, cached, page_size, rng.choice((4096, 131072)), ""))
    for num_tokens, cached, page_size, per_token, hint in cases:
        transfer = KVSender(0, num_tokens=num_tokens, page_size=page_size, on_change=lambda *_: None)
        transfer.preallocated(cached)
        wanted = (transfer.end_page - transfer.next_page) * page_size * per_token
        got = bytes_moved(num_tokens, cached, page_size, per_token)
        if isinstance(got, bool) or not isinstance(got, int) or got != wanted:
            if got == wanted and isinstance(got, float):
                hint = "Bytes are a whole number: divide with //."
            elif got == (num_tokens - cached) * per_token:
                hint = "That is the size of the tokens; whole pages are sent."
            raise Mismatch(
                f"{num_tokens} tokens, {cached} of them cached, pages of {page_size}, {per_token:,} bytes a token: "
                f"{wanted:,} bytes, yours {short(got)}.{f' {hint}' if hint else ''}"
            )
    return "By hand and 200 times at random: as many bytes as the engine sends."


# --- exercises: the state of a transfer -------------------------------------------------------------------------------

Message = tuple[Any, ...]
"""`("chunk", number, first_page, num_pages)`, `("first_token", num_chunks)` or `("lost",)`."""
TRANSFERS: tuple[tuple[int, list[Message], str], ...] = (
    (4, [], "No message has arrived."),
    (4, [("chunk", 0, 0, 2)], "The first pages are here, others are missing."),
    (
        4,
        [("chunk", 0, 0, 2), ("chunk", 1, 2, 2)],
        "All pages are here, but the first token with the number of chunks is missing.",
    ),
    (4, [("chunk", 0, 0, 2), ("chunk", 1, 2, 2), ("first_token", 2)], "Token, chunks and pages: everything is here."),
    (4, [("chunk", 0, 0, 2), ("first_token", 2), ("chunk", 1, 2, 2)], "The token may overtake the last chunk."),
    (4, [("first_token", 1), ("chunk", 0, 0, 4)], "The token may come first of all."),
    (
        4,
        [("chunk", 0, 0, 2), ("chunk", 0, 0, 2), ("chunk", 1, 2, 2), ("first_token", 2)],
        "A chunk that comes twice counts once.",
    ),
    (4, [("chunk", 0, 0, 2), ("chunk", 1, 3, 1)], "A page is left out: no later chunk can bring it."),
    (4, [("chunk", 1, 2, 2)], "Chunk 1 before chunk 0: something was lost."),
    (4, [("chunk", 0, 0, 5)], "The prompt has four pages."),
    (4, [("first_token", 1), ("chunk", 0, 0, 2)], "One chunk is announced, and it does not bring all pages."),
    (
        4,
        [("chunk", 0, 0, 2), ("lost",), ("chunk", 1, 2, 2), ("first_token", 2)],
        "Failed is final, whatever comes later.",
    ),
    (4, [("chunk", 0, 0, 4), ("first_token", 1), ("lost",)], "Success is final, too."),
    (4, [("first_token", 1), ("first_token", 3), ("chunk", 0, 0, 4)], "The first announced number counts."),
    (4, [("first_token", 5)], "Five chunks cannot bring four pages: each brings at least one."),
    (0, [("first_token", 0)], "With the whole prompt cached only the token is sent."),
    (4, [("first_token", 0)], "Without a chunk four pages cannot come."),
    (4, [("chunk", 0, 0, 0)], "A chunk has at least one page."),
)


@grader("m6_pd.receive")
def grade_receive(receive: Callable[[int, list[Message]], str]) -> str:
    """`receive(num_pages, messages)`: the state after all messages."""
    rng, cases = Random(0), list(TRANSFERS)
    for _ in range(400):
        cases.append((*_random_messages(rng), ""))
    for num_pages, messages, hint in cases:
        wanted, got = _state_of(num_pages, messages), receive(num_pages, list(messages))
        if got != wanted:
            came = ", ".join(map(str, messages)) or "none"
            raise Mismatch(
                f"{num_pages} pages are missing; messages: {came}. The state is {wanted!r}, yours {short(got)}."
                f"{f' {hint}' if hint else ''}"
            )
    return "By hand and 400 times at random, with messages that were lost, came twice or out of turn."


def _random_messages(rng: Random) -> tuple[int, list[Message]]:
    num_pages, at, messages = rng.randrange(1, 7), 0, []
    while at < num_pages:
        count = rng.randrange(1, num_pages - at + 1)
        messages.append(("chunk", len(messages), at, count))
        at += count
    messages.insert(rng.randrange(len(messages) + 1), ("first_token", len(messages)))
    for _ in range(rng.choice((0, 0, 1, 2))):
        match rng.randrange(4):
            case 0:
                messages.insert(rng.randrange(len(messages) + 1), rng.choice(messages))
            case 1 if len(messages) > 1:
                messages.pop(rng.randrange(len(messages)))
            case 2:
                rng.shuffle(messages)
            case _:
                messages.insert(rng.randrange(len(messages) + 1), ("lost",))
    return num_pages, messages


def _state_of(num_pages: int, messages: Sequence[Message]) -> str:
    receiver = KVReceiver(0, num_tokens=max(num_pages, 1), page_size=1, on_change=lambda *_: None)
    receiver.preallocated(0 if num_pages else 1)
    for kind, *numbers in messages:
        try:
            if kind == "lost":
                receiver.fail("lost")
            elif kind == "first_token":
                receiver.first_token_arrived(*numbers)
            else:
                number, first, count = numbers
                pages = range(first, first + count)
                if receiver.expects(number, pages):
                    receiver.arrived(pages)
        except TransferError:
            receiver.fail("impossible")
        receiver.complete()
    return {"FAILED": "failed", "SUCCESS": "success"}.get(receiver.state.name, "waiting")


# --- exercises: the tokens that a caller gets -------------------------------------------------------------------------

DELIVERIES: tuple[tuple[list[int], int, list[int], list[int] | None, str], ...] = (
    ([], 0, [7], [7], "The first token."),
    ([7], 1, [8, 9], [8, 9], "The next ones."),
    ([7, 8], 0, [7, 8, 9], [9], "A retry that sends known tokens again: only the new ones are returned."),
    ([7, 8], 1, [8], [], "Nothing new."),
    ([7, 8], 0, [7], [], "An old message, late: nothing new."),
    ([7], 2, [9], None, "A token is missing: the caller must not get the ones after it."),
    ([7, 8], 1, [5, 9], None, "A known token is sent with another value: that is another answer."),
    ([7, 8], 2, [], [], "Without tokens nothing is new."),
    ([], 1, [], None, "They begin after a token that the caller does not have."),
)


@grader("m6_pd.deliver")
def grade_deliver(deliver: Callable[[list[int], int, list[int]], list[int]]) -> str:
    """`deliver(known, first, token_ids)`: the new tokens of the caller; ValueError for a gap or another answer."""
    rng, cases = Random(0), list(DELIVERIES)
    for _ in range(300):
        answer = [rng.randrange(4) for _ in range(rng.randrange(1, 9))]
        num_known = rng.randrange(len(answer) + 1)
        first = rng.randrange(len(answer) + 1)
        sent = answer[first : rng.randrange(first, len(answer)) + 1] if first < len(answer) else []
        if rng.random() < 0.2 and sent:
            sent[rng.randrange(len(sent))] = 9
        wanted: list[int] | None = None
        if first <= num_known and answer[first:num_known][: len(sent)] == sent[: num_known - first]:
            wanted = sent[num_known - first :]
        cases.append((answer[:num_known], first, sent, wanted, ""))
    for known, first, token_ids, wanted, hint in cases:
        before = list(known)
        try:
            got: Any = deliver(before, first, list(token_ids))
            raised = False
        except ValueError:
            got, raised = None, True
        case = f"Known: {known}; sent: {token_ids} from place {first} on"
        if before != known:
            raise Mismatch(f"{case}: your function changes `known`, which belongs to the caller. Work on a copy.")
        more = f" {hint}" if hint else ""
        if (wanted is None) != raised:
            right = "a ValueError" if wanted is None else str(wanted)
            raise Mismatch(
                f"{case}: that is {right}; yours {'raises one' if raised else f'returns {short(got)}'}.{more}"
            )
        if not raised and (not isinstance(got, list | tuple) or list(got) != wanted):
            raise Mismatch(f"{case}: {wanted} are new, yours {short(got)}.{more}")
    return "By hand and 300 times at random: nothing twice, nothing missing, nothing of another answer."
