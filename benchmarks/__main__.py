"""The program: `python -m benchmarks` lists the commands, `python -m benchmarks COMMAND --help` explains one."""

import importlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks import BenchmarkError, lesson


class Command(NamedTuple):
    """A command: the module with its `LESSON` or `main(argv)`, its subject, and its duration on two quiet cores."""

    module: str
    measures: str
    takes: str


COMMANDS = {
    "run": Command("compare", "two engines on one workload: yours against another, or two milestones", "2 min"),
    "day": Command("m4.day", "hit rates of a prefix cache of your own on the recorded day, counted", "1 min"),
    "m1": Command("m1", "recomputing against the KV cache, prefill and decode, the roofline", "2 min"),
    "m2": Command("m2", "batching: one by one, static, continuous; limits and padding", "6 min"),
    "m3": Command("m3", "blocks: speed against transformers, memory, preemption, sharing, the roofline", "15 min"),
    "m4": Command(
        "m4", "prefix cache: tokens and time saved, its own cost, eviction, gaps of a stream, priorities", "18 min"
    ),
    "m4_tiers": Command(
        "m4_tiers", "host memory and disk: turns of a chat, hit rates, copies, restart, break-even", "60 min"
    ),
    "m5": Command("m5", "budget of a step, gaps, speculation, scheduling", "12 min"),
    "m6": Command("m6", "pictures: first tokens, the vision tower, gaps, steps beside m5's, reading", "4 min"),
    "m6_pd": Command("m6_pd", "prefill and decode apart: bytes, bandwidth, overhead, gaps, the roofline", "5 min"),
    "m6_overlap": Command("m6_overlap", "overlapped steps against the normal order, the host's time hidden", "5 min"),
    "m7": Command("m7", "streams through HTTP beside the engine alone, slow readers, llama-server", "20 min"),
    "m8": Command("m8", "two ranks beside one process: steps, collectives, memory; a large model on paper", "8 min"),
    "device": Command("device", "an 8B model on a GPU: bandwidth and arithmetic reached, graphs, overlap", "6 min"),
    "busy": Command("m3.busy", "m3 decoding beside a busy program, each side in its own process", "25 min"),
    "quantized": Command("m3.quantized", "linear layers: huge pages, weights of eight bits, their answers", "15 min"),
    "tiles": Command("m3.tiles", "products of bfloat16 in tiles (AMX) beside vectors: linear layers, prompts", "2 min"),
    "experts": Command("m3.experts", "m3 with experts beside transformers and a dense model; bytes read", "10 min"),
    "kv_types": Command("m3.kv_types", "m3 with KV in bfloat16, int8 and fp8: answers, perplexity, attention", "5 min"),
    "peers": Command("peers", "llama.cpp, OpenVINO, vLLM and transformers beside m6, on one CPU", "60 min"),
    "limits": Command("peers.limits", "memory, arithmetic and Python of the loads of `peers` in m6", "10 min"),
    "player": Command("player", "the page that replays a trace of 100,000 events, in a browser", "3 min"),
    "against": Command("against", "this checkout against another one, every milestone", "10 min"),
}


def listing() -> Table:
    """Return all commands as a table."""
    table = Table(title="python -m benchmarks COMMAND [--help]", title_justify="left", box=None, pad_edge=False)
    for heading in ("command", "measures", "takes"):
        table.add_column(heading)
    for name, command in COMMANDS.items():
        table.add_row(name, command.measures, command.takes)
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, or list them; an error is one line and the exit status 2."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("--help", "-h"):
        Console().print(listing())
        return 0
    try:
        if name not in COMMANDS:
            raise BenchmarkError(f"there is no command {name!r}; there are {', '.join(COMMANDS)}")
        module = importlib.import_module(f"benchmarks.{COMMANDS[name].module}")
        if hasattr(module, "LESSON"):
            return lesson.Command(f"python -m benchmarks {name}", module, rest).run()
        status: int = module.main(rest)
        return status
    except BenchmarkError as error:
        print(f"BenchmarkError: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
