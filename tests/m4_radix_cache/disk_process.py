"""Processes that use a disk tier, and die: a program that imports nothing else of the engine, and forks.

    python tests/m4_radix_cache/disk_process.py imports
    python tests/m4_radix_cache/disk_process.py kills DIRECTORY NUMBER
    python tests/m4_radix_cache/disk_process.py share DIRECTORY NUMBER SEED

It writes a line of JSON. The packages are entered into `sys.modules` without running their `__init__`, which would
import torch: a process without it is forked in a millisecond.
"""

import json
import os
import random
import signal
import sys
import time
import types
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def main(task: str, *arguments: str) -> None:
    """Run a task, with the packages of the disk tier alone; `imports`: which these are."""
    before = set(sys.modules)
    sys.path.insert(0, str(ROOT))
    for name in ("m1_single_request", "m4_radix_cache", "m4_radix_cache.mem_cache"):
        package = types.ModuleType(name)
        package.__path__ = [str(ROOT / name.replace(".", "/"))]
        sys.modules[name] = package
    from m4_radix_cache.mem_cache import disk_identity  # noqa: F401
    from tests.m4_radix_cache import disk_stores  # noqa: F401

    imported = sorted({name.partition(".")[0] for name in sys.modules.keys() - before} - sys.stdlib_module_names)
    json.dump({"kills": kills, "share": share}[task](*arguments) if arguments else imported, sys.stdout)


def kills(directory: str, number: str) -> dict[str, Any]:
    """Kill a process that writes pages, at so many random moments, and read all pages after each."""
    from tests.m4_radix_cache.disk_stores import chain, page_of, read, temporaries

    layout, moments = large_layout(), random.Random(0)
    counts: Counter[str] = Counter()
    for life in range(int(number)):
        pid = os.fork()
        if not pid:
            try:
                store = large_store(directory)
                digests = chain(store, 24)
                random.Random(life).shuffle(digests)
                while True:
                    for digest in digests:
                        assert store.write(digest, page_of(digest, layout)).status in ("written", "present")
                        store.touch([digest])
            finally:
                os._exit(1)  # an exception, or it would never end
        time.sleep(moments.uniform(0, 0.02))
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status), "it ended by itself"
        counts["left"] += len(temporaries(directory)) if os.path.isdir(directory) else 0
        store = large_store(directory)
        counts["kept"] += len(temporaries(directory))
        counts.update(read(store, digest, layout).status for digest in chain(store, 24))
        assert store.used_bytes <= store.max_bytes
    return counts


def share(directory: str, number: str, seed: str) -> dict[str, Any]:
    """Write, read, touch and clear at random, so many times, in a directory that others use in the same way."""
    from tests.m4_radix_cache.disk_stores import chain, page_of, read

    store, layout, counts = large_store(directory), large_layout(), Counter[str]()
    digests, chance = chain(store, 24), random.Random(int(seed))
    for _ in range(int(number)):
        digest, action = chance.choice(digests), chance.random()
        result = store.write(digest, page_of(digest, layout)) if action < 0.5 else read(store, digest, layout)
        assert result.status != "failed", result.reason
        counts[result.status] += 1
        if action > 0.9:
            store.touch(chance.sample(digests, 5))
        if action > 0.998:
            store.clear()
    return counts


def large_layout() -> dict[str, Any]:
    """A page takes a while to write."""
    from m4_radix_cache.mem_cache.page_file import BufferSpec

    return {"kv": BufferSpec("uint8", (2, 2**16)), "draft": BufferSpec("bfloat16", (999,))}


def large_store(directory: str) -> Any:
    """16 of 24 pages have room."""
    from tests.m4_radix_cache.disk_stores import make_store

    return make_store(directory, layout=large_layout(), max_bytes=16 * (2**17 + 2**12))


if __name__ == "__main__":
    main(*sys.argv[1:])
