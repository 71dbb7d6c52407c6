"""Record the calls of single steps of each milestone, for the pages "One step, all of it" (`step_pages.py`).

    python -m docs.record_steps    writes docs/steps/m1.json ... from today's code

The model is the embedded checkpoint on a CPU, with one thread and, from m3 on, the attention backend `torch`: so every
machine records the same calls. Recorded are the functions of the packages; what libraries and lambdas call belongs to
the function that called them. Calls of the same function by the same function are one line with their number.
"""

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from docs.source_code import ROOT

STEPS = ROOT / "docs" / "steps"
PACKAGE = {path.parent.name[:2]: path.parent.name for path in sorted(ROOT.glob("m[1-6]_*/wiring.py"))}
"""The packages with an engine of their own, by milestone. In one process the step of m8 is m6's."""
FIRST, SECOND = "What is a KV cache? Who needs it?", "What is a KV cache? Describe it."
"""The first question is answered before the recording begins: what is computed once per engine is not of a step."""
PICTURES = ROOT / "m6_multimodal_pd" / "demo_pictures"

Row = tuple[int, int, str, str]
"""A line of a record: depth, number of calls in this step, path of the file, and qualified name of the function."""


@dataclass
class Call:
    """A function, how often it was called by the one above it, and the calls that it made."""

    path: str
    name: str
    times: int = 1
    calls: list["Call"] = field(default_factory=list)


class Recorder:
    """Profiler that builds the tree of calls: `with recorder: engine.step()`, then `recorder.top.calls`."""

    def __init__(self) -> None:
        self.top = Call("", "")
        self._stack = [self.top]
        self._resumed: dict[FrameType, Call] = {}  # generators are entered several times, and called once

    def __enter__(self) -> None:
        sys.setprofile(self._watch)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        self._resumed.clear()

    def _watch(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            call = self._stack[-1]
            path = own_path(frame.f_code)
            if frame in self._resumed:
                call = self._resumed[frame]
            elif path is not None:
                call = Call(path, frame.f_code.co_qualname.replace(".<locals>", ""))
                self._stack[-1].calls.append(call)
                self._resumed[frame] = call
            self._stack.append(call)
        elif event == "return" and len(self._stack) > 1:
            self._stack.pop()


def own_path(code: CodeType) -> str | None:
    """Return the path of a function of the packages from the top of the checkout; None for any other code."""
    path = Path(code.co_filename)
    if code.co_name.startswith("<") or not path.is_relative_to(ROOT):
        return None
    inside = path.relative_to(ROOT)
    return inside.as_posix() if inside.parts[0] in PACKAGE.values() else None


def merged(calls: Iterable[Call]) -> list[Call]:
    """Return the calls with those of the same function as one, in the order of their first."""
    found: dict[tuple[str, str], Call] = {}
    for call in calls:
        one = found.setdefault((call.path, call.name), Call(call.path, call.name, 0))
        one.times += call.times
        one.calls += call.calls
    for one in found.values():
        one.calls = merged(one.calls)
    return list(found.values())


def rows(calls: Iterable[Call], depth: int = 0) -> list[Row]:
    """Return a tree of calls as lines."""
    found: list[Row] = []
    for call in calls:
        found += [(depth, call.times, call.path, call.name), *rows(call.calls, depth + 1)]
    return found


def tree(lines: Iterable[Sequence[Any]]) -> list[Call]:
    """Return the calls at the top of a record."""
    path = [Call("", "")]
    for depth, times, file, name in lines:
        del path[depth + 1 :]
        path.append(Call(file, name, times))
        path[depth].calls.append(path[-1])
    return path[0].calls


def record(milestone: str) -> dict[str, list[Row]]:
    """Run a small engine, and return the lines of its steps by their name: `decode` and `prefill`."""
    import torch  # here: building the site needs this module, and no engine

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # with more, a step now and then reads how busy the machine is
    try:
        _record(milestone)  # once for functions whose results are kept, so that it does not matter what ran before
        return {name: rows(merged(calls)) for name, calls in _record(milestone).items()}
    finally:
        torch.set_num_threads(threads)


def _record(milestone: str) -> dict[str, list[Call]]:
    module = importlib.import_module(PACKAGE[milestone])
    backend = {} if milestone in ("m1", "m2") else {"attention_backend": "torch"}
    more: dict[str, Any] = {"model_config": module.ModelConfig(device="cpu", dtype="float32", **backend)}
    if milestone == "m5":
        more["speculative_config"] = module.SpeculativeConfig(method="ngram")
    with module.LLMEngine(**more) as engine:
        ask = _asker(module, engine)
        ask(FIRST)
        while engine.has_unfinished_requests():
            engine.step()
        ask(FIRST)
        for _ in range(3):  # in m5 the next step verifies drafts
            engine.step()
        decode = watch(engine.step)
        while engine.has_unfinished_requests() and milestone != "m5":  # there a decode and a piece of a prompt
            engine.step()
        picture = PICTURES / "a_blue_square_and_a_green_star.png" if milestone == "m6" else None
        ask(f"{SECOND} " * 20 if milestone == "m5" else SECOND, picture)
        return {"decode": decode, "prefill": watch(engine.step)}


def _asker(module: Any, engine: Any) -> Callable[..., None]:
    params = module.SamplingParams(max_tokens=32, ignore_eos=True)

    def ask(question: str, picture: Path | None = None) -> None:
        content: Any = question
        if picture is not None:
            content = [{"type": "image", "image": str(picture)}, {"type": "text", "text": question}]
        engine.add_request(engine.chat_prompt([{"role": "user", "content": content}]), params)

    return ask


def watch(step: Callable[[], Any]) -> list[Call]:
    """Return the tree of calls of one step."""
    recorder = Recorder()
    with recorder:
        step()
    return recorder.top.calls


def as_text(steps: dict[str, list[Row]]) -> str:
    """Return a record as JSON, with one call per line."""
    parts = [f"{json.dumps(name)}: [\n" + ",\n".join(map(json.dumps, lines)) + "\n]" for name, lines in steps.items()]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Write the records of all milestones, or of some."""
    parser = argparse.ArgumentParser(prog="python -m docs.record_steps", description=__doc__.splitlines()[0])
    parser.add_argument("milestones", nargs="*", default=list(PACKAGE), help="m1, m2, ...; default: all")
    for milestone in parser.parse_args(argv).milestones:
        (STEPS / f"{milestone}.json").write_text(as_text(record(milestone)), encoding="utf-8")


if __name__ == "__main__":
    main()
