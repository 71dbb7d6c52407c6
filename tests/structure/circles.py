"""No circle of files: what a file imports, for type checking too, does not lead back to it."""

import ast
from collections.abc import Iterator

from tests.structure.sources import Finding, Module, Source


def files_import_in_one_direction(source: Source) -> Iterator[Finding]:
    """Each circle once, under the name of its first file."""
    graph = {name: imported(source, module) for name, module in source.modules.items()}
    reach = {name: reachable(graph, name) for name in graph}
    seen: set[str] = set()
    for name in graph:
        circle = {other for other in reach[name] if name in reach[other]}
        if circle and name not in seen:
            seen |= circle
            way = shortest_way(graph, name, circle)
            yield Finding(name, name, f"a circle of files: {' -> '.join(way)}; together: {', '.join(sorted(circle))}")


def imported(source: Source, module: Module) -> set[str]:
    """The modules whose names this one imports."""
    found = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            origin = module.origin(node)
            names = {f"{origin}.{alias.name}" for alias in node.names}
            found |= {name if name in source.modules else origin for name in names}
    return {name for name in found if name in source.modules and name != module.name}


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    """All modules that `start` leads to; itself only by a circle."""
    found: set[str] = set()
    ahead = list(graph[start])
    while ahead:
        name = ahead.pop()
        if name not in found:
            found.add(name)
            ahead += graph[name]
    return found


def shortest_way(graph: dict[str, set[str]], start: str, circle: set[str]) -> list[str]:
    """From `start` back to it, inside the circle."""
    ways = [[start]]
    for way in ways:
        for following in sorted(graph[way[-1]] & circle):
            if following == start:
                return [*way, start]
            if following not in way:
                ways.append([*way, following])
    raise AssertionError(f"{start} is in no circle")
