"""The kernels are compiled once, kept in private, and never a reason to crash.

The compiler here is a script that hands out what a real one made before, and keeps a list of what it was asked for.
"""

import ctypes
import os
import platform
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from m3_paged_attention.attention import native_library
from m3_paged_attention.attention.native_library import NativeUnavailable

if REASON := native_library.obstacle():
    pytest.skip(REASON, allow_module_level=True)

MakeCompiler = Callable[..., "Compiler"]


class Compiler:
    """A script that CXX names."""

    def __init__(self, path: Path, library: Path, version: str, work: str) -> None:
        self.path, self.log = path, path.with_suffix(".log")
        path.write_text(f"""#!/bin/sh
            [ "$1" = --version ] && {{ {version}; exit; }}
            echo "$@" >> '{self.log}'
            for target; do :; done
            {work.replace("LIBRARY", str(library))}
        """)
        path.chmod(0o700)

    @property
    def calls(self) -> list[str]:
        """The arguments of every compilation."""
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a real compiler makes of the source, in a hurry."""
    target = tmp_path_factory.mktemp("compiled") / "kernels.so"
    native_library.build(native_library.find_compiler(), target, ("-std=c++17", "-O0", "-Wno-psabi"))
    return target


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where compiled kernels are kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "stepwise"


@pytest.fixture
def make_compiler(compiled: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeCompiler:
    """`make_compiler(work="cp LIBRARY $target", version="echo 1")`, and CXX names it."""

    def make(work: str = 'cp LIBRARY "$target"', version: str = "echo 1") -> Compiler:
        monkeypatch.setenv("CXX", str(tmp_path / "compiler"))
        return Compiler(tmp_path / "compiler", compiled, version, work)

    return make


@pytest.fixture(autouse=True)
def nothing_is_remembered() -> Iterator[None]:
    """Each `load()` of a test is as that of a new process, after `forget()`."""
    forget()
    yield
    forget()


def forget() -> None:
    native_library.load.cache_clear()
    native_library.obstacle.cache_clear()


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def check_works(library: ctypes.CDLL) -> None:
    """It computes: silu(0) * 3 is 0, and silu of a large number is that number."""
    gate_up, y = torch.tensor([[0.0, 50.0] * 8 + [3.0, 2.0] * 8]), torch.empty(1, 16)
    library.silu_mul_float32(gate_up.data_ptr(), y.data_ptr(), 1, 16, 1)
    assert y.tolist() == [[0.0, 100.0] * 8]


def test_what_was_compiled_once_is_found_again(make_compiler: MakeCompiler, cache: Path) -> None:
    compiler = make_compiler()
    check_works(native_library.load())
    assert native_library.load() is native_library.load() and len(compiler.calls) == 1
    kept = names(cache)
    forget()
    check_works(native_library.load())
    assert len(compiler.calls) == 1 and names(cache) == kept
    (name,) = kept
    assert name.startswith("native-") and name.endswith(".so"), "and nothing else is left there"
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700, "code that others could put there would run as the user's"
    assert all(flag in compiler.calls[0].split() for flag in (*native_library.FLAGS, *native_library.LINK))


def test_without_xdg_cache_home_it_is_below_the_home_directory(
    make_compiler: MakeCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_compiler()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    native_library.load()
    assert len(names(tmp_path / ".cache" / "stepwise")) == 1


@pytest.mark.parametrize("changed", ["source", "flags", "version", "processor", "compiler"])
def test_whatever_the_result_depends_on_is_in_its_name(
    make_compiler: MakeCompiler, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    compiler = make_compiler()
    native_library.load()
    (before,) = names(cache)
    forget()
    if changed == "source":
        sources = shutil.copytree(native_library.SOURCES, tmp_path / "changed")
        with (sources / "linear.h").open("a") as file:
            file.write("\n")
        monkeypatch.setattr(native_library, "SOURCES", sources)
    elif changed == "flags":
        monkeypatch.setattr(native_library, "FLAGS", (*native_library.FLAGS, "-g"))
    elif changed == "version":
        compiler = make_compiler(version="echo 2")
    elif changed == "processor":
        monkeypatch.setattr(platform, "machine", lambda: "z80")
    else:
        other = compiler.path.rename(tmp_path / os.fsdecode(b"other\xff"))  # a name that is not UTF-8
        monkeypatch.setenv("CXX", str(other))
    native_library.load()
    assert len(compiler.calls) == 2
    assert len(names(cache)) == 2 and before in names(cache), "what others may use stays"


def a_file_in_the_way(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.parent.write_text("")


def a_directory_in_the_way(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.replace
    monkeypatch.setattr(Path, "replace", lambda self, target: real(self, cache if "cache" in target.parts else target))


def no_home(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may run as a user that its system does not know."""
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: Path("~nobody-of-this-name").expanduser())


