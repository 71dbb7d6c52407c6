"""A part that a learner can build: what it replaces, the lesson that explains it, and how a solution is graded.

Each part has three files: its contract, `tests/contracts/NAME.py`, which says what it must do; `starters/NAME.py`, from
which a learner begins; and `tests/contracts/wrong/NAME.py`, typical mistakes, each with the hint that it must get.

A contract is a list of functions `test_...(part)`. The first line of a function's docstring is a behaviour, in one
sentence; `part` is the solution. It compares with `same`, or raises `Broken`.
"""

import importlib
import importlib.util
import inspect
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

ROOT = Path(__file__).parents[2]
CONTRACTS, STARTERS = Path(__file__).parent, ROOT / "starters"
LIMIT_S = 10.0
"""Time for one behaviour: a loop that does not end is stopped."""
NO_CONTRACTS = ("part", "plugin", "conftest", "in_engine")


@dataclass(frozen=True)
class Part:
    """A part of an engine that can be replaced."""

    name: str
    """Of its files, and on the command line."""
    target: str
    """What it replaces: `module:attribute`; an entry of a dictionary is `module:TABLE.key`."""
    lesson: str
    """The section that explains it: `docs/m4_radix_cache.md#...`."""
    starter: str
    """Its name in the starter."""
    role: str = ""
    """Its role in `LLMEngine(parts=...)`; without one it is substituted in the modules that have it."""
    variant: str = ""
    """The engine of the equivalence suite in which it runs: the name of a variant of `tests/equivalence/harness.py`."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Settings of this engine that differ, by keyword: `{"speculative_config": {"method": "ngram"}}`."""

    @property
    def reference(self) -> Any:
        """The engine's own part."""
        return found(self.target)

    @property
    def contract(self) -> ModuleType:
        return importlib.import_module(f"tests.contracts.{self.name}")

    @property
    def behaviours(self) -> dict[str, Callable[[Any], None]]:
        """The functions of its contract, by name."""
        return {name: value for name, value in vars(self.contract).items() if name.startswith("test_")}

    @contextmanager
    def in_place(self, solution: Any) -> Iterator[None]:
        """Let the modules have a solution in place of the reference. A part with a role is given to its engine."""
        if self.role:
            yield
        else:
            with substituted(self.target, solution):
                yield


# --- what a contract says ---------------------------------------------------------------------------------------------


class Broken(AssertionError):
    """A behaviour that a solution does not have."""

    def __init__(self, on: str, expected: Any, got: Any, hint: str = "") -> None:
        """`on`: the input, as a learner would write it. `hint`: what the mistake may be."""
        super().__init__(on)
        self.on, self.expected, self.got, self.hint = on, expected, got, hint


def same(got: Any, expected: Any, *, on: str, hint: str = "") -> None:
    """Raise `Broken` unless the values are equal; arrays and tensors also in type and shape."""
    if not _equal(got, expected):
        raise Broken(on, expected, got, hint)


def close(got: Any, expected: torch.Tensor, *, on: str, tolerance: float, hint: str = "") -> None:
    """Raise `Broken` unless a tensor has this shape and all its numbers; NaN is close to nothing."""
    shape = list(expected.shape)
    if not isinstance(got, torch.Tensor) or list(got.shape) != shape:
        raise Broken(on, f"a tensor {shape}", list(got.shape) if isinstance(got, torch.Tensor) else got, hint)
    error = (got.double() - expected.double()).abs().nan_to_num(torch.inf)
    is_off = error > tolerance
    if is_off.any():
        place = tuple(int(each) for each in torch.unravel_index(error.argmax(), error.shape))
        digits = 4 if error.max() > 0.01 else 9
        wanted, found = (f"{float(tensor[place]):.{digits}g} at {list(place)}" for tensor in (expected, got))
        raise Broken(on, wanted, f"{found}; {is_off.sum():,} of {is_off.numel():,} numbers are off", hint)


def _equal(got: Any, expected: Any) -> bool:
    if isinstance(expected, torch.Tensor):
        is_alike = isinstance(got, torch.Tensor) and got.shape == expected.shape and got.dtype == expected.dtype
        return is_alike and torch.equal(got, expected)
    if isinstance(expected, np.ndarray):
        return isinstance(got, np.ndarray) and got.dtype == expected.dtype and np.array_equal(got, expected)
    if isinstance(got, torch.Tensor | np.ndarray) and got.ndim:  # `==` would compare each element
        return False
    if isinstance(expected, dict):
        is_alike = isinstance(got, dict) and got.keys() == expected.keys()
        return is_alike and all(_equal(got[key], value) for key, value in expected.items())
    if isinstance(expected, list | tuple):
        is_alike = type(got) is type(expected) and len(got) == len(expected)
        return is_alike and all(map(_equal, got, expected))
    return bool(got == expected)


