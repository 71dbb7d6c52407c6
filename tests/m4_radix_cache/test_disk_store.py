"""Pages on a disk: they come back as they were, or not at all."""

import errno
import os
import resource
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from m1_single_request.errors import ConfigError
from m4_radix_cache.mem_cache.disk_store import DiskStore
from m4_radix_cache.mem_cache.page_file import DTYPES, BufferSpec
from tests.m4_radix_cache.disk_stores import (
    LAYOUT,
    PAGE_SIZE,
    VOCAB_SIZE,
    chain,
    file_of,
    fill,
    make_store,
    page_of,
    read,
    stored,
    temporaries,
    tokens,
    write,
)
from tests.support.forks import in_a_fork

NOBODY = 65534


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    return make_store(tmp_path / "kv")


@pytest.fixture
def page(store: DiskStore) -> bytes:
    """A page that is there."""
    page = chain(store, 1)[0]
    fill(store, [page])
    return page


# --- pages come back --------------------------------------------------------------------------------------------------


def test_a_page_comes_back_also_in_the_next_process(store: DiskStore) -> None:
    pages = chain(store, 3)
    assert read(store, pages[0]).status == "miss" and not store.contains(pages[0])
    fill(store, pages)
    assert stored(store, pages) == [0, 1, 2] == stored(make_store(store.path), pages)
    assert store.contains(pages[0]) and temporaries(store.path) == []


def test_a_page_that_is_there_is_not_written_again(store: DiskStore, page: bytes) -> None:
    before = file_of(store, page).stat()
    assert write(store, page) == "present" and write(make_store(store.path), page) == "present"
    assert file_of(store, page).stat() == before


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_bits_of_all_types_come_back_and_other_tools_read_them(store: DiskStore, dtype: str) -> None:
    """The library of safetensors is such a tool."""
    layout = {"x": BufferSpec(dtype, (16, 16)), "odd": BufferSpec("uint8", (3,)), "y": BufferSpec(dtype, (1, 256))}
    store = make_store(store.path, layout=layout)
    digest = chain(store, 1)[0]
    numbers = np.arange(256 * DTYPES[dtype][1], dtype=np.uint8)
    assert store.write(digest, [numbers, numbers[:3], numbers[::-1]]).status == "written"
    out = [np.zeros_like(numbers), np.zeros(3, np.uint8), np.zeros_like(numbers)]
    assert store.read(digest, out).status == "hit"
    assert (out[0] == numbers).all() and (out[2] == numbers[::-1]).all()
    with safe_open(file_of(store, digest), framework="pt") as file:
        assert file.metadata()["page"] == digest.hex() and set(file.keys()) == {"x", "odd", "y"}
        tensor = file.get_tensor("x")
    assert tensor.dtype == getattr(torch, dtype) and tensor.shape == (16, 16)
    assert (tensor.view(torch.uint8).flatten().numpy() == numbers).all()


def test_buffers_need_not_be_contiguous(store: DiskStore) -> None:
    """A pool may hold the pages of a layer, or the layers of a page, next to each other."""
    store = make_store(store.path, layout={"kv": BufferSpec("uint8", (3, 4))})
    pool = np.arange(48, dtype=np.uint8).reshape(3, 4, 4)
    digest = chain(store, 1)[0]
    assert store.write(digest, [pool[:, 1]]).status == "written"
    target = np.zeros_like(pool)
    assert store.read(digest, [target[:, 2]]).status == "hit"
    assert (target[:, 2] == pool[:, 1]).all() and not target[:, [0, 1, 3]].any()


def test_only_the_owner_may_read(store: DiskStore, page: bytes) -> None:
    assert stat.S_IMODE(file_of(store, page).stat().st_mode) == 0o600
    assert stat.S_IMODE(os.stat(store.path).st_mode) == 0o700


def test_a_relative_path_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = make_store("kv")
    monkeypatch.chdir("/")
    fill(store, chain(store, 1))
    assert (tmp_path / "kv").is_dir()


# --- names ------------------------------------------------------------------------------------------------------------


def test_names_are_the_same_in_every_process(tmp_path: Path) -> None:
    """Another value means that no page of an earlier version is found: then `FORMAT` has to change as well."""
    store = make_store(tmp_path)
    assert store.root(None).hex().startswith("6a1d4debb58feece")
    assert chain(store, 2)[1].hex().startswith("19b6f128d0daaccf")


