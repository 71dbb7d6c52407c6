"""Engines that are started by hand, each in a terminal of its own: `python -m m6_multimodal_pd.pd`.

    python -m m6_multimodal_pd.pd keys group.json
    python -m m6_multimodal_pd.pd router  --listen tcp://127.0.0.1:5600 --keys group.json --chat
    python -m m6_multimodal_pd.pd prefill --join tcp://127.0.0.1:5600 --keys group.json
    python -m m6_multimodal_pd.pd decode  --join tcp://127.0.0.1:5600 --keys group.json

The router runs before an engine joins. It is the demo, with all its flags; an engine takes those of model, memory,
scheduling and speculation, and drafts by its own flags. By default each of the two takes half of one device's memory;
on GPUs of their own both have `--devices cuda:0,cuda:1`, and each its own `--device`. New in this milestone. SGLang:
`--disaggregation-mode` and its router; vLLM: `--kv-transfer-config` and a proxy.
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
from m1_single_request.errors import ConfigError
from m1_single_request.flags import config_of, given
from m6_multimodal_pd import demo
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
OF_REQUESTS = ("prompt", "chat", "trace_file", "UserConfig.image", "UserConfig.video", "SamplingParams.n")
"""Flags of the demo that have no effect on an engine."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    args = make_parser().parse_args(argv)
    return m1.exit_status(args.run, args)


def make_parser() -> argparse.ArgumentParser:
    """Return a parser of the commands. The router and the engines have the flags of the demo, and a few more."""
    parser = argparse.ArgumentParser(prog=PROG, description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    keys = commands.add_parser("keys", help="make the file of keys that a group needs")
    keys.add_argument("file", type=Path)
    keys.set_defaults(run=make_keys)
    for name, run, place in (("router", route, "--listen"), ("prefill", work, "--join"), ("decode", work, "--join")):
        what = f"start a {name} process"
        command = commands.add_parser(name, help=what, parents=[demo.make_parser()], conflict_handler="resolve")
        command.add_argument(place, dest=ADDRESS, required=True, metavar="ROUTER", help="as tcp://127.0.0.1:5600")
        command.add_argument("--keys", dest=KEYS, required=True, metavar="FILE", help="made by the command keys")
        if run is work:
            command.add_argument("--name", help="name of the engine; default: its role and its process id")
        command.set_defaults(run=run)
    return parser


def make_keys(args: argparse.Namespace, console: Console) -> None:
    """Write new keys to a file."""
    write_keys(args.file)
    console.print(f"{args.file} has the keys of a router and its engines; keep it to yourself", highlight=False)


def route(args: argparse.Namespace, console: Console) -> None:
    """Run the demo with engines that are started by hand."""
    flags_of_group(args)
    demo.run(args, console)


def flags_of_group(args: argparse.Namespace) -> dict[str, Any]:
    """Return the flags of the group. Raises `ConfigError` for a transport, which has no effect."""
    flags = given(args, DisaggregationConfig)
    if "transport" in flags:
        raise ConfigError(f"transport={flags['transport']!r} has no effect: engines are started by hand")
    return flags


def work(args: argparse.Namespace, console: Console) -> None:
    """Run an engine until its router is gone, or a signal ends it.

    It does not know the other engines. The flags --prefill, --decode and --devices describe them: engines on one device
    divide its memory. Without these flags, one other engine is on the same device, and each takes half of its memory.
    """
    for name in OF_REQUESTS:
        if getattr(args, name, None):
            flag = name.rpartition(".")[2].replace("_", "-")
            raise ConfigError(f"--{flag} has no effect: requests come from the router")
    args.chat = True  # no tour: memory and drafts are those of an engine, not of the demo
    configs, keys = demo.configs_of(args, console), read_keys(getattr(args, KEYS))
    del configs["trace_config"]  # the router has the readers
    model = configs["model_config"]
    configs["model_config"] = model = replace(model, model=model.model or DEFAULT_MODEL)
    fields = {name.removesuffix("_config"): config for name, config in configs.items()}
    shape = {name: value for name, value in flags_of_group(args).items() if name in ("prefill", "decode", "devices")}
    config = EngineConfig(**fields, disaggregation=DisaggregationConfig(**shape))
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
