"""Engines that are started by hand, each in a terminal of its own: `python -m m6_multimodal_pd.pd`.

    python -m m6_multimodal_pd.pd keys group.json
    python -m m6_multimodal_pd.pd prefill --join tcp://127.0.0.1:5600 --keys group.json
    python -m m6_multimodal_pd.pd decode  --join tcp://127.0.0.1:5600 --keys group.json
    python -m m6_multimodal_pd.pd router  --listen tcp://127.0.0.1:5600 --keys group.json --chat

The router is the demo, with all its flags; an engine takes those of model, memory and scheduling. A router must be
there when an engine joins. New in this milestone. SGLang: `--disaggregation-mode` and its router; vLLM: `--kv-transfer-
config` and a proxy.
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from m1_single_request import demo as m1
from m1_single_request.errors import ConfigError
from m3_paged_attention import demo as m3
from m6_multimodal_pd import demo
from m6_multimodal_pd.config import DEFAULT_MODEL, EngineConfig
from m6_multimodal_pd.disaggregation.config import DisaggregationConfig
from m6_multimodal_pd.disaggregation.runtime.child import Process
from m6_multimodal_pd.disaggregation.runtime.config_json import to_json
from m6_multimodal_pd.disaggregation.runtime.credentials import read_keys, write_keys
from m6_multimodal_pd.disaggregation.runtime.messages import Order
from m6_multimodal_pd.disaggregation.runtime.shared_memory import owner_by_hand, remove_abandoned

PROG = "python -m m6_multimodal_pd.pd"
OF_REQUESTS = ("prompt", "chat", "image", "video", "n", "trace_file", "chrome_trace")
"""Flags of the demo that mean nothing to an engine."""


def main(argv: Sequence[str] | None = None) -> int:
    """Be one of the group; returns the exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    commands = {"keys": _keys, "prefill": _engine, "decode": _engine, "router": _router}
    if not given or given[0] not in commands:
        parser = argparse.ArgumentParser(prog=PROG, description=__doc__.splitlines()[0])
        parser.add_argument("what", choices=list(commands), help="keys: make the file that all of a group need")
        parser.parse_args(given[:1])
        return 2
    return commands[given[0]](given[0], given[1:])


def _keys(_: str, argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog=f"{PROG} keys", description="Make keys for a group of engines.")
    parser.add_argument("file", type=Path)

    def run(args: argparse.Namespace, console: Console) -> None:
        write_keys(args.file)
        console.print(f"{args.file} has the keys of a router and its engines; keep it to yourself", highlight=False)

    return m1.exit_status(run, parser.parse_args(argv))


def _router(_: str, argv: Sequence[str]) -> int:
    parser = demo.make_parser(f"{PROG} router")
    parser.add_argument("--listen", required=True, metavar="ADDRESS", help="where engines join: tcp://127.0.0.1:5600")
    parser.add_argument("--keys", required=True, metavar="FILE", help="made by the command keys")

    def run(args: argparse.Namespace, console: Console) -> None:
        if args.transport is not None:
            raise ConfigError(f"transport={args.transport!r} has no effect: engines are started by hand")
        args.group = DisaggregationConfig(
            prefill=args.prefill or 1, decode=args.decode or 1, address=args.listen, key_file=args.keys
        )
        demo.run(args, console)

    return m1.exit_status(run, parser.parse_args(argv))


def _engine(role: str, argv: Sequence[str]) -> int:
    parser = demo.make_parser(f"{PROG} {role}")
    parser.add_argument("--join", required=True, metavar="ADDRESS", help="where the router listens")
    parser.add_argument("--keys", required=True, metavar="FILE", help="made by the command keys")
    parser.add_argument("--name", help="what the router calls it; default: its role and its process id")

    def run(args: argparse.Namespace, console: Console) -> None:
        _work(role, args, console)

    return m1.exit_status(run, parser.parse_args(argv))


def _work(role: Any, args: argparse.Namespace, console: Console) -> None:
    """Be an engine until the router is gone, or somebody says stop."""
    m3.check_flags(args)
    for name in OF_REQUESTS:
        if getattr(args, name, None):
            raise ConfigError(f"--{name.replace('_', '-')} has no effect: requests come from the router")
    args.chat = True  # no tour, so memory and guesses are what an engine of its own would have
    settings, keys = demo.settings_of(args, console), read_keys(args.keys)
    model = replace(settings.model, model=settings.model.model or DEFAULT_MODEL)
    config = EngineConfig(
        model=model,
        scheduler=settings.scheduler,
        cache=settings.cache,
        speculative=settings.speculative,
        multimodal=settings.multimodal,
        disaggregation=DisaggregationConfig(),
    )
    order = Order(
        name=args.name or f"{role}-{os.getpid()}",
        role=role,
        address=args.join,
        keys=keys.engines,
        owner=owner_by_hand(),
        is_traced=True,
        num_threads=args.threads or 1,
        config=to_json(config),
    )
    remove_abandoned()
    console.print(f"{order.name} joins {order.address} with {model.model}", highlight=False)
    process = Process(order)
    status = process.run(signal.SIGINT, signal.SIGTERM)
    if process.error is not None:
        raise process.error
    if status:
        raise ConfigError(f"{order.name} has ended: no router at {order.address} has admitted it")


if __name__ == "__main__":
    raise SystemExit(main())
