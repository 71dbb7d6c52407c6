"""Contract of the prefill adder of m5: which requests start in a step, and with how many tokens of their prompts."""

from collections.abc import Sequence
from random import Random
from typing import Any

from m1_single_request.tracer import Tracer
from m4_radix_cache.request import Req
from tests.contracts.part import Part, same
from tests.m4_radix_cache.caches import allocator_of, make_cache
from tests.m4_radix_cache.reqs import fill, make_req
from tests.support.engines import Recorder

PART = Part(
    name="prefill_adder",
    target="m5_chunked_prefill_spec.prefill_adder:PrefillAdder",
    lesson="docs/m5_chunked_prefill_spec.md#work-and-prefilladder-the-next-piece-then-new-requests",
    starter="MyPrefillAdder",
    role="prefill_adder",
    variant="m5_chunked_prefill_spec-pieces-23-4",
    changes={"cache_config": {"max_total_tokens": 440}},
)

PLENTY = 10**6


class Scene:
    """A memory of `num_pages` pages with running requests in it, and an adder. It writes down what is done to them.

    `running`: for each running request its tokens with KV, and its `max_tokens`; each has one output token.
    `cached`: tokens of prompts that are cached. `ratio`: expected share of the running requests' tokens to come.
    """

    def __init__(
        self,
        part: Any,
        *,
        num_pages: int = 1000,
        page_size: int = 1,
        running: Sequence[tuple[int, int]] = (),
        cached: Sequence[Sequence[int]] = (),
        ratio: float = 1.0,
        tokens: int = PLENTY,
        rows: int = PLENTY,
        **settings: Any,
    ) -> None:
        self.cache, self.page_size = make_cache(page_size=page_size, num_pages=num_pages), page_size
        for prompt in cached:
            fill(self.cache, prompt)
        self.running = [self.started(-1 - number, *each) for number, each in enumerate(running)]
        tracer = Tracer()
        self.recorder = Recorder(tracer)
        limits = {"rem_chunk_tokens": None, "chunk_alignment": 1, "is_chunked": True, "has_whole_step": True}
        self.adder = part(
            tree_cache=self.cache,
            token_to_kv_pool_allocator=allocator_of(self.cache),
            running=self.running,
            new_token_ratio=ratio,
            max_prefill_tokens=tokens,
            max_new_reqs=rows,
            num_waiting=99,
            bound_by="max_num_batched_tokens",
            tracer=tracer,
            **{**limits, **settings},
        )
        self.log = [f"{num_pages} pages of {page_size}"]
        self.log += [f"{len(prompt)} tokens are cached" for prompt in cached]
        self.log += [f"a request of {length} tokens runs (max_tokens {most}, 1 output)" for length, most in running]
        named = {
            "new_token_ratio": (ratio, 1.0),
            "max_prefill_tokens": (tokens, PLENTY),
            "max_new_reqs": (rows, PLENTY),
        }
        self.log += [f"{name}={value}" for name, (value, usual) in named.items() if value != usual]
        self.log += [f"{name}={value}" for name, value in settings.items()]

    def started(self, number: int, length: int, max_tokens: int) -> Req:
        """A request that holds the pages of its tokens."""
        req = make_req(number, [1] * length, max_tokens=max_tokens, outputs=[1])
        assert allocator_of(self.cache).alloc(-(-length // self.page_size) * self.page_size) is not None
        return req

    @property
    def on(self) -> str:
        """All that was done, for a learner."""
        return "; ".join(self.log)

    def add(self, prompt: int | Sequence[int], max_tokens: int = 4, *, outputs: int = 0) -> str:
        """Try a waiting request; a number makes a prompt of so many tokens. Returns the result's name."""
        number = len(self.log)
        tokens = [100 + number] * prompt if isinstance(prompt, int) else list(prompt)
        req = make_req(number, tokens, max_tokens=max_tokens, outputs=[9] * outputs, is_retracted=bool(outputs))
        again = f" and {outputs} outputs from before" if outputs else ""
        self.log.append(f"add_one_req(a prompt of {len(tokens)} tokens{again}, max_tokens {max_tokens})")
        req.init_next_round_input(self.cache)
        return name_of(self.adder.add_one_req(req))

    def go_on(self, length: int, num_computed: int, max_tokens: int = 4) -> str:
        """Try the next piece of a prompt of which `num_computed` tokens have KV. Returns the result's name."""
        return self.go_on_with(self.cut(length, num_computed, max_tokens))

    def go_on_with(self, req: Req) -> str:
        """Try the next piece of a request of `cut`. Returns the result's name."""
        lens = f"{len(req.prefix_indices)} of {req.seqlen} prompt tokens have KV"
        self.log.append(f"add_chunked_req({lens}, max_tokens {req.max_new_tokens})")
        return name_of(self.adder.add_chunked_req(req))

    def use_up(self, num_pages: int) -> None:
        """Let other requests hold all free pages but so many."""
        allocator = allocator_of(self.cache)
        if (more := allocator.available_size() - num_pages * self.page_size) > 0:
            allocator.alloc(more)
        self.log.append(f"{allocator.available_size() // self.page_size} pages are free")

    def cut(self, length: int, num_computed: int, max_tokens: int) -> Req:
        """A request that was cut in a step before, and holds the pages of its computed tokens."""
        req = make_req(len(self.log), [100 + len(self.log)] * length, max_tokens=max_tokens)
        slots = allocator_of(self.cache).alloc(-(-num_computed // self.page_size) * self.page_size)
        assert slots is not None
        req.fill_ids, req.prefix_indices = req.origin_input_ids, slots[:num_computed]
        req.extend_input_len = length - num_computed
        return req

    @property
    def given(self) -> list[int]:
        """Tokens to compute of each admitted request."""
        return [req.extend_input_len for req in self.adder.can_run_list]

    @property
    def limits(self) -> list[str]:
        """The limits that the trace names, of refusals and of cuts."""
        events: list[Any] = [record.event for record in self.recorder.records]
        return [each.limit if each.kind == "not_admitted" else each.bound_by for each in events if each.kind != "admit"]


def name_of(result: Any) -> Any:
    """The name of an `AddReqResult`."""
    return getattr(result, "name", result)


# --- memory -----------------------------------------------------------------------------------------------------------


def test_tokens_to_come_are_reserved(part: Any) -> None:
    """What running requests are expected to need, at least a page each, is no free memory."""
    hint = "The reserve is the number of expected tokens, or a page for each request if that is more."
    scene = Scene(part, num_pages=20, running=[(3, 8), (2, 4)])
    same(scene.adder.rem_total_tokens, 20 - 5 - 10, on=f"{scene.on}; rem_total_tokens", hint=hint)
    scene = Scene(part, num_pages=20, running=[(3, 8), (2, 4)], ratio=0.5)
    same(scene.adder.rem_total_tokens, 20 - 5 - 5, on=f"{scene.on}; rem_total_tokens", hint=hint)
    scene = Scene(part, page_size=4, num_pages=20, running=[(3, 2), (6, 4)])
    same(scene.adder.rem_total_tokens, 80 - 12 - 8, on=f"{scene.on}; rem_total_tokens", hint=hint)
    scene = Scene(part, num_pages=6, running=[(5, 8)])
    same(scene.adder.rem_total_tokens, -6, on=f"{scene.on}; rem_total_tokens", hint="It may be below 0.")


def test_no_more_requests_than_rows(part: Any) -> None:
    """With `max_new_reqs` requests admitted, another one is refused: OTHER."""
    scene = Scene(part, rows=0)
    same((scene.add(5), scene.given, scene.limits), ("OTHER", [], ["max_num_seqs"]), on=scene.on)


def test_the_whole_answer_needs_memory(part: Any) -> None:
    """A request is refused with NO_TOKEN unless its prompt and its whole answer need less than what is left."""
    hint = "The need, self._need(req), is less than rem_total_tokens, or there is no room. All of the prompt counts."
    scene = Scene(part, num_pages=20)
    same((scene.add(12, 8), scene.given), ("NO_TOKEN", []), on=scene.on, hint=hint)
    scene = Scene(part, num_pages=20, running=[(2, 5)])
    same((scene.add(10, 4), scene.given), ("NO_TOKEN", []), on=scene.on, hint=hint)
    scene = Scene(part, num_pages=20, tokens=4)
    same((scene.add(12, 8), scene.limits), ("NO_TOKEN", ["memory"]), on=scene.on, hint=hint)


def test_a_request_that_fits_is_admitted(part: Any) -> None:
    """A request that fits into both budgets is admitted with all its tokens, and its prefix is locked."""
    scene = Scene(part, num_pages=20, tokens=30)
    on, result = scene.on, scene.add(11, 8)
    hint = "11 + 8 tokens are less than 20: it is admitted, in can_run_list, with nothing cut."
    same((result, scene.given, scene.adder.new_chunked_req), ("CONTINUE", [11], None), on=scene.on, hint=hint)
    scene = Scene(part, page_size=4, cached=[[7] * 8])
    result = scene.add([7] * 8 + [1] * 3)
    on = f"{scene.on}, whose first 8 tokens are cached; locked tokens"
    hint = "inc_lock_ref(req.last_node, req.rid) for each request that is admitted."
    same((result, scene.given, scene.cache.protected_size()), ("CONTINUE", [3], 8), on=on, hint=hint)


def test_admitted_requests_count(part: Any) -> None:
    """An admitted request takes pages of memory, its tokens to come are expected, and its tokens leave the step."""
    scene = Scene(part, page_size=4, num_pages=20, tokens=40)
    scene.add(9, 5)
    adder = scene.adder
    hint = "9 tokens take three pages of 4; the 5 tokens to come are reserved; the step has lost 9 tokens, not pages."
    left = (adder.cur_rem_tokens, adder.rem_total_tokens, adder.rem_input_tokens)
    on = f"{scene.on}; cur_rem_tokens, rem_total_tokens, rem_input_tokens"
    same(left, (80 - 12, 80 - 12 - 5, 31), on=on, hint=hint)
    scene.add(3, 30, outputs=2)
    left = (adder.cur_rem_tokens, adder.rem_total_tokens, adder.rem_input_tokens)
    hint = "With a retracted request all of max_new_tokens is reserved again; 3 + 2 tokens are computed."
    on = f"{scene.on}; cur_rem_tokens, rem_total_tokens, rem_input_tokens"
    same(left, (68 - 8, 68 - 8 - 35, 26), on=on, hint=hint)
    same((scene.add(16, 9), scene.given), ("NO_TOKEN", [9, 5]), on=scene.on, hint="16 + 9 tokens are not less than 25.")
    hint = "It is admitted, as the last one: of its pages and its answer the memory has nothing left (budget_state())."
    same((scene.add(17, 7), scene.given), ("NO_TOKEN", [9, 5, 17]), on=scene.on, hint=hint)


def test_an_endless_answer_counts_4096_tokens(part: Any) -> None:
    """No request reserves more than 4,096 tokens to come."""
    scene = Scene(part, num_pages=10_000)
    result = scene.add(7, 10**6)
    hint = "min(req.max_new_tokens, CLIP_MAX_NEW_TOKENS) is what an admitted request adds to the reserve."
    on = f"{scene.on}; rem_total_tokens"
    same((result, scene.adder.rem_total_tokens), ("CONTINUE", 10_000 - 7 - 4096), on=on, hint=hint)


def test_its_own_prefix_is_not_free(part: Any) -> None:
    """A prefix that is counted as free until the request locks it does not make room for this request."""
    scene = Scene(part, page_size=4, num_pages=11, cached=[[7] * 32])
    result = scene.add([7] * 32 + [1] * 3, 10)
    on = f"{scene.on}, whose first 32 tokens are cached; locked tokens afterwards"
    hint = "Test the memory again when its prefix is locked: 12 tokens are free then. If it is refused, unlock it."
    same((result, scene.given, scene.cache.protected_size()), ("NO_TOKEN", [], 0), on=on, hint=hint)
    same((scene.add([7] * 32 + [1] * 3, 4), scene.cache.protected_size()), ("CONTINUE", 32), on=on, hint=hint)


def test_the_last_token_may_fill_the_memory(part: Any) -> None:
    """A request that is alone and has all its output tokens may take all pages that are left."""
    hint = "Retracted before its last token, alone: it needs its pages and nothing more, or it waits for ever."
    for length, admitted in ((15, [15]), (16, [16]), (17, [])):
        scene = Scene(part, page_size=4, num_pages=4)
        same((scene.add(length - 5, 5, outputs=5), scene.given), ("NO_TOKEN", admitted), on=scene.on, hint=hint)
    hint = "The exception is for a request that is alone, before its last token: no other runs, none is admitted."
    scene = Scene(part, page_size=4, num_pages=5, running=[(3, 2)])
    same((scene.add(11, 5, outputs=5), scene.given), ("NO_TOKEN", []), on=scene.on, hint=hint)
    scene = Scene(part, page_size=4, num_pages=4)
    same((scene.add(11, 6, outputs=5), scene.given), ("NO_TOKEN", []), on=scene.on, hint=hint)
    scene = Scene(part, page_size=4, num_pages=5)
    scene.add(2, 1)
    same((scene.add(11, 5, outputs=5), scene.given), ("NO_TOKEN", [2]), on=scene.on, hint=hint)


# --- the step ---------------------------------------------------------------------------------------------------------


def test_the_last_prompt_is_cut(part: Any) -> None:
    """A prompt that exceeds what is left of the step is cut to it, and no other request is tried: OTHER."""
    scene = Scene(part, tokens=32)
    results = [scene.add(20), scene.add(30)]
    hint = "The second prompt gets the 12 tokens that the first one leaves; extend_input_len says so."
    same((results, scene.given), (["CONTINUE", "OTHER"], [20, 12]), on=scene.on, hint=hint)
    cut = scene.adder.new_chunked_req
    same(cut is scene.adder.can_run_list[1], True, on=f"{scene.on}; is new_chunked_req the second one?", hint=hint)
    same(scene.limits, ["max_num_batched_tokens"], on=f"{scene.on}; the trace", hint="Call trace_cut for a cut.")
    scene = Scene(part, tokens=32)
    hint = "A prompt that ends with the step is not cut; then the step is full."
    same((scene.add(32), scene.given, scene.adder.new_chunked_req), ("OTHER", [32], None), on=scene.on, hint=hint)
    same((scene.add(5), scene.given), ("OTHER", [32]), on=scene.on, hint="A full step has no room for a piece.")
    scene = Scene(part, tokens=64, rem_chunk_tokens=32)
    same((scene.add(40), scene.given, scene.limits), ("OTHER", [32], ["chunked_prefill_size"]), on=scene.on)


def test_a_cut_prompt_reserves_nothing_yet(part: Any) -> None:
    """A piece that is not the last takes its own pages; the tokens to come count with the last piece."""
    scene = Scene(part, page_size=4, num_pages=30, tokens=10)
    scene.add(40, 20)
    left = (scene.adder.cur_rem_tokens, scene.adder.rem_total_tokens, scene.adder.rem_input_tokens)
    hint = "10 of 40 tokens take three pages of 4. Until the last piece only a page for the request is reserved."
    on = f"{scene.on}; cur_rem_tokens, rem_total_tokens, rem_input_tokens"
    same(left, (120 - 12, 120 - 12 - 4, 0), on=on, hint=hint)


def test_a_piece_ends_at_the_alignment(part: Any) -> None:
    """The length of a piece that is not the last is a multiple of the alignment; if that is 0, the request waits."""
    hint = "Round down to a multiple of chunk_alignment, but only if tokens of the prompt are missing behind the piece."
    settings: dict[str, Any] = {"page_size": 4, "chunk_alignment": 4}
    scene = Scene(part, tokens=30, **settings)
    same((scene.add(50), scene.given), ("OTHER", [28]), on=scene.on, hint=hint)
    scene = Scene(part, tokens=30, **settings)
    same((scene.add(29), scene.add(9), scene.given), ("CONTINUE", "OTHER", [29]), on=scene.on, hint=hint)
    same(scene.limits, ["max_num_batched_tokens"], on=f"{scene.on}; the trace")
    scene = Scene(part, tokens=3, cached=[[7] * 8], **settings)
    result = scene.add([7] * 8 + [1] * 5)
    on = f"{scene.on}, whose first 8 tokens are cached; locked tokens"
    same((result, scene.cache.protected_size()), ("OTHER", 0), on=on, hint="A refused request has no lock.")


# --- the next piece ---------------------------------------------------------------------------------------------------


def test_the_next_piece_goes_on(part: Any) -> None:
    """A cut prompt goes on where it ended: all the rest, or as much as the step has room for."""
    hint = "`extend_input_len` tokens are missing. Cut again it is OTHER; ended, others may be tried."
    scene = Scene(part, tokens=32)
    same((scene.go_on(100, 32), scene.given), ("OTHER", [32]), on=scene.on, hint=hint)
    same(scene.adder.new_chunked_req is scene.adder.can_run_list[0], True, on=f"{scene.on}; is it new_chunked_req?")
    scene = Scene(part, tokens=32)
    results = scene.go_on(50, 32), scene.add(30)
    same((results, scene.given), (("CONTINUE", "OTHER"), [18, 14]), on=scene.on, hint=hint)
    scene = Scene(part, page_size=4, num_pages=30, tokens=32)
    scene.go_on(31, 10, 20)
    left = (scene.adder.cur_rem_tokens, scene.adder.rem_total_tokens, scene.adder.rem_input_tokens)
    hint = "10 tokens lie in three pages, so two slots are left there: 21 tokens take 5 pages more. Now 20 are to come."
    on = f"{scene.on}; cur_rem_tokens, rem_total_tokens, rem_input_tokens"
    same(left, (120 - 12 - 20, 120 - 12 - 20 - 20, 11), on=on, hint=hint)
    scene = Scene(part, page_size=4, tokens=3, chunk_alignment=4)
    same((scene.go_on(30, 8), scene.given), ("OTHER", []), on=scene.on, hint="Only the step has no room: OTHER.")


def test_the_next_piece_leaves_a_page_for_others(part: Any) -> None:
    """The next piece may use all free memory but a page for each running request; it starts inside its last page."""
    hint = "(cur_rem_tokens less a page for each running request), and what is left in the page where it begins."
    running = [(4, 100), (4, 100)]
    scene = Scene(part, page_size=4, num_pages=9, running=running, tokens=20)
    same((scene.go_on(40, 10), scene.given), ("OTHER", [2 + 8]), on=scene.on, hint=hint)
    same(scene.limits, ["memory"], on=f"{scene.on}; the trace", hint="Here the memory cuts, not the step.")
    scene = Scene(part, page_size=4, num_pages=7, running=running, tokens=20)
    same((scene.go_on(40, 12), scene.given), ("NO_TOKEN", []), on=scene.on, hint="No room for one token: NO_TOKEN.")
    scene = Scene(part, page_size=4, num_pages=6, running=running, tokens=20)
    hint = "With less than a page for each running request, the slots in its own last page are still its own."
    same((scene.go_on(40, 13), scene.given), ("OTHER", [3]), on=scene.on, hint=hint)
    scene = Scene(part, page_size=4, num_pages=9, running=running, tokens=6)
    same((scene.go_on(40, 10), scene.limits), ("OTHER", ["max_num_batched_tokens"]), on=f"{scene.on}; the trace")


# --- many requests ----------------------------------------------------------------------------------------------------


class Budget:
    """The two budgets, counted page by page and token by token."""

    def __init__(self, scene: Scene, cached: set[tuple[int, ...]], ratio: float, tokens: int, align: int) -> None:
        self.size, self.free, self.tokens, self.align = scene.page_size, 0, tokens, align
        self.free = allocator_of(scene.cache).available_size() // self.size
        self.cached, self.locked = cached, set[tuple[int, ...]]()
        self.num_reqs = self.num_running = len(scene.running)
        self.expected = int(sum(min(req.max_new_tokens - 1, 4096) for req in scene.running) * ratio)
        self.was_cut = False

    @property
    def told(self) -> str:
        """What a learner may know before a call."""
        left = self.left(self.locked) * self.size
        words = f"Before this call cur_rem_tokens is {left}, rem_total_tokens {left - self.reserve()}"
        return f"{words} and rem_input_tokens {self.tokens}; {self.num_reqs} requests run or have joined."

    def left(self, locked: set[tuple[int, ...]]) -> int:
        """Pages that are free or can be evicted."""
        return self.free + len(self.cached - locked)

    def reserve(self) -> int:
        return max(self.expected, self.size * self.num_reqs)

    def given(self, rest: int, most: int) -> int:
        """Tokens of a piece, if memory allows `most` of the `rest`."""
        given = min(rest, most, self.tokens)
        while given < rest and given % self.align:
            given -= 1
        return given

    def take(self, start: int, given: int, rest: int, max_tokens: int) -> str:
        self.free -= sum(place % self.size == 0 for place in range(start, start + given))
        self.tokens -= given
        self.num_reqs += 1
        if given < rest:
            self.was_cut = True
            return "OTHER"
        self.expected += min(max_tokens, 4096)
        if self.left(self.locked) * self.size - self.reserve() <= 0:
            return "NO_TOKEN"
        return "CONTINUE" if self.tokens else "OTHER"

    def add(self, tokens: Sequence[int], max_tokens: int, outputs: int) -> str:
        ends = range(self.size, len(tokens), self.size)
        found = [end for end in ends if all(tuple(tokens[:each]) in self.cached for each in ends if each <= end)]
        prefix = {tuple(tokens[:end]) for end in found}
        rest = len(tokens) - len(found) * self.size
        need = rest + min(max_tokens - outputs, 4096)
        is_last = not self.num_reqs and outputs == max_tokens
        for locked in (self.locked, self.locked | prefix):
            left = self.left(locked) * self.size
            if (rest > left) if is_last else (need >= left - self.reserve()):
                return "NO_TOKEN"
            if not self.given(rest, rest):
                return "OTHER"
        self.locked |= prefix
        return self.take(len(found) * self.size, self.given(rest, rest), rest, max_tokens)

    def go_on(self, length: int, start: int, max_tokens: int) -> str:
        room = -start % self.size + max(self.left(self.locked) - self.num_running, 0) * self.size
        given = self.given(length - start, room)
        if not given:
            return "OTHER" if room else "NO_TOKEN"
        return self.take(start, given, length - start, max_tokens)


def test_it_is_right_for_many_queues(part: Any) -> None:
    """For any memory, cache and queue the requests and pieces are those of a count page by page."""
    rng = Random(1)
    for _ in range(120):
        size = rng.choice([1, 4, 8])
        align, ratio, tokens = rng.choice([1, size]), rng.randrange(9) / 8, rng.choice([9, 24, 40, PLENTY])
        prompts = [[kind] * size * rng.randint(1, 3) for kind in range(rng.randint(0, 3))]
        running = [(rng.randint(1, 3 * size), rng.choice([2, 9, 40])) for _ in range(rng.randint(0, 3))]
        settings: dict[str, Any] = {"ratio": ratio, "tokens": tokens, "chunk_alignment": align}
        scene = Scene(part, num_pages=60, page_size=size, running=running, cached=prompts, **settings)
        begun = rng.randint(1, 20) // align * align
        cut = scene.cut(begun + rng.randint(1, 30), begun, 5) if begun and rng.random() < 0.5 else None
        scene.use_up(rng.choice([0, 3, 8, 60, 60, 60]))
        cached = {tuple(prompt[:end]) for prompt in prompts for end in range(size, len(prompt) + 1, size)}
        budget = Budget(scene, cached, ratio, tokens, align)
        if cut is not None:
            hint = budget.told
            expected = budget.go_on(cut.seqlen, begun, 5)
            same(scene.go_on_with(cut), expected, on=scene.on, hint=hint)
            same_left(scene, budget, scene.on, hint)
        for _ in range(0 if budget.was_cut else 6):
            start = rng.choice([[], *prompts])
            own, outputs = [50 + len(scene.log)] * rng.randint(1, 3 * size), rng.choice([0, 2])
            max_tokens = rng.choice([2, 2, 5, 30])
            hint = budget.told
            expected = budget.add([*start, *own, *[9] * outputs], max_tokens, outputs)
            result = scene.add([*start, *own], max_tokens, outputs=outputs)
            on = f"{scene.on}, which begins with {len(start)} tokens of a cached prompt"
            same(result, expected, on=on, hint=hint)
            same_left(scene, budget, on, hint)
            if budget.was_cut:
                break


def same_left(scene: Scene, budget: Budget, on: str, hint: str) -> None:
    """Compare what is left of the budgets."""
    got = (scene.adder.cur_rem_tokens, scene.adder.rem_input_tokens, scene.cache.protected_size())
    expected = (budget.left(budget.locked) * budget.size, budget.tokens, len(budget.locked) * budget.size)
    same(got, expected, on=f"{on}; cur_rem_tokens, rem_input_tokens, locked tokens", hint=hint)
