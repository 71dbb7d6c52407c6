"""A lesson's notebook as the tests read it: its cells, the solutions of its exercises, the bugs that its labs plant."""

import json
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
SOLUTIONS = NOTEBOOKS.parent / "docs" / "solutions.md"
WrongAnswers = dict[str, list[tuple[Any, ...]]]
"""By exercise: answers, each with the words that its refusal must hold."""
RightAnswers = list[tuple[str, Any]]
"""Exercises, each with an answer that passes as its solution does."""


@cache
def cells_of(path: Path) -> list[dict]:
    """All cells of a notebook."""
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def source(cell: dict) -> str:
    """The text of a cell."""
    return "".join(cell["source"])


@cache
def sections() -> dict[str, str]:
    """The sections of the page of solutions, by exercise."""
    _, *found = re.split(r"^### (.+)\n", SOLUTIONS.read_text(encoding="utf-8"), flags=re.MULTILINE)
    texts = (re.split(r"^## ", text, flags=re.MULTILINE)[0] for text in found[1::2])
    return dict(zip(found[::2], texts, strict=True))


def solution_of(exercise: str) -> str:
    """The code of an exercise's solution."""
    (code,) = re.findall(r"```python\n(.*?)```", sections()[exercise], re.DOTALL)
    return code


class Lesson:
    """One notebook. Solutions live in one place, the page `docs/solutions.md`, and run as they stand there."""

    def __init__(self, name: str) -> None:
        self.path = NOTEBOOKS / f"{name}.ipynb"

    def all_cells(self) -> list[dict]:
        """All cells, from top to bottom."""
        return cells_of(self.path)

    def cells(self, kind: str) -> list[dict]:
        """All cells of a kind: `code` or `markdown`."""
        return [cell for cell in self.all_cells() if cell["cell_type"] == kind]

    def code(self) -> str:
        """All code, from top to bottom."""
        return "\n".join(map(source, self.cells("code")))

    def solutions_code(self) -> list[str]:
        """The text of the solution of each exercise that the notebook checks."""
        return list(map(solution_of, self.checked()))

    def solutions(self) -> dict[str, Any]:
        """All that the solutions define, by name; each one runs on its own, as a reader would paste it."""
        found: dict[str, Any] = {}
        for code in self.solutions_code():
            found |= run(code)
        return found

    def solution(self, name: str) -> Callable[..., Any]:
        """`changed(old, new)`: the solution of this name with a piece of its text changed, or several in turn."""
        (code,) = [code for code in self.solutions_code() if re.search(rf"^(class|def) {name}\b", code, re.MULTILINE)]

        def changed(*pieces: str) -> Any:
            text = code
            for old, new in zip(pieces[::2], pieces[1::2], strict=True):
                assert old in text, f"the solution {name} does not hold {old!r}"
                text = text.replace(old, new)
            return run(text)[name]

        return changed

    def checked(self) -> dict[str, str]:
        """The exercises that the notebook checks, each with the name of the answer."""
        return dict(re.findall(r'^check\("([\w.]+)", (\w+)\)', self.code(), re.MULTILINE))

    def defined(self, name: str, names: Mapping[str, object]) -> object:
        """A class or function as a cell defines it: with its bug, or empty. `names`: what the cells above define."""
        opening = rf"^(?:class|def) {name}\b"
        (cell,) = [source(c) for c in self.cells("code") if re.search(opening, source(c), re.MULTILINE)]
        (code,) = re.findall(rf"{opening}.*?(?=^\S|\Z)", cell, re.DOTALL | re.MULTILINE)
        scope = dict(names)
        exec(code, scope)
        return scope[name]

    def assert_stored_as_it_ran(self) -> None:
        """Fail unless it ran from top to bottom, without an error, and shows no path of the machine."""
        ran = self.cells("code")
        assert [cell["execution_count"] for cell in ran] == list(range(1, len(ran) + 1))
        outputs = [output for cell in ran for output in cell["outputs"]]
        assert not [o for o in outputs if o["output_type"] == "error" or o.get("name") == "stderr"]
        assert not re.search(r"site-packages|/home/|/Users/|/tmp/|/root/", json.dumps(outputs))
        assert self.path.stat().st_size < 1_000_000

    def first_answer(self) -> tuple[str, str]:
        """What the first cell asks the model, and the answer that is stored below it."""
        first = self.cells("code")[0]
        asked = re.search(r'engine\.chat\(\[{"role": "user", "content": "([^"]+)"}\]\)', source(first))
        assert asked is not None
        return asked[1], "".join(first["outputs"][0]["text"]).removesuffix("\n")


def run(code: str) -> dict[str, Any]:
    """The names that a program defines."""
    names: dict[str, Any] = {}
    exec(code, names)
    return names


def variant(base: type, **members: Any) -> type:
    """The class with some of its members replaced."""
    return type("Variant", (base,), members)
