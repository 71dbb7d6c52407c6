"""Memory that two processes share: who may map it, and that no name of it stays behind, whoever dies when."""

import os
import re
import secrets
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from m6_multimodal_pd.disaggregation.runtime import shared_memory
from m6_multimodal_pd.disaggregation.runtime.shared_memory import (
    SharedMemorySegments,
    owner_by_hand,
    remove_abandoned,
    remove_leftovers,
    segment_directory,
)
from m6_multimodal_pd.disaggregation.staging import StagedSource, StagedTarget
from m6_multimodal_pd.errors import TransferError
from tests.m6_multimodal_pd.pd_engines import free_frames
from tests.m6_multimodal_pd.processes import open_files
from tests.m6_multimodal_pd.transfers import Memory, sent

ROOT = Path(__file__).parents[2]


@pytest.fixture
def owner() -> Iterator[str]:
    """A name that nobody else has, and nothing of it left at the end."""
    name = f"test{secrets.token_hex(8)}"
    yield name
    assert remove_leftovers(name) == []


@pytest.fixture
def source(owner: str) -> Iterator[StagedSource]:
    source = StagedSource(Memory(num_pages=9, seed=1).store, SharedMemorySegments(owner), num_frames=4)
    yield source
    source.close()


@pytest.fixture
def target(owner: str) -> StagedTarget:
    return StagedTarget(Memory(num_pages=9, seed=2).store, SharedMemorySegments(owner))


def leftovers(owner: str) -> list[str]:
    """Names of segments that this owner has created and not unlinked."""
    names = os.listdir(segment_directory())
    return sorted(name for name in names if re.fullmatch(f"stepwise-{owner}-[0-9a-f]{{32}}", name))


def mappings(segment: str) -> list[str]:
    """How this process has it mapped, under its name or without one: for reading, for writing."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted(line.split()[1] for line in lines if segment in line)


on_linux = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="this system does not list mappings")


# --- names ------------------------------------------------------------------------------------------------------------


def test_a_segment_has_a_name_until_a_ticket_returns(owner: str, source: StagedSource, target: StagedTarget) -> None:
    ticket = sent(source)
    assert leftovers(owner) == [ticket.segment] and (segment_directory() / ticket.segment).exists()
    target.receive("p", ticket, [1]).write()
    assert leftovers(owner) == [ticket.segment]
    source.release("d", ticket.number)
    assert leftovers(owner) == [] and not (segment_directory() / ticket.segment).exists()
    target.receive("p", sent(source), [1]).write()  # without a name as with one


@pytest.mark.parametrize("end", [lambda source: source.forget("d"), lambda source: source.close()])
@pytest.mark.parametrize("is_taken", [True, False])
def test_a_name_is_gone_after_forget_and_after_close(
    owner: str, source: StagedSource, end: Callable[[StagedSource], None], is_taken: bool
) -> None:
    ticket = sent(source)
    if is_taken:
        source.release("d", ticket.number)
    end(source)
    assert leftovers(owner) == []
    end(source)


@on_linux
def test_memory_is_mapped_once_by_each_side_and_freed(owner: str, source: StagedSource, target: StagedTarget) -> None:
    descriptors = open_files()
    for _ in range(2):
        segment = (ticket := sent(source)).segment
        assert mappings(segment) == ["rw-s"]
        target.receive("p", ticket, [1]).write()
        source.release("d", ticket.number)
        assert mappings(segment) == ["r--s", "rw-s"], "a target cannot write"
        source.forget("d")
        assert mappings(segment) == ["r--s"]
        target.forget("p")
        assert mappings(segment) == [] and open_files() == descriptors


def test_the_memory_is_there_at_once_for_its_owner_alone_and_empty(source: StagedSource) -> None:
    ticket = sent(source)
    status = (segment_directory() / ticket.segment).stat()
    num_bytes = 4 * source.store.page_bytes
    assert stat.S_IMODE(status.st_mode) == 0o600 and status.st_size == num_bytes
    assert status.st_blocks * 512 >= num_bytes, "a write could find no memory"
    assert not any((segment_directory() / ticket.segment).read_bytes()[source.store.page_bytes :])


def test_memory_that_is_not_there_leaves_no_name(owner: str) -> None:
    source = StagedSource(Memory(num_pages=3, seed=1).store, SharedMemorySegments(owner), num_frames=2**50)
    with pytest.raises(TransferError, match="cannot be had"):
        source.send("d", [1])
    assert leftovers(owner) == []


def test_a_name_that_exists_is_never_used(source: StagedSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory.secrets, "token_hex", lambda size: size * "ab")
    first = sent(source)
    with pytest.raises(TransferError, match="cannot be had"):
        source.send("e", [1])
    assert free_frames(source, "d") == 3 and (segment_directory() / first.segment).exists()


def test_a_sweep_takes_what_is_this_owners_and_nothing_else(owner: str) -> None:
    other = f"{owner}b"
    ours, theirs = (
        StagedSource(Memory(num_pages=3, seed=1).store, SharedMemorySegments(name), num_frames=1)
        for name in (owner, other)
    )
    names = sorted(sent(ours, f"d{i}").segment for i in range(3))
    kept = [segment_directory() / sent(theirs).segment, segment_directory() / f"stepwise-{owner}-notes"]
    kept[1].touch()
    try:
        assert leftovers(owner) == names and remove_leftovers(owner) == names and leftovers(owner) == []
        assert all(path.exists() for path in kept)
        ours.close()  # finds its names gone, and does not mind
    finally:
        kept[1].unlink()
        theirs.close()


KILLED = """
import os, signal, sys
from m6_multimodal_pd.disaggregation.runtime.shared_memory import SharedMemorySegments, owner_by_hand
print(SharedMemorySegments(owner_by_hand()).create(100)[0], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.exhaustive
def test_what_a_killed_engine_without_a_parent_leaves_is_removed_by_the_next_one() -> None:
    done = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True)
    killed = segment_directory() / done.stdout.strip()
    alive = segment_directory() / SharedMemorySegments(owner_by_hand()).create(100)[0]
    number = killed.name.partition("hand")[2].partition("p")[2].partition("x")[0]
    elsewhere = segment_directory() / f"stepwise-hand123p{number}x000000-{32 * '0'}"  # another container's
    elsewhere.touch()
    try:
        assert killed.exists()
        removed = remove_abandoned()
        assert killed.name in removed and not killed.exists()
        assert alive.exists() and elsewhere.exists()
    finally:
        alive.unlink()
        elsewhere.unlink()