def test_a_page_is_named_after_all_tokens_before_it(store: DiskStore) -> None:
    root = store.root(None)
    whole = store.digests(root, tokens(3 * PAGE_SIZE + 3))
    assert len(whole) == 3, "whole pages only"
    assert store.digests(whole[0], tokens(2 * PAGE_SIZE, first=PAGE_SIZE)) == whole[1:]
    other = store.digests(root, tokens(PAGE_SIZE, first=1) + tokens(2 * PAGE_SIZE, first=PAGE_SIZE))
    assert not {*whole} & {*other} and store.digests(root, b"") == []


def test_every_part_of_a_description_changes_the_names(tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [
        {},
        dict(models=["n"]),
        dict(models=["m", "draft"]),
        dict(models=["m, draft"]),
        dict(models=["draft", "m"]),
        dict(page_size=2),
        dict(layout={**LAYOUT, "k": BufferSpec("float16", (2, 3, 4))}),
        dict(layout={**LAYOUT, "k": BufferSpec("bfloat16", (4, 3, 2))}),
        dict(layout=dict(reversed(LAYOUT.items()))),
        dict(layout={"w": LAYOUT["k"], "v": LAYOUT["v"], "scales": LAYOUT["scales"]}),
    ]
    stores = [make_store(tmp_path, **change) for change in changes]
    assert len({store.root(None) for store in stores}) == len(changes)


SALTS = st.none() | st.text(st.characters(min_codepoint=0, max_codepoint=0x10FFFF, exclude_categories=()), max_size=4)


@given(one=SALTS, other=SALTS)
def test_namespaces_are_apart(tmp_path_factory: pytest.TempPathFactory, one: str | None, other: str | None) -> None:
    store = make_store(tmp_path_factory.getbasetemp() / "namespaces")
    assert (store.root(one) == store.root(other)) == (one == other)


@pytest.mark.parametrize("salts", [(None, ""), (None, "None"), ("\U00010000", "\ud800\udc00"), ("-", "+")])
def test_similar_namespaces_are_apart(store: DiskStore, salts: tuple[str | None, str]) -> None:
    """Surrogates as well: in JSON a pair of them is the same as the character that they stand for."""
    assert store.root(salts[0]) != store.root(salts[1])


@pytest.mark.parametrize(("image", "pages"), [(0, 0), (PAGE_SIZE - 1, 0), (PAGE_SIZE, 1), (3 * PAGE_SIZE - 1, 2)])
def test_no_page_from_the_first_image_on_has_a_name(store: DiskStore, image: int, pages: int) -> None:
    """The key of an image is a number that this process has chosen: in the next one it is another image."""
    ids = np.frombuffer(tokens(3 * PAGE_SIZE), "<i4").copy()
    ids[image] = VOCAB_SIZE
    assert store.digests(store.root(None), ids.tobytes()) == chain(store, 3)[:pages]
    ids[image] = VOCAB_SIZE - 1
    assert len(store.digests(store.root(None), ids.tobytes())) == 3


# --- damage -----------------------------------------------------------------------------------------------------------


def other_page(path: Path) -> None:
    shutil.copy(next(file for file in path.parent.iterdir() if file != path and file.is_file()), path)


def symlink(path: Path) -> None:
    """To a good copy of the page itself."""
    path.rename(path.parent / "copy")
    path.symlink_to(path.parent / "copy")


def instead(make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Remove the page and make something else in its place."""

    def replace(path: Path) -> None:
        path.unlink()
        make(path)

    replace.__name__ = make.__name__
    return replace


DAMAGES: list[Callable[[Path], object]] = [
    other_page,
    symlink,
    instead(Path.touch),
    instead(os.mkfifo),
    instead(lambda path: path.symlink_to(path)),
    instead(lambda path: path.symlink_to("/dev/zero")),
    instead(lambda path: os.mknod(path, stat.S_IFSOCK | 0o600)),
    instead(lambda path: save_file({"k": np.zeros(3)}, path)),
    lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    lambda path: path.write_bytes(path.read_bytes() * 1000),
    lambda path: path.write_bytes(bytes(path.stat().st_size)),
    lambda path: path.write_bytes(b"\xff" * path.stat().st_size),
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_not_the_page_is_a_miss_and_goes_away(
    store: DiskStore, page: bytes, damage: Callable[[Path], object]
) -> None:
    other = chain(store, 2)[1]
    fill(store, [other])
    damage(file_of(store, page))
    result = read(store, page)
    assert result.status == "damaged" and result.reason
    assert read(store, page).status == "miss"
    assert write(store, page) == "written" and read(store, page).status == read(store, other).status == "hit"


def test_a_reader_does_not_remove_what_a_link_points_to(store: DiskStore, page: bytes) -> None:
    symlink(file_of(store, page))
    assert read(store, page).status == "damaged"
    assert [file.name for file in Path(store.path).iterdir()] == ["copy"]


def test_a_link_of_the_length_of_a_page_is_no_page(store: DiskStore, page: bytes) -> None:
    file_of(store, page).unlink()
    file_of(store, page).symlink_to("x" * store.file_bytes)
    assert not store.contains(page) and write(store, page) == "written" and read(store, page).status == "hit"


def test_all_files_are_closed(store: DiskStore, page: bytes) -> None:
    def lowest_free() -> int:
        os.close(number := os.open(os.devnull, os.O_RDONLY))
        return number

    before = lowest_free()
    pages = chain(store, 3)
    fill(store, pages[1:])
    instead(os.mkfifo)(file_of(store, pages[2]))
    assert [read(store, page).status for page in pages] == ["hit", "hit", "damaged"]
    instead(Path.mkdir)(file_of(store, page))
    assert write(store, page) == "failed" and lowest_free() == before


def test_two_pages_that_were_exchanged_are_both_damaged(store: DiskStore) -> None:
    pages = chain(store, 2)
    fill(store, pages)
    one, other = (file_of(store, page) for page in pages)
    one.rename(one.parent / "x")
    other.rename(one)
    (one.parent / "x").rename(other)
    assert [read(store, page).status for page in pages] == ["damaged", "damaged"]


def test_every_bit_is_checked(store: DiskStore, page: bytes) -> None:
    """Those of the header, too."""
    path = file_of(store, page)
    content = path.read_bytes()
    for bit in range(len(content) * 8):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        assert read(store, page).status == "damaged", f"bit {bit} was flipped"
    assert len(content) * 8 > 2000


def test_a_file_may_end_anywhere(store: DiskStore, page: bytes) -> None:
    path = file_of(store, page)
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        assert not store.contains(page)
        assert read(store, page).status == "damaged", f"after {length} bytes"


def test_a_directory_in_place_of_a_page_stays(store: DiskStore, page: bytes) -> None:
    """It was made by somebody, and may hold anything."""
    path = file_of(store, page)
    path.unlink()
    path.mkdir()
    (path / "file").touch()
    assert read(store, page).status == "damaged" and not store.contains(page)
    assert write(store, page) == "failed" and (path / "file").exists()
    assert read(store, page).status == "damaged" and temporaries(store.path) == []


def test_another_model_finds_nothing_and_leaves_everything(store: DiskStore, page: bytes) -> None:
    other = make_store(store.path, models=["other"])
    pages = chain(other, 1)
    assert stored(other, pages) == []
    fill(other, pages)
    assert stored(store, [page]) == [0] == stored(other, pages)


# --- a directory that cannot be used ----------------------------------------------------------------------------------


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that any user can reach, of a user who is not the superuser."""
    path = Path(tempfile.mkdtemp())
    if os.geteuid() == 0:
        os.chown(path, NOBODY, NOBODY)
    yield path
    path.chmod(0o700)
    shutil.rmtree(path)


def as_a_user(call: Callable[[], Any]) -> Any:
    """What `call` returns in a process for which permissions count."""

    def run() -> Any:
        if os.geteuid() == 0:
            os.setuid(NOBODY)
        return call()

    return in_a_fork(run)


def error_of(path: Path | str, **changes: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        make_store(path, **changes)
    return str(raised.value)


@pytest.mark.parametrize("mode", [0o000, 0o300, 0o500])
def test_a_directory_without_permission_is_an_error_at_the_start(public: Path, mode: int) -> None:
    public.chmod(mode)
    assert "cannot be used (Permission denied)" in as_a_user(lambda: error_of(public))
    if not mode & 0o200:
        assert "cannot be used (Permission denied)" in as_a_user(lambda: error_of(public / "new" / "kv"))


def test_a_permission_that_is_taken_away_only_stops_the_disk(public: Path) -> None:
    def run() -> list[str]:
        store = make_store(public)
        pages = chain(store, 3)
        fill(store, pages[:2])
        file_of(store, pages[0]).chmod(0)
        found = [read(store, pages[0]).reason]
        public.chmod(0o500)
        found += [read(store, pages[1]).status, store.write(pages[2], page_of(pages[2])).reason]
        found += [cleared(store)]
        public.chmod(0)
        found += [read(store, pages[1]).reason, store.write(pages[2], page_of(pages[2])).reason]
        store.touch(pages)
        found += [cleared(store)]
        public.chmod(0o700)
        return [*found, read(store, pages[1]).status, write(store, pages[2]), cleared(store)]

    denied = "Permission denied"
    assert as_a_user(run) == [denied, "hit", denied, denied, denied, denied, denied, "hit", "written", ""]


def cleared(store: DiskStore) -> str:
    """Remove all pages; the error that it raises."""
    try:
        store.clear()
    except OSError as error:
        return str(error.strerror)
    return ""


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o1777])
def test_a_directory_that_others_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    assert "can be written by other users, who could replace KV" in error_of(tmp_path)
    make_store(tmp_path / "new")


def test_a_directory_that_others_can_list_is_used_as_it_is(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    store = make_store(tmp_path)
    fill(store, chain(store, 1))
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
    assert stat.S_IMODE(file_of(store, chain(store, 1)[0]).stat().st_mode) == 0o600


def test_a_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert "other users" in error_of(tmp_path)


def test_what_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "kv", "/dev/null/kv", "/proc/kv", "a\0b"):
        assert "cannot be used" in error_of(path)


def test_less_room_than_a_page_is_refused(tmp_path: Path) -> None:
    size = make_store(tmp_path).file_bytes
    assert "disk_bytes=10 is less than one page" in error_of(tmp_path / "new", max_bytes=10)
    assert not (tmp_path / "new").exists()
    assert write(make_store(tmp_path, max_bytes=size), bytes(32)) == "written"


# --- errors of the system ---------------------------------------------------------------------------------------------


def test_a_full_disk_leaves_nothing_behind(store: DiskStore, page: bytes) -> None:
    """A file may be as long as half a page: a part of it is written, then there is an error."""
    other = chain(store, 2)[1]

    def run() -> Any:
        resource.setrlimit(resource.RLIMIT_FSIZE, (store.file_bytes // 2, resource.RLIM_INFINITY))
        result = store.write(other, page_of(other))
        left = [read(store, other).status, read(store, page).status, temporaries(store.path)]
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        return [*result, *left, store.used_bytes, write(store, other), read(store, other).status]

    used = store.file_bytes
    assert in_a_fork(run) == ["failed", os.strerror(errno.EFBIG), "miss", "hit", [], used, "written", "hit"]


@pytest.mark.parametrize("call", ["tempfile.mkstemp", "fcntl.flock", "os.replace", "os.scandir"])
def test_an_error_of_the_system_is_a_reason(store: DiskStore, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(store.path, max_bytes=3 * store.file_bytes)
    pages = chain(store, 4)
    fill(store, pages[:3])
    before = sorted(os.listdir(store.path))

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(call, fail)
        assert store.write(pages[3], page_of(pages[3])) == ("failed", "No space left on device")
    assert set(os.listdir(store.path)) <= set(before), "a temporary file is left"
    assert write(store, pages[3]) == "written" and read(store, pages[3]).status == "hit"


@pytest.mark.parametrize(("number", "status"), [(errno.EIO, "damaged"), (errno.EMFILE, "failed")])
def test_a_page_that_cannot_be_read_is_removed_and_nothing_else(
    store: DiskStore, page: bytes, number: int, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block that the disk has lost does not come back. Too many open files are no fault of the page."""

    def fail(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fail)
        assert read(store, page) == (status, os.strerror(number))
    assert store.contains(page) == (status == "failed")


@pytest.mark.parametrize("gone", [shutil.rmtree, lambda path: (shutil.rmtree(path), Path(path).touch())])
def test_a_directory_that_disappears_only_stops_the_disk(
    store: DiskStore, page: bytes, gone: Callable[[str], object]
) -> None:
    gone(store.path)
    assert read(store, page).status == "miss" and not store.contains(page)
    assert write(store, page) == "failed"
    store.touch([page])
    store.clear()
    shutil.rmtree(store.path) if os.path.isdir(store.path) else None
    Path(store.path).unlink(missing_ok=True)
    os.mkdir(store.path)
    assert write(store, page) == "written" and read(store, page).status == "hit", "it is used when it is back"
