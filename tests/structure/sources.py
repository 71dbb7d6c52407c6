"""Milestone packages as syntax trees: modules, classes with their ancestors, and what a name refers to.

Nothing is imported or run. A name is followed through imports, re-exports included, to the class that it means.
"""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Finding(NamedTuple):
    """A breach of a rule: what it is about, by full name, where, and what is wrong, for people."""

    name: str
    at: str
    text: str

    def __str__(self) -> str:
        return f"{self.at}: {self.text}"


@dataclass(frozen=True)
class Module:
    """One file: `name` is its dotted name, `imports` maps local names to what they mean elsewhere."""

    name: str
    text: str
    is_package: bool = False

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def package(self) -> str:
        """The milestone that it belongs to."""
        return self.name.split(".")[0]

    @cached_property
    def stars(self) -> list[str]:
        """Modules of which all names are imported: `from m1_x.face import *`."""
        nodes = [node for node in self.tree.body if isinstance(node, ast.ImportFrom)]
        return [node.module or "" for node in nodes if any(alias.name == "*" for alias in node.names)]

    @cached_property
    def imports(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    name = alias.name if alias.asname else alias.name.split(".")[0]
                    found[alias.asname or name] = name
            elif isinstance(node, ast.ImportFrom):
                origin = self.origin(node)
                found.update({alias.asname or alias.name: f"{origin}.{alias.name}" for alias in node.names})
        return found

    def origin(self, node: ast.ImportFrom) -> str:
        """The module that an import names, in full."""
        if not node.level:
            return node.module or ""
        above = self.name.split(".")[: None if self.is_package else -1]
        above = above[: len(above) - node.level + 1]
        return ".".join([*above, *([node.module] if node.module else [])])


@dataclass(frozen=True)
class Class:
    """A class of a milestone, by its full name."""

    module: Module
    node: ast.ClassDef

    @property
    def name(self) -> str:
        return f"{self.module.name}.{self.node.name}"

    @property
    def package(self) -> str:
        return self.module.package

    @property
    def at(self) -> str:
        return f"{self.module.name}:{self.node.lineno}"

    @cached_property
    def attributes(self) -> set[str]:
        """Attributes that its methods set on `self`."""
        nodes = [node for node in ast.walk(self.node) if isinstance(node, ast.Attribute)]
        return {node.attr for node in nodes if isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"}

    @cached_property
    def members(self) -> dict[str, ast.stmt]:
        """Methods, and names that are bound in the class body."""
        found: dict[str, ast.stmt] = {}
        for statement in self.node.body:
            if isinstance(statement, FUNCTIONS):
                found[statement.name] = statement
            elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                found[statement.target.id] = statement
            elif isinstance(statement, ast.Assign):
                found.update({target.id: statement for target in statement.targets if isinstance(target, ast.Name)})
        return found

    @cached_property
    def names_read(self) -> set[str]:
        """Names that its body reads outside its methods: in decorators and in values of other members."""
        outside: list[ast.AST] = [node for node in self.node.body if not isinstance(node, FUNCTIONS)]
        outside += [d for node in self.node.body if isinstance(node, FUNCTIONS) for d in node.decorator_list]
        nodes = [node for part in outside for node in ast.walk(part)]
        return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}

    @cached_property
    def is_protocol(self) -> bool:
        return any(last_name(base) == "Protocol" for base in self.node.bases)

    def implements(self, method: str) -> bool:
        """Whether it has a body for `method`: not a Protocol's stub, not abstract, not `raise NotImplementedError`."""
        node = self.members.get(method)
        if not isinstance(node, FUNCTIONS) or self.is_protocol:
            return False
        if any("abstract" in ast.unparse(decorator) for decorator in node.decorator_list):
            return False
        body = without_docstring(node)
        return not (len(body) == 1 and isinstance(body[0], ast.Raise) and "NotImplementedError" in ast.unparse(body[0]))


@dataclass(eq=False)
class Source:
    """All modules that are looked at together."""

    modules: dict[str, Module] = field(default_factory=dict)

    @classmethod
    def from_texts(cls, texts: Mapping[str, str]) -> "Source":
        """Modules from `{"m1_x.scheduler": "class Scheduler: ..."}`; a name without a dot is a package's `__init__`."""
        return cls({name: Module(name, text, is_package="." not in name) for name, text in texts.items()})

    @classmethod
    def from_packages(cls, root: Path, packages: list[str]) -> "Source":
        """Every Python file of `packages`, which lie in `root`."""
        modules = {}
        for path in sorted(path for package in packages for path in (root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            name = ".".join(parts[:-1] if is_package else parts)
            modules[name] = Module(name, path.read_text(encoding="utf-8"), is_package)
        return cls(modules)

    @property
    def packages(self) -> list[str]:
        """The milestones, the first one first."""
        return sorted({module.package for module in self.modules.values()})

    def up_to(self, package: str) -> "Source":
        """The modules of one milestone and of those before it."""
        return Source({name: module for name, module in self.modules.items() if module.package <= package})

    @cached_property
    def classes(self) -> dict[str, Class]:
        """Top-level classes by full name."""
        return {
            f"{module.name}.{node.name}": Class(module, node)
            for module in self.modules.values()
            for node in module.tree.body
            if isinstance(node, ast.ClassDef)
        }

    def full_name(self, module: Module, expression: ast.expr) -> str:
        """What `expression` (a name, or attributes of one) refers to, as a dotted name; "" for anything else."""
        if isinstance(expression, ast.Subscript):  # a generic base: Base[int]
            return self.full_name(module, expression.value)
        if isinstance(expression, ast.Attribute):
            owner = self.full_name(module, expression.value)
            return self._follow(f"{owner}.{expression.attr}") if owner else ""
        if not isinstance(expression, ast.Name):
            return ""
        return self._follow(module.imports.get(expression.id, f"{module.name}.{expression.id}"))

    def _follow(self, name: str) -> str:
        """Through re-exports (`m1_x.Name`, imported there from `m1_x.module`) to where it is defined."""
        seen = set()
        while name not in self.classes and name not in seen:
            seen.add(name)
            owner, _, last = name.rpartition(".")
            name = self._imported(self.modules[owner], last) or name if owner in self.modules else name
        return name

    def _imported(self, module: Module, name: str) -> str:
        """What `name` is imported from, also by `from m1_x.face import *`; "" if it is not imported."""
        stars = [self.modules[star] for star in module.stars if star in self.modules]
        return module.imports.get(name) or next((s.imports[name] for s in stars if name in s.imports), "")

    def bases(self, cls: Class) -> list[Class]:
        """Its direct bases among the milestones' classes."""
        names = [self.full_name(cls.module, base) for base in cls.node.bases]
        return [self.classes[name] for name in names if name in self.classes and name != cls.name]

    def ancestors(self, cls: Class) -> Iterator[Class]:
        """Bases, their bases and so on; nearest first."""
        for base in self.bases(cls):
            yield base
            yield from self.ancestors(base)

    def is_a(self, cls: Class, name: str) -> bool:
        """Whether it is called `name` or has an ancestor that is."""
        return any(c.node.name == name for c in (cls, *self.ancestors(cls)))


def without_docstring(node: FunctionNode) -> list[ast.stmt]:
    """The statements of a function after its docstring."""
    return node.body[1:] if ast.get_docstring(node) is not None else node.body


def last_name(expression: ast.expr) -> str:
    """The name at the end of a dotted one: `Protocol` of `typing.Protocol[T]`."""
    if isinstance(expression, ast.Subscript):
        return last_name(expression.value)
    return expression.attr if isinstance(expression, ast.Attribute) else getattr(expression, "id", "")