def test_where_there_is_no_shared_memory_files_do(
    owner: str, source: StagedSource, target: StagedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory.Path, "is_dir", lambda path: str(path) != "/dev/shm")
    monkeypatch.setattr(shared_memory.tempfile, "tempdir", str(tmp_path))
    ticket = sent(source)
    assert [path.name for path in tmp_path.iterdir()] == [ticket.segment] == leftovers(owner)
    target.receive("p", ticket, [1]).write()
    source.release("d", ticket.number)
    assert list(tmp_path.iterdir()) == []


# --- hostile tickets --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "../../etc/passwd",
        "stepwise-a/../../etc/passwd",
        "stepwise-a-" + 31 * "0",
        "stepwise-a-" + 32 * "0" + "\n",
        "",
    ],
    ids=repr,
)
def test_a_name_of_another_form_is_not_even_looked_for(
    source: StagedSource, target: StagedTarget, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    ticket = sent(source)
    monkeypatch.setattr(shared_memory.os, "open", lambda *_: pytest.fail("it was opened"))
    with pytest.raises(TransferError, match="is not the name of a segment"):
        target.map("p", msgspec.structs.replace(ticket, segment=name))


def copy_of(true: Path, path: Path, content: Callable[[bytes], bytes], mode: int = 0o600) -> None:
    """Write a changed copy of a segment's file."""
    path.write_bytes(content(true.read_bytes()))
    path.chmod(mode)


FILES: dict[str, tuple[Callable[[Path, Path], Any], str]] = {
    "a link": (lambda true, path: path.symlink_to(true), "cannot be opened"),
    "a pipe": (lambda true, path: os.mkfifo(path, 0o600), "is not a file"),
    "a directory": (lambda true, path: path.mkdir(0o700), "is not a file"),
    "a shorter file": (lambda true, path: copy_of(true, path, lambda content: content[:-1]), "bytes, not"),
    "a longer file": (lambda true, path: copy_of(true, path, lambda content: content + b"\0"), "bytes, not"),
    "a file for all": (lambda true, path: copy_of(true, path, bytes, 0o604), "is open to other users"),
    "nothing": (lambda true, path: None, "cannot be opened"),
}


@pytest.mark.parametrize(("make", "message"), FILES.values(), ids=FILES)
def test_a_name_that_stands_for_something_else_is_refused(
    owner: str, source: StagedSource, target: StagedTarget, make: Callable[[Path, Path], None], message: str
) -> None:
    ticket = sent(source)
    name = f"stepwise-{owner}-{secrets.token_hex(16)}"
    path = segment_directory() / name
    make(segment_directory() / ticket.segment, path)
    try:
        with pytest.raises(TransferError, match=message):
            target.map("p", msgspec.structs.replace(ticket, segment=name))
    finally:
        if path.is_dir():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
    target.map("p", ticket)


def test_another_user_s_file_is_refused(
    source: StagedSource, target: StagedTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticket, user = sent(source), os.geteuid()
    monkeypatch.setattr(shared_memory.os, "geteuid", lambda: user + 1)
    with pytest.raises(TransferError, match="is open to other users"):
        target.map("p", ticket)
