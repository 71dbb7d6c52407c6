"""The server on the command line: `python -m m7_serving`.

Without flags it serves the included model, for texts and images, at http://127.0.0.1:8000 with OpenAI's API.
"""

import argparse
import asyncio
import logging
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoConfig

from m1_single_request import demo as m1
from m1_single_request.demo_tour import text_of
from m1_single_request.errors import ConfigError
from m1_single_request.flags import add_flags, config_of, given
from m6_multimodal_pd import TraceConfig, demo as m6
from m6_multimodal_pd.config import ModelConfig, MultimodalConfig, SchedulerConfig
from m6_multimodal_pd.disaggregation.config import DisaggregationConfig
from m7_serving import AsyncLLM, CacheConfig, SpeculativeConfig
from m7_serving.config import ServerConfig

STDERR = 2
LIMITS = "max_requests max_connections max_header_bytes max_body_bytes"
TIMES = "header_timeout_s=--header-timeout body_timeout_s=--body-timeout write_timeout_s=--write-timeout "
TIMES += "keep_alive_timeout_s=--keep-alive-timeout request_timeout_s=--request-timeout "
TIMES += "shutdown_timeout_s=--shutdown-timeout"
IMAGES = "max_items max_file_bytes min_pixels max_pixels encoder_budget embedding_cache_bytes num_media_processes"
OF_THE_ENGINE = ("model", "launches", "batching", "prefix cache", "KV memory", "drafts")
FLAGS: m1.Flags = {
    "server": (ServerConfig, "host port api_key served_model_name operator_socket allowed_media_hosts access_log"),
    "limits of requests": (ServerConfig, LIMITS),
    "times": (ServerConfig, TIMES),
    **{title: m6.FLAGS[title] for title in OF_THE_ENGINE},
    "engines": (DisaggregationConfig, "both prefill decode devices transport max_restarts"),
    "images, which one process reads by default": (MultimodalConfig, IMAGES),
    "trace": (TraceConfig, "jsonl=--trace-file experts=--trace-experts"),
    "threads": (m1.DemoConfig, "threads"),
}
CLASSES = {
    "model": ModelConfig,
    "scheduler": SchedulerConfig,
    "cache": CacheConfig,
    "speculative": SpeculativeConfig,
    "trace": TraceConfig,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the server; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m m7_serving", description=text_of(__doc__).replace("`", ""))
    for title, (config_class, names) in FLAGS.items():
        add_flags(parser.add_argument_group(title), config_class, names)
    return m1.exit_status(run, parser.parse_args(argv))


def run(args: argparse.Namespace, console: Console) -> None:
    """Serve with the configuration of the flags, until a signal. Raises `SystemExit` if the engines have ended."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        pass  # it was closed, and uvloop aborts when it closes a file with such a number
    os.close(number)
    try:
        from uvicorn.loops.auto import auto_loop_factory

        from m7_serving.server.run import serve
    except ImportError as error:
        raise ConfigError(f'the server needs more packages (pip install "stepwise-llm[serve]"): {error}') from error
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
    keys = os.environ.get("STEPWISE_API_KEY")
    config = config_of(args, ServerConfig, api_key=(keys,) if keys else ())
    start = partial(AsyncLLM.start, max_requests=config.max_requests, **configs_of(args))
    ready = partial(console.print, style="bold", soft_wrap=True)
    with asyncio.Runner(loop_factory=auto_loop_factory()) as runner:
        if not runner.run(serve(start, config, lambda url: ready(f"serving at {url}/v1"))):
            raise SystemExit(1)


def reads_images(model: str | Path | None) -> bool:
    """Return whether a model takes images; the included one (None) does. False if it cannot be loaded."""
    if model is None:
        return True
    try:
        return hasattr(AutoConfig.from_pretrained(model), "vision_config")
    except (OSError, ValueError):  # which building the engine reports
        return False


def configs_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the configurations of the engines, as keywords of `AsyncLLM.start`. Sets the number of threads of this
    process, which its engines take over: 1 for the included model, whose operations are too small to share."""
    configs: dict[str, Any] = {f"{name}_config": config_of(args, each) for name, each in CLASSES.items()}
    # on the tokenizer thread a large image would delay all prompts
    media: dict[str, Any] = {"num_media_processes": 1 if reads_images(configs["model_config"].model) else 0}
    if hosts := config_of(args, ServerConfig).allowed_media_hosts:
        media |= {"allowed_url_schemes": ("http", "https"), "allowed_url_hosts": hosts}
    configs["multimodal_config"] = config_of(args, MultimodalConfig, **media)
    is_pair = not given(args, DisaggregationConfig).keys().isdisjoint(("prefill", "decode"))
    configs["disaggregation_config"] = config_of(args, DisaggregationConfig, both=0 if is_pair else 1)
    threads = config_of(args, m1.DemoConfig).threads or (1 if configs["model_config"].model is None else None)
    if threads is not None:
        torch.set_num_threads(threads)
    return configs


if __name__ == "__main__":
    raise SystemExit(main())
