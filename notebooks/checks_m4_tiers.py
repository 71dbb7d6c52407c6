"""Graders of the labs and exercises in m4's second notebook, and what it runs: copies that take their time.

The references are the package's own: the host memory's pages, the names of the disk tier, the rule of preemption.
"""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple

from m3_paged_attention.attention.metadata import AttentionMetadata
from m3_paged_attention.kv_storage import KVStorage
from m4_radix_cache import PARTS, CacheConfig, LLMEngine, ModelConfig, SamplingParams
from m4_radix_cache.mem_cache.host_copies import ThreadCopier, ThreadJob
from m4_radix_cache.mem_cache.host_kv_pool import HostKVPool
from m4_radix_cache.priority_preemption import choose_victims

try:  # in the checkout, for the tests
    from notebooks.checks import Mismatch, check, grader, ids_of, short, show_source
except ModuleNotFoundError:  # beside the notebook
    from checks import Mismatch, check, grader, ids_of, short, show_source  # type: ignore[no-redef]

__all__ = ["check", "ids_of", "new_engine", "serve_late", "show_source", "slow_copies", "tiers_of"]

ONE_MODEL: dict[str, Any] = {"model_loader": functools.cache(PARTS["model_loader"])}


def new_engine(memory: Mapping[str, Any], *, parts: Mapping[str, Any] | None = None, **configs: Any) -> LLMEngine:
    """Return an engine whose `CacheConfig` has these fields. All engines made here share their weights."""
    return LLMEngine(cache_config=CacheConfig(**memory), parts=ONE_MODEL | dict(parts or {}), **configs)


def tiers_of(engine: LLMEngine) -> list[tuple[int, int, str]]:
    """Return number, tokens and state of each node of an engine's tree."""
    cache: Any = engine.engine_core.scheduler.tree_cache
    return [(node.id, node.num_tokens, node.state) for node in cache.nodes()]


def slow_copies(seconds: float, reader_class: Callable[[Any, list[Any]], Any] | None = None) -> type[HostKVPool]:
    """Return a part `host_kv_pool` whose copies take this much longer for each layer.

    `reader_class(kv, jobs)`: makes what a forward reads while `jobs`, loads in order of their start, are under way.
    """

    class Job(ThreadJob):
        def copy_layer(self, layer: int) -> None:
            time.sleep(seconds)
            super().copy_layer(layer)

    class Pool(HostKVPool):
        def __init__(self, storages: Sequence[KVStorage], *, num_bytes: int) -> None:
            super().__init__(storages, num_bytes=num_bytes)
            self.copiers = {kind: ThreadCopier() for kind in self.copiers}
            for copier in self.copiers.values():
                copier.job = Job

        def arriving(self, kv: KVStorage, metadata: AttentionMetadata) -> Any:
            found = super().arriving(kv, metadata)
            if found is not kv and reader_class is not None:
                found = reader_class(kv, list(self._loads))
                found.step = None  # not all layers in one call
            return found

    return Pool


# --- the first lab: pages that are reused while they are copied -------------------------------------------------------


class Copy:
    """A copy of a text's pages to the device."""

    def __init__(self, tier: "LateTier", name: str, pages: Sequence[int]) -> None:
        self.tier, self.name, self.pages = tier, name, list(pages)
        self.arrived: list[str] = []
        """What the device has got, page by page."""

    def is_done(self) -> bool:
        """Return whether all pages are copied."""
        return len(self.arrived) == len(self.pages)

    def wait(self) -> None:
        """Return when all pages are copied."""
        if not self.is_done():
            self.tier.waits.append(self.name)
        self.advance(len(self.pages))

    def advance(self, num_pages: int) -> None:
        """Copy some more pages."""
        at = len(self.arrived)
        self.arrived += [self.tier.contents[page] for page in self.pages[at : at + num_pages]]


