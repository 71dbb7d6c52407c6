"""Compile the kernels of the `native` backend for this processor, once, and load them.

The package contains only the source, because the machine code depends on the processor's instructions. The compiled
library is stored in the user's cache directory. Its name is a hash of the source, the compiler and the processor, so a
change of any of them compiles again, and processes that start at the same time do not conflict. Compiling takes some
seconds. The library runs as code, so it is loaded only if it is complete and no other user can write there.
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

from torch import Tensor

SOURCES = Path(__file__).with_name("native")  # kernels.cpp and what it includes
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi")
LINK = ("-fopenmp", "-shared", "-fPIC")  # torch loads the same OpenMP library, so both share its threads
COMPILERS = ("c++", "g++", "clang++")
SECONDS = 120  # timeout of the compiler
BUILD_PREFIX = ".building-"  # of the names of temporary build directories
BUILD_BYTES = 2**20  # free disk space for a build; a linker that lacks it fails without a clear message
DIGEST_SIZE = hashlib.sha256().digest_size


class T:
    """An argument that is a tensor, or None: the function gets the address of its first element."""

    @staticmethod
    def from_param(argument: Tensor | int | None) -> ctypes.c_void_p:
        """Return the address, for ctypes. An `int` is one already."""
        return ctypes.c_void_p(argument.data_ptr() if isinstance(argument, Tensor) else argument)


P, N, INT, F = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float  # pointer, size, flag, number
SIGNATURES = {
    "pack": (T, T, N, N, INT),
    "linear": (T, T, T, T, N, N, N, INT),
    "pack_int8": (T, T, T, N, N, INT),
    "linear_int8": (T, T, T, T, N, N, N, INT),
    "pack_experts": (T, T, N, N, N, N, INT),
    "pack_experts_int8": (T, T, T, N, N, N, N, INT),
    "run_experts": (T, T, T, T, T, T, T, INT, N, N, N, N, N, INT),
    "attend": (T, T, T, T, T, T, INT, N, N, N, N, N, N, N, F, INT),
    "attend_to_prompts": (T, T, T, T, T, T, T, INT, N, N, N, N, N, N, N, F, INT),
    "store_kv": (T, T, T, T, T, INT, N, N, N, N, N, N, INT),
    "rms_norm": (T, T, T, N, N, N, N, INT, F, INT),
    "add_rms_norm": (T, T, T, T, N, N, F, INT),
    "rotary": (T, T, T, N, N, N, N, INT),
    "silu_mul": (T, T, N, N, INT),
    "best_tokens": (P, P, P, P, P, INT, N, N, N, INT),
    "run_layers": (P,),
    "run_step": (P,),
}
"""The functions of kernels.cpp and their arguments, in its order."""
PRECISIONS = ("float32", "bfloat16")


class NativeUnavailable(Exception):
    """The kernels cannot be used on this machine; the message is one clause with the reason."""


@functools.cache
def load() -> ctypes.CDLL:
    """Return the compiled kernels. Raises `NativeUnavailable`."""
    compiler = find_compiler()
    identity = hashlib.sha256()
    sources = [path.read_bytes() for path in sorted(SOURCES.glob("*.[ch]*"))]
    for part in (*sources, " ".join((*FLAGS, *LINK)).encode(), _version(compiler), _processor()):
        identity.update(hashlib.sha256(part).digest())
    name = f"native-{identity.hexdigest()[:24]}.so"
    try:
        directory = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stepwise"
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(directory)
        _remove_stale_builds(directory)
        return _load_cached(directory / name) or _build_and_load(compiler, directory / name)
    except (OSError, RuntimeError):  # no home directory, not writable, or mounted without permission to run code
        try:
            with tempfile.TemporaryDirectory(prefix="stepwise-") as temporary:
                return _build_and_load(compiler, Path(temporary) / name)
        except OSError as error:
            raise NativeUnavailable(f"its compiled kernels cannot be loaded ({error})") from error


@functools.cache
def obstacle() -> str | None:
    """Return the reason why the kernels cannot be used here, or None. Compiles them if they are not in the cache."""
    try:
        load()
    except NativeUnavailable as error:
        return str(error)
    return None


def find_compiler() -> str:
    """Return the C++ compiler: that of the environment variable CXX, or the first installed of `COMPILERS`.

    Raises `NativeUnavailable` if there is none.
    """
    named = os.environ.get("CXX")
    for candidate in (named,) if named else COMPILERS:
        if found := shutil.which(candidate):
            return found
    if named:
        raise NativeUnavailable(f"CXX={named!r} names no compiler that can be run")
    raise NativeUnavailable(f"there is no C++ compiler ({', '.join(COMPILERS)}) to compile its kernels with")


def build(compiler: str, target: Path, flags: tuple[str, ...] = FLAGS) -> None:
    """Compile to `target`, atomically. The file ends with a digest of the bytes before it.

    Raises `NativeUnavailable` if the compiler fails, OSError if the directory cannot be written.
    """
    if shutil.disk_usage(target.parent).free < BUILD_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target.parent))
    with tempfile.TemporaryDirectory(prefix=BUILD_PREFIX, dir=target.parent) as directory:
        output = Path(directory) / target.name
        command = [compiler, *flags, *LINK, str(SOURCES / "kernels.cpp"), "-o", str(output)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=SECONDS)
        except subprocess.TimeoutExpired as error:
            raise NativeUnavailable(f"{compiler} took more than {SECONDS} seconds to compile its kernels") from error
        if done.returncode != 0:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
            reason = lines[0].strip() if lines else f"exit status {done.returncode}"
            raise NativeUnavailable(f"{compiler} cannot compile its kernels ({reason})")
        with output.open("rb+") as file:  # the system's loader ignores bytes after the library
            file.write(hashlib.sha256(file.read()).digest())
        output.replace(target)


def open_library(path: Path) -> ctypes.CDLL:
    """Load a library and set the argument types of its functions. Raises OSError if it cannot be loaded."""
    library = ctypes.CDLL(str(path))
    for name, arguments in SIGNATURES.items():
        for precision in PRECISIONS:
            try:
                function = getattr(library, f"{name}_{precision}")
            except AttributeError as error:
                raise OSError(f"{path.name} is another library: {error}") from error
            function.argtypes, function.restype = arguments, None
    return library


def _load_cached(path: Path) -> ctypes.CDLL | None:
    """Load the library that an earlier process compiled; None if it is missing or damaged.

    The digest is checked first: the system would map a truncated file without an error, and the process would crash
    later.
    """
    try:
        content = path.read_bytes()
        is_whole = hashlib.sha256(content[:-DIGEST_SIZE]).digest() == content[-DIGEST_SIZE:]
        return open_library(path) if is_whole else None
    except OSError:
        return None


def _build_and_load(compiler: str, path: Path) -> ctypes.CDLL:
    build(compiler, path)
    return open_library(path)


def _check_private(directory: Path) -> None:
    """Raise OSError if another user can write to the directory."""
    status = directory.stat()
    if os.name == "posix" and (status.st_uid != os.getuid() or status.st_mode & 0o022):
        raise PermissionError(f"{directory} is not private")


def _remove_stale_builds(directory: Path) -> None:
    """Remove the build directories of processes that were killed while they compiled."""
    for build_directory in directory.glob(f"{BUILD_PREFIX}*"):
        with contextlib.suppress(OSError):
            if time.time() - build_directory.stat().st_mtime > 2 * SECONDS:
                shutil.rmtree(build_directory)


def _version(compiler: str) -> bytes:
    try:
        done = subprocess.run([compiler, "--version"], capture_output=True, timeout=SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"{compiler} cannot be run ({error})") from error
    return os.fsencode(compiler) + done.stdout


def _processor() -> bytes:
    """Return a description of the processor. Machines with different processors may share a home directory."""
    description = [platform.machine(), platform.processor()]
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    description += sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
    return "\n".join(description).encode()
