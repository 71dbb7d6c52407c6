"""The capacity of a disk tier, and the processes that share it or are killed."""

import fcntl
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from m4_radix_cache.mem_cache import disk_files
from m4_radix_cache.mem_cache.disk_store import DiskStore
from tests.m4_radix_cache import disk_process
from tests.m4_radix_cache.disk_stores import (
    chain,
    file_of,
    fill,
    make_store,
    page_of,
    read,
    stored,
    temporaries,
    write,
)


def store_of(path: Path | str, num_pages: int) -> DiskStore:
    """A store with room for so many pages."""
    return make_store(path, max_bytes=num_pages * make_store(path).file_bytes)


# --- eviction ---------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_pages_are_evicted(tmp_path: Path) -> None:
    store = store_of(tmp_path, 4)
    pages = chain(store, 6)
    fill(store, pages[:4])
    store.touch([pages[0]])
    fill(store, pages[4:])
    assert stored(store, pages) == [0, 3, 4, 5]
    assert store.used_bytes == 4 * store.file_bytes == store.max_bytes


def test_use_is_kept_for_the_next_process(tmp_path: Path) -> None:
    store = store_of(tmp_path, 3)
    pages = chain(store, 4)
    fill(store, pages[:3])
    store.touch([pages[0]])
    store = store_of(tmp_path, 3)
    fill(store, pages[3:])
    assert stored(store, pages) == [0, 2, 3]


def test_use_in_another_process_counts(tmp_path: Path) -> None:
    one, other = store_of(tmp_path, 3), store_of(tmp_path, 3)
    pages = chain(one, 4)
    fill(one, pages[:3])
    other.touch([pages[0]])
    fill(one, pages[3:])
    assert stored(one, pages) == [0, 2, 3]


def test_the_end_of_a_chain_is_evicted_before_its_begin(tmp_path: Path) -> None:
    """Without its first page, none of a chain is found."""
    store = store_of(tmp_path, 4)
    pages, other = chain(store, 4), chain(store, 2, "other")
    fill(store, pages)
    store.touch(pages)
    fill(store, other)
    assert stored(store, pages) == [0, 1] and stored(store, other) == [0, 1]


def test_a_smaller_capacity_holds_from_the_start(tmp_path: Path) -> None:
    store = store_of(tmp_path, 8)
    pages = chain(store, 8)
    fill(store, pages)
    store = store_of(tmp_path, 3)
    assert stored(store, pages) == [6, 7], "an eighth of the capacity is free after an eviction, in whole pages"
    assert store.used_bytes == 2 * store.file_bytes


def test_most_writes_do_not_count_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, counts = store_of(tmp_path, 160), []
    scan = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: counts.append(path) or scan(path))
    for digest in chain(store, 320):
        assert write(store, digest) == "written"
    assert store.used_bytes <= store.max_bytes and len(counts) <= 40


def test_several_engines_exceed_the_capacity_by_a_part_that_is_known(tmp_path: Path) -> None:
    """One counts what the others have written after a sixteenth of the capacity."""
    stores = [store_of(tmp_path, 64) for _ in range(3)]
    for number, digest in enumerate(chain(stores[0], 500)):
        assert write(stores[number % 3], digest) == "written"
        used = sum(file.stat().st_size for file in tmp_path.iterdir())
        assert used <= stores[0].max_bytes + 3 * stores[0].max_bytes // 16


def test_files_of_others_are_neither_counted_nor_removed(tmp_path: Path) -> None:
    store = store_of(tmp_path, 2)
    pages = chain(store, 5)
    foreign = [
        "notes.txt",
        "model.safetensors",
        f"{'0' * 63}.safetensors",
        f"{'0' * 64}.safetensors.bak",
        ".kv-x",
        "a.tmp",
    ]
    for name in foreign:
        (tmp_path / name).write_bytes(bytes(10_000))
    (tmp_path / f"{'a' * 64}.safetensors").mkdir()
    (tmp_path / f"{'b' * 64}.safetensors").symlink_to("notes.txt")
    fill(store, pages)
    assert store.used_bytes == 2 * store.file_bytes
    store.clear()
    assert sorted(os.listdir(tmp_path)) == sorted([*foreign, f"{'a' * 64}.safetensors", f"{'b' * 64}.safetensors"])


def test_clear_removes_the_pages(tmp_path: Path) -> None:
    store, other = make_store(tmp_path), make_store(tmp_path, models=["other"])
    pages = chain(store, 3)
    fill(store, pages)
    fill(other, chain(other, 3))
    store.clear()
    assert store.used_bytes == 0 and stored(store, pages) == [] == os.listdir(tmp_path)
    fill(store, pages)
    assert stored(store, pages) == [0, 1, 2]


def test_pages_that_cannot_be_removed_keep_their_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_of(tmp_path, 2)
    pages = chain(store, 3)
    fill(store, pages[:2])
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", lambda path: (_ for _ in ()).throw(PermissionError(1, "Operation not permitted")))
        result = store.write(pages[2], page_of(pages[2]))
    assert result == ("failed", "the capacity is used by files that cannot be removed")
    assert stored(store, pages) == [0, 1] and write(store, pages[2]) == "written"


