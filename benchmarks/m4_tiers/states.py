"""The states of a node in the tree with tiers: recorded from real runs, and where a picture of them puts each."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from m4_radix_cache import CacheConfig, LLMEngine, SamplingParams
from m4_radix_cache.mem_cache.disk_radix_cache import DiskRadixCache
from m4_radix_cache.mem_cache.host_copies import ThreadCopier, ThreadJob

Change = tuple[str, str, str]
"""State before, state after, and the method of the cache that makes the change."""
NEW, GONE, DISK = "computed", "evicted", "disk"
WATCHED = ("_insert", "_attach", "_write", "_acknowledge", "_split", "evict", "evict_host", "load_back", "_take")
NAMES = {
    "_insert": "insert", "_attach": "insert", "_write": "write", "_acknowledge": "acknowledge", "_take": "prefetch"
}  # fmt: skip


class FailingJob(ThreadJob):
    """A copy that fails."""

    def copy_layer(self, layer: int) -> None:
        raise OSError("the copy has failed")


class WatchedCache(DiskRadixCache):
    """The tree with three tiers, which records the changes of its nodes' states."""

    changes: ClassVar[dict[Change, None]] = {}

    def _start_empty(self) -> None:
        super()._start_empty()
        self.states: dict[int, str] = {}
        self.callers: list[str] = []

    def _record(self, caller: str) -> None:
        """Attribute all changes since the last call to a method of the cache."""
        now = {node.id: node.state for node in self.nodes()}
        for node in sorted({*self.states, *now}) if caller != "_split" else ():
            before, after = self.states.get(node, NEW), now.get(node, GONE)
            if before != after:
                before = DISK if caller == "_take" else before
                self.changes[before, after, NAMES.get(caller, caller)] = None
        self.states = now

    @contextmanager
    def _watched(self, name: str) -> Iterator[None]:
        if self.callers:
            self._record(self.callers[-1])
        self.callers.append(name)
        try:
            yield
        finally:
            self._record(self.callers.pop())


def _watching(name: str) -> Any:
    def method(self: Any, *args: Any, **options: Any) -> Any:
        with self._watched(name):
            return getattr(DiskRadixCache, name)(self, *args, **options)

    return method


for each in WATCHED:
    setattr(WatchedCache, each, _watching(each))


def changes() -> list[Change]:
    """Run engines so that nodes get into every state, and return the changes of all."""
    WatchedCache.changes.clear()
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        _run("write_through", first)
        _run("write_back", second)
        _run("write_through_selective", first)  # finds the pages of the first engine
    return list(WatchedCache.changes)


def _run(policy: Any, disk: str) -> None:
    """Serve prompts of 288 tokens with room for one of them; the writes of the fourth fail."""
    memory = CacheConfig(
        page_size=16, max_total_tokens=384, host_memory_bytes=2**22, write_policy=policy, disk_path=disk
    )
    with LLMEngine(cache_config=memory, parts={"disk_cache": WatchedCache}) as engine:
        pool = engine.engine_core.scheduler.tree_cache.host
        pool.copiers["write"] = ThreadCopier()
        for number, prompt in enumerate([1, 2, 1, 3, 4, 5, 6, 1, 7, 1]):
            pool.copiers["write"].job = FailingJob if number == 3 else ThreadJob
            tokens = [300 + prompt + i for i in range(288)]
            engine.generate(tokens, SamplingParams(max_tokens=2, ignore_eos=True))


Place = tuple[float, float]
PLACES: dict[str, Place] = {
    NEW: (0, 0), "device": (2.6, 0), "writing": (5.2, 0), "both": (8, 0), "host": (11, 0), "loading": (9.5, 1.5),
    GONE: (6.6, -2.2), DISK: (13.7, 0),
}  # fmt: skip
TEXTS = {
    NEW: "KV of a request",
    "device": "on the device",
    "writing": "on the device,\nbeing copied to the host",
    "both": "on both",
    "host": "on the host only",
    "loading": "on the host, being\ncopied to the device",
    GONE: "in no tier above the disk",
    DISK: "in a file",
}
WAYS: dict[tuple[str, str], tuple[Place, Place, float, Place]] = {
    (NEW, "device"): ((0.85, 0), (-0.85, 0), 0, (1.3, 0.14)),
    ("device", "writing"): ((0.85, 0), (-0.85, 0), 0, (3.9, 0.14)),
    ("writing", "both"): ((0.85, 0), (-0.85, 0), 0, (6.6, 0.14)),
    ("writing", "device"): ((-0.4, 0.3), (0.4, 0.3), 0.4, (3.9, 0.78)),
    ("writing", "host"): ((0.6, -0.3), (-0.6, -0.3), 0.3, (8.1, -1.2)),
    ("both", "host"): ((0.85, 0.1), (-0.85, 0.1), 0, (9.5, 0.24)),
    ("host", "both"): ((-0.85, -0.12), (0.85, -0.12), 0, (9.5, -0.26)),
    ("host", "loading"): ((-0.1, 0.3), (0.85, -0.1), 0.2, (11.5, 0.9)),
    ("loading", "both"): ((-0.85, -0.1), (0.1, 0.3), 0.2, (7.6, 0.9)),
    ("device", GONE): ((0.2, -0.6), (-0.85, 0), 0.25, (3.3, -1.6)),
    ("host", GONE): ((0.1, -0.6), (0.85, 0), -0.3, (10.9, -1.7)),
    (DISK, "host"): ((-0.85, 0), (0.85, 0), 0, (12.35, 0.14)),
}
"""Of each change: where its arrow begins and ends, from the middle of the two boxes, its bend, and its label."""