def code_must_not_run_there(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = native_library.open_library

    def open_library(path: Path) -> ctypes.CDLL:
        if path.parent == cache:
            raise OSError("failed to map segment from shared object: operation not permitted")
        return real(path)

    monkeypatch.setattr(native_library, "open_library", open_library)


@pytest.mark.parametrize("trouble", [a_file_in_the_way, a_directory_in_the_way, no_home, code_must_not_run_there])
def test_without_a_place_to_keep_them_kernels_come_from_a_temporary_one(
    make_compiler: MakeCompiler,
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    trouble: Callable[[Path, pytest.MonkeyPatch], None],
) -> None:
    compiler = make_compiler()
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    trouble(cache, monkeypatch)
    check_works(native_library.load())
    assert native_library.obstacle() is None and compiler.calls
    assert not names(tmp_path / "temporary"), "it is gone, and the kernels work on"


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "no library": lambda content: b"no library",
    "a full disk": lambda content: b"\x7fELF and the disk was full",
    "cut off": lambda content: content[: len(content) // 2],  # the system opens it and the one below without complaint
    "another bit": lambda content: bytes(byte ^ (at == len(content) // 2) for at, byte in enumerate(content)),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_library_is_compiled_anew(
    make_compiler: MakeCompiler,
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[bytes], bytes],
) -> None:
    """Some of these would load and crash: only the digest tells."""
    compiler = make_compiler()
    native_library.load()
    (kept,) = cache.iterdir()
    damaged = tmp_path / "elsewhere" / "stepwise" / kept.name  # the system opens no path twice in a process
    damaged.parent.mkdir(parents=True, mode=0o700)
    damaged.write_bytes(damage(kept.read_bytes()))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    for _ in range(2):
        forget()
        check_works(native_library.load())
    assert len(compiler.calls) == 2, "once, and then it is there again"
    assert names(damaged.parent) == names(cache) and damaged.read_bytes() == kept.read_bytes()


@pytest.mark.parametrize("named", [None, "clang-of-tomorrow", "/nowhere/c++", ""])
def test_without_a_compiler_it_is_said_what_was_looked_for(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, named: str | None
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    if named is not None:
        monkeypatch.setenv("CXX", named)
    expected = f"CXX={named!r} names no compiler that can be run"
    if not named:
        expected = "there is no C++ compiler (c++, g++, clang++) to compile its kernels with"
    assert native_library.obstacle() == expected
    with pytest.raises(NativeUnavailable):
        native_library.load()
    assert not cache.exists()


def test_the_first_compiler_that_is_installed_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    for name in ("clang++", "g++", "c++"):
        (tmp_path / name).touch(mode=0o700)
        assert native_library.find_compiler() == str(tmp_path / name)
    monkeypatch.setenv("CXX", "g++")
    assert native_library.find_compiler() == str(tmp_path / "g++")


@pytest.mark.parametrize(
    ("work", "said"),
    [
        ("echo In file included from x.h >&2; echo 'x.h:1: error: no such thing' >&2; exit 1", "x.h:1: error: no such"),
        ("echo out of memory >&2; exit 1", "(out of memory)"),
        ("exit 3", "(exit status 3)"),
        ("kill -9 $$", "(exit status -9)"),
        ("exit 0", "cannot be loaded"),  # and it wrote nothing
        ("echo no library > $target", "cannot be loaded"),
    ],
)
def test_a_compiler_that_fails_is_quoted_in_a_clause(
    make_compiler: MakeCompiler, cache: Path, work: str, said: str
) -> None:
    make_compiler(work)
    obstacle = native_library.obstacle()
    assert obstacle is not None and said in obstacle
    assert "\n" not in obstacle and not obstacle.endswith(".")
    assert not [name for name in names(cache) if name.startswith(".")], "no draft is left"


def test_a_file_that_is_no_program_is_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c++").write_bytes(b"\x00\x01")
    (tmp_path / "c++").chmod(0o700)
    monkeypatch.setenv("CXX", str(tmp_path / "c++"))
    obstacle = native_library.obstacle()
    assert obstacle is not None and "cannot be run" in obstacle


def test_nobody_waits_forever_for_a_compiler(
    make_compiler: MakeCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "never")
    compiler = make_compiler(f"read answer < '{tmp_path / 'never'}'")
    monkeypatch.setattr(native_library, "SECONDS", 0.3)
    (tmp_path / "target").mkdir()
    with pytest.raises(NativeUnavailable, match=r"took more than 0.3 seconds to compile its kernels"):
        native_library.build(str(compiler.path), tmp_path / "target" / "kernels.so")
    assert not names(tmp_path / "target")
    make_compiler(version=f"read answer < '{tmp_path / 'never'}'")
    obstacle = native_library.obstacle()
    assert obstacle is not None and "cannot be run" in obstacle


def test_two_processes_may_compile_at_once(make_compiler: MakeCompiler, tmp_path: Path, cache: Path) -> None:
    """Each waits in its compiler until the other is there, too. The last one replaces an equal file."""
    os.mkfifo(tmp_path / "both")
    meet = f"cd '{tmp_path}'; if mkdir first 2> /dev/null; then read other < both; else echo > both; fi"
    compiler = make_compiler(f'{meet}; cp LIBRARY "$target"')
    with ThreadPoolExecutor(2) as threads:
        libraries = list(threads.map(lambda _: native_library.load.__wrapped__(), range(2)))
    for library in libraries:
        check_works(library)
    assert len(compiler.calls) == 2 and len(names(cache)) == 1


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_nothing_is_taken_from_a_directory_that_others_may_write(
    make_compiler: MakeCompiler, cache: Path, mode: int
) -> None:
    compiler = make_compiler()
    native_library.load()
    (kept,) = cache.iterdir()
    before = kept.stat().st_mtime_ns
    cache.chmod(mode)
    forget()
    check_works(native_library.load())
    assert len(compiler.calls) == 2 and kept.stat().st_mtime_ns == before, "compiled elsewhere, and not kept"


def test_what_a_killed_process_left_is_removed_later(make_compiler: MakeCompiler, cache: Path) -> None:
    make_compiler()
    for name, age in ((".building-long-ago", 10_000), (".building-now", 0)):
        (cache / name).mkdir(parents=True, mode=0o700)
        (cache / name / "draft.so").write_bytes(b"half")
        then = time.time() - age
        os.utime(cache / name, (then, then))
    cache.chmod(0o700)
    native_library.load()
    assert [name for name in names(cache) if name.startswith(".")] == [".building-now"], (
        "perhaps of a process that compiles"
    )


def test_a_full_disk_is_no_obstacle_while_there_is_another(
    make_compiler: MakeCompiler, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, real = make_compiler(), shutil.disk_usage
    full = real("/")._replace(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full if Path(path) == cache else real(path))
    check_works(native_library.load())
    assert len(compiler.calls) == 1 and not names(cache)
    forget()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    assert "No space left on device" in str(native_library.obstacle())


def test_an_interrupt_leaves_no_draft_and_the_next_start_compiles(
    make_compiler: MakeCompiler, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, real = make_compiler(), native_library.subprocess.run

    def interrupted(command: list[str], **options: object) -> object:
        if "--version" not in command:
            Path(command[-1]).write_bytes(b"half")
            raise KeyboardInterrupt
        return real(command, **options)

    monkeypatch.setattr(native_library.subprocess, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        native_library.obstacle()
    assert not names(cache)
    monkeypatch.setattr(native_library.subprocess, "run", real)
    check_works(native_library.load())
    assert len(compiler.calls) == 1


def test_another_library_in_its_place_is_said(make_compiler: MakeCompiler) -> None:
    import _ctypes

    make_compiler(f"cp '{_ctypes.__file__}' $target")
    assert "is another library" in str(native_library.obstacle())
