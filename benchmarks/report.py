"""Tables and notes of all lessons, made from stored results by the templates `tables.md.jinja` in their folders.

A macro of a template is a section that a page includes; those that begin with an underscore help the others. A filter
formats a number: `{{ row.ttft | ms(1) }}`; `times` compares two sides by the seconds of their rounds.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, UndefinedError

from benchmarks.timing import ratio
from m1_single_request.trace_event import size

Row = Mapping[str, Any]
FILTERS = {
    "num": lambda value, digits=0: f"{value:,.{digits}f}",
    "pct": lambda value, digits=0: f"{value:.{digits}%}",
    "s": lambda value, digits=2: f"{value:,.{digits}f} s",
    "ms": lambda value, digits=1: f"{value * 1e3:,.{digits}f} ms",
    "us": lambda value, digits=2: f"{value * 1e6:,.{digits}f} us",
    "size": lambda value: size(int(value)),
    "times": lambda above, below: f"{ratio(above, below):.2f}",
    "thousands": lambda value: f"{value // 1024}k",
}


def templates(folder: Path) -> Environment:
    """Return an environment of templates in a folder, with the filters above."""
    environment = Environment(
        loader=FileSystemLoader(folder), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= FILTERS | {"describe": describe, "times_with_range": times_with_range}
    return environment


def sections(template: Path, results: Row) -> str:
    """Return every section of a template between two marks by which a page includes it. A section whose part was not
    measured yet is left out. A template without sections is returned whole."""
    text, values = template.read_text(encoding="utf-8"), dict(results) | {"note": environment_note(results)}
    if "{% macro" not in text:
        return plain(template, values)
    module = templates(template.parent).get_template(template.name).make_module(values)
    found = []
    for name in re.findall(r"{% macro ([a-z]\w*)\(\) %}", text):
        with suppress(UndefinedError):  # of a part that was not measured
            text = str(getattr(module, name)()).strip()
            found.append(f"<!-- --8<-- [start:{name}] -->\n{text}\n<!-- --8<-- [end:{name}] -->\n")
    return "\n".join(found)


def plain(template: Path, results: Row) -> str:
    """Return a template without sections, filled with results."""
    return templates(template.parent).get_template(template.name).render(results) + "\n"


def times_with_range(above: Sequence[float], below: Sequence[float]) -> str:
    """Return the median of the rounds' ratios, the smallest and the largest."""
    ratios = [a / b for a, b in zip(above, below, strict=True)]
    return f"{ratio(above, below):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def describe(env: Row) -> str:
    """Return an environment in one sentence, to stand below a table."""
    machine, versions = env["machine"], env["versions"]
    return (
        f"{env['model']['name']} on {machine['cpu']}, {machine['torch_threads']} of {machine['cores']} cores, "
        f"Python {versions['python']}, torch {versions['torch']}, transformers {versions['transformers']}, "
        f"seed {env['seed']}."
    )


def environment_note(results: Row) -> str:
    """Return where these results were measured, and beside which load."""
    env, load = results["environment"], results.get("load", {})
    parts = [f"Measured with {describe(env)}"]
    if "random_model" in env:
        layers = env["random_model"]["num_hidden_layers"]
        parts.append(f"The 0.6B shape is Qwen3 with {layers} layers and random weights.")
    if "backend" in env:
        parts.append(f"The engines run on the {env['backend']} backend.")
    disturbed = [name for name, own in load.items() if own["disturbed"]]
    shares = [own["other_cores"] for own in load.values()]
    if disturbed:
        parts.append(f"Other processes took more than a tenth of a core during: {', '.join(disturbed)}.")
    elif shares:
        known = None not in shares
        parts.append(
            f"Other processes took at most {max(shares):.0%} of a core." if known else "The load beside it is unknown."
        )
    if results.get("quick"):
        parts.append("Measured with --quick: no results.")
    return f"*{' '.join(parts)}*"