class LateTier:
    """Host memory with the reader's class for its pages, and a copier that is as slow as `pace` says."""

    def __init__(self, host_class: Callable[[int], Any], num_pages: int, pace: Callable[[], int]) -> None:
        self.host, self.pace = host_class(num_pages), pace
        self.contents = [""] * num_pages
        self.copies: list[Copy] = []
        self.waits: list[str] = []
        """Texts whose copies the host has waited for since the last request."""

    def load(self, name: str) -> bool:
        """Begin to copy a text to the device; return whether the host has it."""

        def start(pages: Sequence[int]) -> Copy:
            self.copies.append(Copy(self, name, pages))
            return self.copies[-1]

        return self.host.load(name, start) is not None

    def store(self, name: str, num_pages: int) -> list[int]:
        """Write a text to pages that the host gives it."""
        pages = list(self.host.store(name, num_pages))
        for number, page in enumerate(pages):
            self.contents[page] = f"{name}{number}"
        return pages

    def advance(self) -> None:
        """Let the copies go on, in the order in which they began."""
        left = self.pace()
        for copy in [copy for copy in self.copies if not copy.is_done()]:
            before = len(copy.arrived)
            copy.advance(left)
            left -= len(copy.arrived) - before


Request = tuple[str, int]
"""Name of a text, and its number of pages; 0: it is loaded."""


class Outcome(NamedTuple):
    """What a request did."""

    request: Request
    found: bool | list[int]
    """Of a load: whether the host has the text; otherwise the pages that it got."""
    waits: list[str]


def serve_late(
    host_class: Callable[[int], Any], requests: Sequence[Request], num_pages: int, pace: Callable[[], int]
) -> tuple[list[Outcome], list[Copy]]:
    """Store and load texts, while copies go on by `pace()` pages between two requests; return what was done, and the
    copies, which are complete at the end."""
    tier, done = LateTier(host_class, num_pages, pace), list[Outcome]()
    for name, count in requests:
        tier.waits = []
        found: bool | list[int] = tier.store(name, count) if count else tier.load(name)
        done.append(Outcome((name, count), found, tier.waits))
        tier.advance()
    for copy in tier.copies:
        copy.advance(len(copy.pages))
    return done, tier.copies


class ReferenceHost:
    """As the tree does it: whoever takes the memory of a copy that is under way waits for this copy."""

    def __init__(self, num_pages: int) -> None:
        self.free, self.texts = list(range(num_pages)), dict[str, list[int]]()
        self.copies: dict[str, list[Any]] = {}

    def load(self, name: str, start: Callable[[list[int]], Any]) -> Any:
        """Begin to copy a text to the device."""
        if name not in self.texts:
            return None
        self.texts[name] = self.texts.pop(name)
        self.copies.setdefault(name, []).append(start(self.texts[name]))
        return self.copies[name][-1]

    def store(self, name: str, num_pages: int) -> list[int]:
        """Return pages for a text."""
        while len(self.free) < num_pages:
            oldest = next(iter(self.texts))
            for copy in self.copies.pop(oldest, []):
                copy.wait()
            self.free += self.texts.pop(oldest)
        self.texts[name], self.free = self.free[:num_pages], self.free[num_pages:]
        return self.texts[name]


PACES: Mapping[str, Callable[[], int]] = {"at once": lambda: 99, "one page a request": lambda: 1, "never": lambda: 0}
BY_HAND: tuple[tuple[int, tuple[Request, ...]], ...] = (
    (4, (("ann", 2), ("bob", 2), ("ann", 0), ("bob", 0), ("cid", 2), ("dan", 2), ("ann", 0))),
    (6, (("ann", 2), ("bob", 2), ("ann", 0), ("cid", 4), ("dan", 2))),
    (4, (("ann", 3), ("ann", 0), ("ann", 0), ("bob", 2), ("bob", 0), ("cid", 4), ("bob", 0))),
)


