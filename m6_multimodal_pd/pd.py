"""Engines that are started by hand, each in a terminal of its own: `python -m m6_multimodal_pd.pd`.

    python -m m6_multimodal_pd.pd keys group.json
    python -m m6_multimodal_pd.pd router  --listen tcp://127.0.0.1:5600 --keys group.json --chat
    python -m m6_multimodal_pd.pd prefill --join tcp://127.0.0.1:5600 --keys group.json
    python -m m6_multimodal_pd.pd decode  --join tcp://127.0.0.1:5600 --keys group.json

The router runs before an engine joins. It is the demo, with its flags; an engine takes those of model, memory,
scheduling, pictures and drafts. By default each of the two takes half of one device's memory; on GPUs of their own both
have `--devices cuda:0,cuda:1`, and each its own `--device`. New in this milestone. SGLang: `--disaggregation-mode` and
its router; vLLM: `--kv-transfer-config` and a proxy.
"""

import argparse
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from m1_single_request import demo as m1
from m1_single_request.flags import add_flags, config_of, given
from m6_multimodal_pd import SpeculativeConfig, demo
from m6_multimodal_pd.config import DEFAULT_MODEL, EngineConfig
from m6_multimodal_pd.disaggregation.config import DisaggregationConfig
from m6_multimodal_pd.disaggregation.runtime.child import Process
from m6_multimodal_pd.disaggregation.runtime.config_json import to_json
from m6_multimodal_pd.disaggregation.runtime.credentials import read_keys, write_keys
from m6_multimodal_pd.disaggregation.runtime.messages import Order
from m6_multimodal_pd.disaggregation.runtime.shared_memory import owner_by_hand, remove_abandoned

PROG = "python -m m6_multimodal_pd.pd"
ADDRESS, KEYS = "DisaggregationConfig.address", "DisaggregationConfig.key_file"
"""Where the parser puts the flags of a group that is started by hand."""
GROUP, SHAPE = "engines that share the work", ("prefill", "decode", "devices")
OF_A_ROUTER: m1.Flags = {
    **{title: flags for title, flags in demo.FLAGS.items() if title != "prefill and decode apart"},
    GROUP: (DisaggregationConfig, "prefill decode"),
}
"""The flags of the demo that have an effect on a router, besides those of requests and trace."""
OF_AN_ENGINE: m1.Flags = {
    **{
        title: demo.FLAGS[title]
        for title in ("model", "launches", "batching", "KV memory", "prefix cache", "drafts", "limits of pictures")
    },
    GROUP: (DisaggregationConfig, " ".join(SHAPE)),
    "process": (demo.DemoConfig, "threads"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    args = make_parser().parse_args(argv)
    return m1.exit_status(args.run, args)


def make_parser() -> argparse.ArgumentParser:
    """Return a parser of the commands. The router has the flags of the demo, an engine those of its configuration."""
    parser = argparse.ArgumentParser(prog=PROG, description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    keys = commands.add_parser("keys", help="make the file of keys that a group needs")
    keys.add_argument("file", type=Path)
    keys.set_defaults(run=make_keys)
    of_a_router = [m1.make_parser("m6_multimodal_pd.pd", None, OF_A_ROUTER)]
    router = commands.add_parser("router", help="start the router", parents=of_a_router, conflict_handler="resolve")
    router.add_argument("--listen", dest=ADDRESS, required=True, metavar="ROUTER", help="as tcp://127.0.0.1:5600")
    router.set_defaults(run=demo.run)
    engines = [commands.add_parser(role, help=f"start a {role} engine") for role in ("prefill", "decode")]
    for engine in engines:
        engine.add_argument("--join", dest=ADDRESS, required=True, metavar="ROUTER", help="as tcp://127.0.0.1:5600")
        engine.add_argument("--name", help="name of the engine; default: its role and its process id")
        for title, (config_class, names) in OF_AN_ENGINE.items():
            add_flags(engine.add_argument_group(title), config_class, names)
        engine.set_defaults(run=work)
    for command in (router, *engines):
        command.add_argument("--keys", dest=KEYS, required=True, metavar="FILE", help="made by the command keys")
    return parser


def make_keys(args: argparse.Namespace, console: Console) -> None:
    """Write new keys to a file."""
    write_keys(args.file)
    console.print(f"{args.file} has the keys of a router and its engines; keep it to yourself", highlight=False)


def work(args: argparse.Namespace, console: Console) -> None:
    """Run an engine until its router is gone, or a signal ends it.

    It does not know the other engines. The flags --prefill, --decode and --devices describe them: engines on one device
    divide its memory. Without these flags, one other engine is on the same device, and each takes half of its memory.
    """
    keys, classes = read_keys(getattr(args, KEYS)), {**demo.CLASSES, "speculative": SpeculativeConfig}
    configs: dict[str, Any] = {name: config_of(args, config_class) for name, config_class in classes.items()}
    configs["model"] = model = replace(configs["model"], model=configs["model"].model or DEFAULT_MODEL)
    shape = {name: value for name, value in given(args, DisaggregationConfig).items() if name in SHAPE}
    config = EngineConfig(**configs, disaggregation=DisaggregationConfig(**shape))
    order = Order(
        name=args.name or f"{args.command}-{os.getpid()}",
        role=args.command,
        address=getattr(args, ADDRESS),
        keys=keys.engines,
        owner=owner_by_hand(),
        is_traced=True,
        num_threads=config_of(args, demo.DemoConfig).threads or 1,
        config=to_json(config),
    )
    remove_abandoned()
    console.print(f"{order.name} joins {order.address} with {model.model}", highlight=False)
    process = Process(order)
    process.run(signal.SIGINT, signal.SIGTERM)
    if process.error is not None:
        raise process.error


if __name__ == "__main__":
    raise SystemExit(main())
