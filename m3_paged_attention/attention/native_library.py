"""Compiles the kernels of the `native` backend for this processor, once, and loads them.

The source travels with the package and the machine code does not: what a processor can do is known where it runs. The
result is kept in the user's cache directory under a name made of everything it depends on, so a change of source,
compiler or processor compiles anew, and two processes that start together do no harm. It takes about two seconds. What
lies there is run as code, so it is used only if it is whole and nobody else could have put it there.
"""

import contextlib
import ctypes
import errno
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

SOURCES = Path(__file__).with_name("native")  # kernels.cpp and what it includes
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi")
LINK = ("-fopenmp", "-shared", "-fPIC")  # torch brings the same OpenMP library: its threads are ours
COMPILERS = ("c++", "g++", "clang++")
SECONDS = 120  # for the compiler
DRAFT = ".building-"  # how the names of directories begin in which somebody compiles
ROOM = 2**20  # bytes that compiling takes; a linker without them fails and does not say why
DIGEST_SIZE = hashlib.sha256().digest_size

P, N, INT, F = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float  # pointer, size, flag, number
SIGNATURES = {
    "pack": (P, P, N, N, INT),
    "linear": (P, P, P, P, N, N, N, INT),
    "attend": (P, P, P, P, P, P, N, N, N, N, N, N, N, F, INT),
    "attend_to_prompts": (P, P, P, P, P, P, P, N, N, N, N, N, N, N, F, INT),
    "store_kv": (P, P, P, P, P, N, N, N, N),
    "rms_norm": (P, P, P, N, N, N, N, INT, F, INT),
    "add_rms_norm": (P, P, P, P, N, N, F, INT),
    "rotary": (P, P, P, N, N, N, N, INT),
    "silu_mul": (P, P, N, N, INT),
}
"""The functions of kernels.cpp and their arguments, in its order."""
PRECISIONS = ("float32", "bfloat16")


class NativeUnavailable(Exception):
    """These kernels cannot be had here; the message is one clause that says why."""


@functools.cache
def load() -> ctypes.CDLL:
    """The compiled kernels. Raises `NativeUnavailable`."""
    compiler = find_compiler()
    identity = hashlib.sha256()
    sources = [path.read_bytes() for path in sorted(SOURCES.glob("*.[ch]*"))]
    for part in (*sources, " ".join((*FLAGS, *LINK)).encode(), _version(compiler), _processor()):
        identity.update(hashlib.sha256(part).digest())
    name = f"native-{identity.hexdigest()[:24]}.so"
    try:
        directory = _cache_directory()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(directory)
        _remove_old_drafts(directory)
        return _kept(directory / name) or _built(compiler, directory / name)
    except (OSError, RuntimeError):  # no home, no place to keep it, or none from which code may run
        try:
            with tempfile.TemporaryDirectory(prefix="stepwise-") as instead:
                return _built(compiler, Path(instead) / name)
        except OSError as error:
            raise NativeUnavailable(f"its compiled kernels cannot be loaded ({error})") from error


@functools.cache
def obstacle() -> str | None:
    """Why the kernels cannot be had here, or None. Compiles them if nobody did before."""
    try:
        load()
    except NativeUnavailable as error:
        return str(error)
    return None


def find_compiler() -> str:
    """The C++ compiler: what the environment variable CXX names, or the first that is installed."""
    named = os.environ.get("CXX")
    for candidate in (named,) if named else COMPILERS:
        if found := shutil.which(candidate):
            return found
    if named:
        raise NativeUnavailable(f"CXX={named!r} names no compiler that can be run")
    raise NativeUnavailable(f"there is no C++ compiler ({', '.join(COMPILERS)}) to compile its kernels with")


def build(compiler: str, target: Path, flags: tuple[str, ...] = FLAGS) -> None:
    """Compile to `target`, which appears whole or not at all, and ends with the digest of what is before.

    Raises `NativeUnavailable` if the compiler cannot, OSError if the directory cannot be written.
    """
    if shutil.disk_usage(target.parent).free < ROOM:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target.parent))
    with tempfile.TemporaryDirectory(prefix=DRAFT, dir=target.parent) as directory:
        draft = Path(directory) / target.name
        command = [compiler, *flags, *LINK, str(SOURCES / "kernels.cpp"), "-o", str(draft)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=SECONDS)
        except subprocess.TimeoutExpired as error:
            raise NativeUnavailable(f"{compiler} took more than {SECONDS} seconds over its kernels") from error
        if done.returncode != 0:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
            said = lines[0].strip() if lines else f"exit status {done.returncode}"
            raise NativeUnavailable(f"{compiler} cannot compile its kernels ({said})")
        with draft.open("rb+") as file:  # the system's loader does not mind what follows
            file.write(hashlib.sha256(file.read()).digest())
        draft.replace(target)


def open_library(path: Path) -> ctypes.CDLL:
    """The library with the types of its functions. Raises OSError if the system refuses to load it."""
    library = ctypes.CDLL(str(path))
    for name, arguments in SIGNATURES.items():
        for precision in PRECISIONS:
            try:
                function = getattr(library, f"{name}_{precision}")
            except AttributeError as error:
                raise OSError(f"{path.name} is another library: {error}") from error
            function.argtypes, function.restype = arguments, None
    return library


def _kept(path: Path) -> ctypes.CDLL | None:
    """What an earlier process compiled, unless there is nothing or it is damaged.

    It is looked at first: the system maps a file that was cut off as if it were whole, and the process dies later.
    """
    try:
        content = path.read_bytes()
        is_whole = hashlib.sha256(content[:-DIGEST_SIZE]).digest() == content[-DIGEST_SIZE:]
        return open_library(path) if is_whole else None
    except OSError:
        return None


def _built(compiler: str, path: Path) -> ctypes.CDLL:
    build(compiler, path)
    return open_library(path)


def _check_private(directory: Path) -> None:
    """Raise OSError if somebody else may write there."""
    found = directory.stat()
    if os.name == "posix" and (found.st_uid != os.getuid() or found.st_mode & 0o022):
        raise PermissionError(f"{directory} is not private")


def _remove_old_drafts(directory: Path) -> None:
    """What processes that were killed while they compiled have left behind."""
    for draft in directory.glob(f"{DRAFT}*"):
        with contextlib.suppress(OSError):
            if time.time() - draft.stat().st_mtime > 2 * SECONDS:
                shutil.rmtree(draft)


def _cache_directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stepwise"


def _version(compiler: str) -> bytes:
    try:
        done = subprocess.run([compiler, "--version"], capture_output=True, timeout=SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"{compiler} cannot be run ({error})") from error
    return compiler.encode() + done.stdout


def _processor() -> bytes:
    """What the machine code may use. A home directory may be shared by machines of several kinds."""
    known = [platform.machine(), platform.processor()]
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    known += sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
    return "\n".join(known).encode()