@grader("m4_tiers.reused")
def grade_reused(host_class: Callable[[int], Any]) -> str:
    """The lab's class, repaired: no page of a copy under way is reused, and no decision depends on copies."""
    rng, cases = Random(0), list(BY_HAND)
    for _ in range(60):
        names = list("abcdefgh")
        stored: set[str] = set()
        requests: list[Request] = []
        for _ in range(24):
            new = [name for name in names if name not in stored]
            if new and rng.random() < 0.4:
                stored.add(new[0])
                requests.append((new[0], rng.randrange(1, 4)))
            elif stored:
                requests.append((rng.choice(sorted(stored)), 0))
        cases.append((rng.randrange(4, 8), tuple(requests)))
    for num_pages, requests in cases:
        seed = rng.randrange(1000)
        paces = {**PACES, "now and then": functools.partial(Random(seed).randrange, 4)}
        for pace, own in paces.items():
            wanted = serve_late(ReferenceHost, requests, num_pages, PACES["at once"])[0]
            _compare_late(*serve_late(host_class, requests, num_pages, own), wanted, f"copies: {pace}")
    return "63 runs, each with copies of four speeds: every copy is right, and what stays does not depend on them."


def _compare_late(done: Sequence[Outcome], copies: Sequence[Copy], wanted: Sequence[Outcome], pace: str) -> None:
    stored: dict[str, list[int]] = {}
    for outcome, right in zip(done, wanted, strict=True):
        (name, count), found = outcome.request, outcome.found
        what = f"store({name!r}, {count})" if count else f"load({name!r})"
        if isinstance(found, list):
            gone = [other for other, pages in stored.items() if set(pages) & set(found)]
            for other in gone:
                del stored[other]
            stored[name] = found
            if len(set(found)) != count:
                raise Mismatch(f"{what} must return {count} different pages, yours returned {short(found)}.")
        else:
            gone = []
        if needless := [other for other in outcome.waits if other not in gone]:
            raise Mismatch(
                f"{what} waits for the copy of {needless[0]!r} ({pace}), whose pages it does not take. Copies "
                f"run beside the steps; only whoever needs their memory waits."
            )
        if bool(found) != bool(right.found):
            there, gone_ = ("is there", "is not") if found else ("is not there", "is")
            raise Mismatch(
                f"{what} ({pace}): {name!r} {there}; if all copies end at once, it {gone_}. The least recently used "
                f"text goes, whether its copy has ended or not: the same arrivals must give the same decisions."
            )
    for copy in copies:
        if copy.arrived != [f"{copy.name}{number}" for number in range(len(copy.pages))]:
            raise Mismatch(
                f"The device has asked for {copy.name!r} and got the pages {copy.arrived} ({pace}): a page was given "
                f"to another text before it was copied."
            )


# --- the second lab: a reader that does not wait for its layer --------------------------------------------------------


class Load:
    """A load of one page that advances only when it is waited for."""

    def __init__(self, layers: list[str], text: str, arrived: int = 0) -> None:
        self.layers, self.text, self.arrived = layers, text, 0
        self._copy(arrived)

    def wait(self, layer: int | None = None) -> None:
        """Return when this layer is copied; None: all."""
        self._copy(len(self.layers) if layer is None else layer + 1)

    def is_done(self) -> bool:
        """Return whether all layers are copied."""
        return self.arrived == len(self.layers)

    def _copy(self, end: int) -> None:
        for layer in range(self.arrived, end):
            self.layers[layer] = self.layers[layer].replace(f"old {self.text}", self.text)
        self.arrived = max(self.arrived, end)


NUM_LAYERS = 4