@pytest.mark.parametrize("moment", ["before it is counted", "before it is removed"])
def test_another_process_may_evict_the_same_page(tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_of(tmp_path, 3)
    pages = chain(store, 4)
    fill(store, pages[:3])
    scan, remove = os.scandir, os.unlink

    @contextmanager
    def scan_before_another(path: str) -> Iterator[list["os.DirEntry[str]"]]:
        with scan(path) as found:
            entries = list(found)
        remove(file_of(store, pages[0]))
        yield entries

    def remove_after_another(path: str) -> None:
        remove(path)
        raise FileNotFoundError

    with monkeypatch.context() as patch:
        if moment == "before it is counted":
            patch.setattr(os, "scandir", scan_before_another)
        else:
            patch.setattr(os, "unlink", remove_after_another)
        assert write(store, pages[3]) == "written"
    assert stored(store, pages) == [1, 2, 3] and store.used_bytes == store.max_bytes


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["write", "read", "touch", "damage", "restart", "clear"]), st.integers(0, 7)), max_size=40
)


@given(OPERATIONS)
def test_any_order_of_calls_gives_right_pages_or_none(
    tmp_path_factory: pytest.TempPathFactory, operations: list[tuple[str, int]]
) -> None:
    """A page is there if it was written and nothing has removed it; the last one written is always there."""
    path = tmp_path_factory.mktemp("kv")
    store = store_of(path, 4)
    pages, there = chain(store, 8), set[int]()
    for name, number in operations:
        digest = pages[number]
        if name == "write":
            assert write(store, digest) == ("present" if number in there else "written")
            there = {n for n in there | {number} if store.contains(pages[n])}
            assert number in there
        elif name == "touch":
            store.touch(pages[: number + 1])
        elif name == "damage" and number in there:
            file_of(store, digest).write_bytes(b"x")
            there.remove(number)
            assert read(store, digest).status == "damaged"
        elif name == "restart":
            store = store_of(path, 4)
        elif name == "clear":
            store.clear()
            there.clear()
        assert set(stored(store, pages)) == there and len(there) <= 4
        assert sum(file.stat().st_size for file in path.iterdir()) <= store.used_bytes <= store.max_bytes


# --- temporary files --------------------------------------------------------------------------------------------------


@pytest.fixture
def half_written(tmp_path: Path) -> Iterator[Path]:
    """A file that a process is writing: it has a lock, which ends with the process."""
    path = tmp_path / ".kv-abc.tmp"
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(b"half")
        file.flush()
        yield path


def test_a_file_that_is_being_written_is_left_alone(half_written: Path) -> None:
    make_store(half_written.parent)
    assert half_written.exists()


def test_a_file_that_nobody_completes_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".kv-abc.tmp").write_bytes(b"half")
    (tmp_path / ".kv-dir.tmp").mkdir()
    (tmp_path / ".kv-link.tmp").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / ".kv-fifo.tmp")
    make_store(tmp_path)
    assert ".kv-abc.tmp" not in os.listdir(tmp_path)


@pytest.mark.parametrize("moment", ["before the lock", "after the lock"])
def test_a_file_taken_for_abandoned_is_written_again(
    tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its creation and its lock another process may find it."""
    store, lock, first = make_store(tmp_path), fcntl.flock, []

    def flock(descriptor: int, operation: int) -> None:
        if not first:
            (path,) = tmp_path.iterdir()
            first.append(path)
            if moment == "before the lock":
                disk_files.remove_abandoned(str(path))
            else:
                path.unlink()
                raise BlockingIOError
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    digest = chain(store, 1)[0]
    assert write(store, digest) == "written" and read(store, digest).status == "hit"
    assert len(first) == 1 and temporaries(tmp_path) == []


# --- threads and processes --------------------------------------------------------------------------------------------


def run(task: str, *arguments: object) -> "subprocess.Popen[str]":
    command = [sys.executable, disk_process.__file__, task, *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    )


def result_of(process: "subprocess.Popen[str]") -> dict[str, int]:
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 0
    return {"hit": 0, "miss": 0, "damaged": 0, "left": 0, **json.loads(output)}


def test_the_disk_tier_imports_nothing_heavy() -> None:
    output, _ = run("imports").communicate(timeout=100)
    assert json.loads(output) == ["m1_single_request", "m4_radix_cache", "numpy", "tests"]


def test_threads_may_do_everything_at_once(tmp_path: Path) -> None:
    store = store_of(tmp_path, 6)
    pages, errors = chain(store, 12), []

    def use(first: int) -> None:
        try:
            for number in range(150):
                digest = pages[(first * number + number // 7) % 12]
                assert write(store, digest) in ("written", "present")
                assert read(store, digest).status in ("hit", "miss")
                store.touch([digest])
                if number % 60 == 59:
                    store.clear()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=use, args=[first]) for first in (1, 5, 7, 11)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert errors == [] and temporaries(tmp_path) == []


@pytest.mark.parametrize("number", [100, pytest.param(5000, marks=pytest.mark.exhaustive)])
def test_two_processes_share_a_directory(tmp_path: Path, number: int) -> None:
    processes = [run("share", tmp_path / "kv", number, seed) for seed in (1, 2)]
    results = [result_of(process) for process in processes]
    for result in results:
        assert result["damaged"] == 0 and result["hit"] and result["written"]
    store = disk_process.large_store(str(tmp_path / "kv"))
    assert sum(file.stat().st_size for file in (tmp_path / "kv").iterdir()) <= store.max_bytes * 18 // 16
    assert temporaries(store.path) == []


@pytest.mark.parametrize("number", [10, pytest.param(200, marks=pytest.mark.exhaustive)])
def test_a_kill_at_any_moment_leaves_right_pages_alone(tmp_path: Path, number: int) -> None:
    """Kill -9 of a process that writes: no page is damaged, the next process has hits, and nothing piles up."""
    result = result_of(run("kills", tmp_path / "kv", number))
    assert result["damaged"] == result["kept"] == 0 and result["hit"] + result["miss"] == 24 * number
    assert result["hit"] >= 8 * number
    assert result["left"] or number < 200, "no kill came while a file was written"