# --- grading ----------------------------------------------------------------------------------------------------------


class Failure(NamedTuple):
    """A behaviour that is missing, and what a learner reads about it."""

    behaviour: str
    text: str


class TooLong(BaseException):
    """A behaviour takes too long. No `Exception`, so that a solution does not catch it by accident."""


@contextmanager
def time_limit(seconds: float = LIMIT_S) -> Iterator[None]:
    """Raise `TooLong` in the block after this time."""

    def end(_: int, __: FrameType | None) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)  # again each second: a loop may catch it once
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def grade(part: Part, solution: Any, *, limit_s: float = LIMIT_S) -> list[Failure]:
    """Return the behaviours of a part's contract that a solution does not have."""
    failures = []
    with part.in_place(solution):
        for behaviour in part.behaviours.values():
            try:
                with time_limit(limit_s):
                    behaviour(solution)
            except (Exception, TooLong) as error:
                failures.append(Failure(sentence(behaviour), explained(part, behaviour, solution, error)))
    return failures


def sentence(behaviour: Callable[..., Any]) -> str:
    """Return what a function of a contract says in the first line of its docstring."""
    return (inspect.getdoc(behaviour) or behaviour.__name__).splitlines()[0]


def explained(part: Part, behaviour: Callable[..., Any], solution: Any, error: BaseException) -> str:
    """Return what a learner reads about a behaviour that is missing."""
    lines = {"": sentence(behaviour)}
    if isinstance(error, Broken):
        lines |= {"input": error.on, "expected": _shown(error.expected), "got": _shown(error.got), "hint": error.hint}
    elif isinstance(error, TooLong):
        lines["stopped"] = f"it takes longer than {LIMIT_S:g} s{_place(error, solution)}: does a loop not end?"
    elif isinstance(error, NotImplementedError):
        lines["to do"] = f"nothing is written here yet{_place(error, solution)}"
    else:
        lines["raised"] = f"{type(error).__name__}: {error}{_place(error, solution)}"
    if not isinstance(error, Broken | NotImplementedError):
        lines["in"] = _call(error, behaviour)
    lines["read"] = part.lesson
    return "\n".join(f"{name + ':':<10}{text}" if name else text for name, text in lines.items() if text)


def _shown(value: Any) -> str:
    text = " ".join(repr(value).split()) if isinstance(value, torch.Tensor | np.ndarray) else repr(value)
    return text if len(text) <= 400 else f"{text[:397]}..."


def _place(error: BaseException, solution: Any) -> str:
    """Return the last line of the solution that ran before the error, if there is one."""
    functions = [value for value in vars(solution).values()] if isinstance(solution, type) else [solution]
    codes = [function_of(each) for each in functions if callable(each)]
    files = {code.__code__.co_filename for code in codes if inspect.isfunction(code)}
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files and frame.line]
    return f" (in `{lines[-1].name}`, line {lines[-1].lineno}: `{lines[-1].line}`)" if lines else ""


def _call(error: BaseException, behaviour: Callable[..., Any]) -> str:
    """Return the last line of the contract that ran before the error: there the input is."""
    file = inspect.getsourcefile(behaviour)
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file and frame.line]
    return f"`{lines[-1].line}`, line {lines[-1].lineno} of the contract" if lines else ""


def function_of(value: Any) -> Any:
    """Return the Python function in a class method or in a Triton kernel; a function itself."""
    for field_name in ("__func__", "fn"):
        value = getattr(value, field_name, value)
    return inspect.unwrap(value)


# --- finding parts, and putting others in their place -----------------------------------------------------------------


def all_parts() -> dict[str, Part]:
    """Return the parts that have a contract, by name. Without triton there are none of its kernels."""
    names = sorted(path.stem for path in CONTRACTS.glob("*.py"))
    parts = {}
    for name in names:
        if name in NO_CONTRACTS or name.startswith("test_"):
            continue
        try:
            parts[name] = importlib.import_module(f"tests.contracts.{name}").PART
        except ModuleNotFoundError as error:
            if error.name != "triton":
                raise
    return parts