@grader("m4_tiers.layer_wait")
def grade_layer_wait(reader_class: Callable[[Any, list[Any]], Any]) -> str:
    """The lab's class, repaired: `layer(i)` returns when layer i has arrived, and waits for nothing behind it."""
    for arrived in ((0,), (0, 0), (4, 0), (0, 2), (1, 3, 0), ()):
        names = [f"load {number + 1}" for number in range(len(arrived))]
        layers = [", ".join(f"old {name}" for name in names) for _ in range(NUM_LAYERS)]
        jobs = [Load(layers, name, count) for name, count in zip(names, arrived, strict=True)]
        reader = reader_class(SimpleNamespace(layer=layers.__getitem__), jobs)
        for layer in range(NUM_LAYERS):
            case = f"{len(jobs)} loads, of which {list(arrived)} layers have arrived before: "
            got, right = reader.layer(layer), ", ".join(names)
            if got is None or not isinstance(got, str):
                raise Mismatch(f"{case}layer({layer}) must return what kv.layer({layer}) returns, yours {short(got)}.")
            if got != right:
                raise Mismatch(
                    f"{case}layer({layer}) returns the memory with {got!r}. 'old' is what was in the pages before: "
                    f"wait for this layer of every load before you return it."
                )
            ahead = [job for job, count in zip(jobs, arrived, strict=True) if job.arrived > max(layer + 1, count)]
            if ahead:
                raise Mismatch(
                    f"{case}layer({layer}) waits until {ahead[0].arrived} layers have arrived; layer {layer} needs "
                    f"{layer + 1}. The rest can arrive while it is computed."
                )
    if answers_of(reader_class) != answers_of(None):
        raise Mismatch("In the engine, with slow copies, the tokens of an answer have changed.")
    return "Loads that have arrived in part, and in the engine: each layer is complete when it is read, and no later."


PROMPTS = [[300 + 200 * number + i for i in range(160)] for number in range(2)]
"""Two, of which the device holds one."""


@functools.cache
def answers_of(reader_class: Any) -> list[Any]:
    """Return the tokens of two prompts that push each other out of the device, three times each."""
    memory = {"max_total_tokens": 224, "host_memory_bytes": 2**21}
    model = ModelConfig(attention_backend="torch")
    with new_engine(memory, parts={"host_kv_pool": slow_copies(0.002, reader_class)}, model_config=model) as engine:
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        return [engine.generate(PROMPTS[turn % 2], params).token_ids for turn in range(6)]


# --- exercises: names of pages ----------------------------------------------------------------------------------------


