"""No circle of files: what a file imports, for type checking too, does not lead back to it."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter

from tests.structure.sources import Finding, Module, Source


def files_import_in_one_direction(source: Source) -> Iterator[Finding]:
    """The first circle, if there is one."""
    try:
        TopologicalSorter({name: imported(source, module) for name, module in source.modules.items()}).prepare()
    except CycleError as error:
        way = error.args[1][::-1]
        yield Finding(way[0], way[0], f"a circle of files: {' -> '.join(way)}")


def imported(source: Source, module: Module) -> list[str]:
    """The modules whose names this one imports."""
    found = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            origin = module.origin(node)
            names = {f"{origin}.{alias.name}" for alias in node.names}
            found |= {name if name in source.modules else origin for name in names}
    return sorted(name for name in found if name in source.modules and name != module.name)