def found(target: str) -> Any:
    """Return what a target names. Raises `LookupError` if there is no such thing."""
    holder, name = _holder(target)
    return holder[name] if isinstance(holder, dict) else getattr(holder, name)


def _holder(target: str) -> tuple[Any, str]:
    """Return the module, class or dictionary that has a target, and its name there."""
    module_name, _, path = target.partition(":")
    try:
        holder: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise LookupError(f"{target}: {error}") from error
    *outer, name = path.split(".")
    for each in [*outer, name]:
        if each not in (holder if isinstance(holder, dict) else vars(holder)):
            raise LookupError(f"{target}: there is no {each!r} in {module_name}")
        if each is not name:
            holder = holder[each] if isinstance(holder, dict) else getattr(holder, each)
    return holder, name


@contextmanager
def substituted(target: str, solution: Any) -> Iterator[None]:
    """Let every module that has what a target names have `solution` instead, also in its tables; then as before."""
    undo = substitute(target, solution)
    try:
        yield
    finally:
        undo()


def substitute(target: str, solution: Any) -> Callable[[], None]:
    """Put `solution` in the place of what a target names: where it is defined, in the modules that import it, and in
    their dictionaries. Return a function that undoes it.

    A class that was derived from it, or a default value that was computed with it, keeps the old one.
    """
    holder, name = _holder(target)
    old = found(target)
    places: list[tuple[Any, str]] = [(holder, name)]
    for module in list(sys.modules.values()):
        package, _, rest = module.__name__.partition(".")
        if not re.fullmatch(r"m\d_\w+|tests", package) or rest.startswith("contracts"):
            continue
        members = dict(vars(module))
        places += [(module, key) for key, value in members.items() if value is old]
        tables = [value for value in members.values() if isinstance(value, dict) and value is not holder]
        places += [(table, key) for table in tables for key, value in list(table.items()) if value is old]
    for place, key in places:
        _put(place, key, solution)

    def undo() -> None:
        for place, key in places:
            _put(place, key, old)

    return undo


def _put(place: Any, key: str, value: Any) -> None:
    if isinstance(place, dict):
        place[key] = value
    else:
        setattr(place, key, value)


def loaded(where: str, example: str = "my_radix.py:MyRadixCache") -> Any:
    """Return what a learner names: `FILE.py:NAME`. Raises `LookupError`, with what is wrong, if it cannot be loaded."""
    file, colon, name = where.rpartition(":")
    path = Path(file).expanduser().resolve()
    if not colon:
        raise LookupError(f"a file and what is in it must be named: {example}")
    if not path.is_file():
        raise LookupError(f"there is no file {file!r}")
    spec = importlib.util.spec_from_file_location(f"part_of_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise LookupError(f"{path.name} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses look there
    sys.path.insert(0, str(path.parent))
    try:
        with time_limit(LIMIT_S):
            spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise LookupError(_why_not_loaded(path, error)) from error
    if not hasattr(module, name):
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        raise LookupError(f"{path.name} has no {name!r}; it has {', '.join(own) or 'no class and no function'}")
    return getattr(module, name)


def _why_not_loaded(path: Path, error: BaseException) -> str:
    """Return the line of a file at which loading it failed, and why."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    match error:
        case TooLong():
            why = f"it is not loaded after {LIMIT_S:g} s: does a loop not end?"
        case SystemExit():
            why = "it ends Python while it is loaded"
        case _:
            why = f"{type(error).__name__}: {error.msg if isinstance(error, SyntaxError) else error}"
    return f"{path.name}{f', line {line}' if line else ''}: {why}"


def refusal(part: Part, solution: Any, name: str) -> str:
    """Return why a solution with this name cannot take the part's place, or an empty text. A function that makes an
    object may stand for a class, as in `LLMEngine(parts=...)`."""
    wanted, got = kind_of(part.reference), kind_of(solution)
    makes_objects = wanted == "a class" and callable(solution)
    is_right = got == wanted or makes_objects or not callable(part.reference)
    return "" if is_right else f"{part.name} is {wanted}, and {name} is {got}"


def kind_of(value: Any) -> str:
    """Return what a part is, in words."""
    if isinstance(value, type):
        return "a class"
    if not callable(value):
        return f"of type {type(value).__name__}, and cannot be called"
    return "a Triton kernel" if type(value).__module__.startswith("triton.") else "a function"