@grader("m4_tiers.names")
def grade_names(names: Callable[[bytes, list[int], int], list[Any]]) -> str:
    """`names(root, tokens, page_size)`: the names of all whole pages, each a digest of everything its KV depends on."""
    root, rng = b"model A, float32", Random(0)
    base = [rng.randrange(50_000) for _ in range(40)]

    def of(tokens: Sequence[int], page_size: int = 4, name_root: bytes = root) -> list[Any]:
        given = list(tokens)
        got = names(name_root, given, page_size)
        if given != list(tokens):
            raise Mismatch("names() changes the list of tokens, which belongs to the caller.")
        count = len(tokens) // page_size
        if not isinstance(got, list | tuple) or len(got) != count:
            raise Mismatch(
                f"{len(tokens)} tokens in pages of {page_size} have {count} whole pages, so there are as many names; "
                f"you return {short(got)}."
            )
        if weak := [name for name in got if not isinstance(name, bytes | str) or len(name) < 16]:
            raise Mismatch(
                f"{short(weak[0])} is no name that a file can have for years: two pages must never have the same one, "
                f"in any process. Use a digest: hashlib.sha256(data).digest()."
            )
        return list(got)

    whole = of(base)
    if of(base) != whole or of(base[:27]) != whole[:6]:
        raise Mismatch("The same tokens from the first one on must have the same names, whatever comes behind them.")
    if len(set(of([7] * 40))) != 10:
        raise Mismatch(
            "Ten pages with the same four tokens get the same names. Their KV differs, because it depends on all "
            "tokens before it: the name of a page must, too."
        )
    for at in range(40):
        other = of([*base[:at], base[at] ^ 1, *base[at + 1 :]])
        same = [left == right for left, right in zip(whole, other, strict=True)]
        if same != [page < at // 4 for page in range(10)]:
            raise Mismatch(
                f"Token {at} is another one: the names from page {at // 4} on must change, and no name before it. "
                f"The same are those of the pages {[page for page, is_same in enumerate(same) if is_same]}."
            )
    if set(whole) & set(of(base, name_root=b"model B, float32")):
        raise Mismatch("Another model has other KV for the same tokens: begin the chain with `root`.")
    if set(of([1, 23], 2)) & set(of([12, 3], 2)) or set(of([1, 256], 2)) & set(of([257, 0], 2)):
        raise Mismatch(
            "[1, 23] and [12, 3], or [1, 256] and [257, 0], get the same name: give every token the same number of "
            "bytes."
        )
    return "Names that change with any earlier token and with the model, and with nothing else."


# --- exercises: who is preempted --------------------------------------------------------------------------------------

Running = tuple[str, int, int, int]
"""Name, priority, number of arrival, and the tokens that become free if it is preempted."""
CASES: tuple[tuple[int, int, int, list[Running], str], ...] = (
    (20, 30, 40, [("a", 0, 1, 50)], "There is room: nobody is preempted."),
    (20, 40, 40, [("a", 0, 1, 50)], "`need` must be less than what is free, not equal to it."),
    (20, 60, 10, [("a", 0, 1, 30), ("b", 5, 2, 60)], "The lowest priority goes first."),
    (20, 60, 10, [("a", 0, 1, 60), ("b", 0, 2, 60)], "Of equal priorities the newest goes first."),
    (20, 60, 10, [("a", 0, 1, 60), ("b", 0, 2, 60), ("c", 0, 3, 60)], "No more than are needed."),
    (20, 60, 10, [("a", 10, 1, 60)], "The difference must be more than the threshold."),
    (20, 60, 10, [("a", 0, 1, 20), ("b", 0, 2, 20)], "All together are not enough, so it would not help."),
    (20, 60, 10, [("a", 0, 1, 20), ("b", 15, 2, 90)], "'b' is not low enough, and 'a' alone is not enough."),
    (20, 95, 10, [("a", 0, 1, 40), ("b", 3, 2, 40), ("c", 0, 3, 40)], "Several, in the order of the rule."),
)


@grader("m4_tiers.victims")
def grade_victims(victims: Callable[[int, int, int, list[Running], int], list[str]]) -> str:
    """`victims(priority, need, free, running, threshold)`: the names of the requests to preempt, in order."""
    rng, cases = Random(0), list(CASES)
    for _ in range(400):
        running = [
            (f"r{number}", rng.choice((0, 0, 5, 9, 10, 15)), number, rng.randrange(1, 60))
            for number in rng.sample(range(20), rng.randrange(6))
        ]
        cases.append((20, rng.randrange(1, 120), rng.randrange(60), running, ""))
    for priority, need, free, running, hint in cases:
        wanted = _victims(priority, need, free, running)
        given = list(running)
        got = victims(priority, need, free, given, THRESHOLD)
        if given != running:
            raise Mismatch("victims() changes the list of running requests. Nobody is preempted before all is counted.")
        if not isinstance(got, list | tuple) or list(got) != wanted:
            raise Mismatch(
                f"Priority {priority} needs {need}, {free} are free, the threshold is {THRESHOLD}, and these run: "
                f"{short(running)}. Preempted: {wanted or 'nobody'}; yours: {short(got)}.{f' {hint}' if hint else ''}"
            )
    return "By hand and 400 times at random: the requests that the engine's rule names, and nobody if it does not help."


THRESHOLD = 10


class _Freed:
    """Counts as `FreedTokens` does, where no request shares a prefix."""

    num_tokens = 0

    def add(self, req: Any) -> int:
        """Add what a request frees."""
        self.num_tokens += req.tokens
        return self.num_tokens


def _victims(priority: int, need: int, free: int, running: Sequence[Running]) -> list[str]:
    reqs: Any = [SimpleNamespace(name=n, priority=p, number=a, tokens=t) for n, p, a, t in running]
    newcomer: Any = SimpleNamespace(priority=priority)
    freed: Any = _Freed()
    chosen = choose_victims(newcomer, reqs, THRESHOLD, freed, lambda _, num_freed: need < free + num_freed)
    return [req.name for req in chosen]  # type: ignore[attr-defined]
