"""Build a group of engines, and the router and input processor in front of them.

The user's process reads the model's config and tokenizer, and no weights: it checks requests, routes them, and makes
texts of tokens. Engines of this process share one copy of the weights; those of other processes load their own.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from typing import Any

from m1_single_request.config import TraceConfig as PlainTraceConfig
from m1_single_request.errors import ConfigError
from m1_single_request.tracer import Tracer
from m3_paged_attention.config import TraceConfig
from m4_radix_cache.tiers import WatchedLoader
from m5_chunked_prefill_spec.wiring import build_input_processor
from m6_multimodal_pd.disaggregation.config import DisaggregationConfig, on_own_device
from m6_multimodal_pd.disaggregation.engine import Engine
from m6_multimodal_pd.disaggregation.members import Member, vocabulary_of
from m6_multimodal_pd.disaggregation.router import Router
from m6_multimodal_pd.disaggregation.router_core import RouterCore
from m6_multimodal_pd.disaggregation.runtime.credentials import read_keys
from m6_multimodal_pd.disaggregation.runtime.in_process import InProcessSegments
from m6_multimodal_pd.disaggregation.runtime.jobs import error_of
from m6_multimodal_pd.disaggregation.runtime.links import LocalLinks
from m6_multimodal_pd.disaggregation.runtime.messages import LengthFitted
from m6_multimodal_pd.disaggregation.runtime.processes import ProcessLinks
from m6_multimodal_pd.disaggregation.runtime.socket_links import SocketLinks
from m6_multimodal_pd.errors import EngineLostError


def check_parts(parts: Mapping[str, Any], standard: Mapping[str, Any], group: DisaggregationConfig) -> None:
    """Raise `ConfigError` for a part that is not m6's, where it has no effect or cannot be sent to another process."""
    own = sorted(role for role, part in parts.items() if part is not standard.get(role))
    if "scheduler" in own:
        raise ConfigError("the part 'scheduler' has no effect in a group: its engines have schedulers of their roles")
    if own and group.transport != "in_process":
        raise ConfigError(
            f"the parts {', '.join(own)} are not m6's, and cannot go to other processes: use transport='in_process'"
        )


def build_disaggregated(
    config: Any,
    parts: Mapping[str, Any],
    tracer: Tracer,
    *,
    described: Any,
    media: Any,
    prepare: Callable[..., Any],
) -> RouterCore:
    """Build a group of engines behind a router, and wait until they have joined.

    `described`: the model without weights; `media`: its media reader; `prepare` prepares one engine. Raises
    `EngineLostError` for an engine that does not join, and the error of one that cannot be built.
    """
    group = config.disaggregation
    with ExitStack() as undo:
        links = links_of(config, parts, prepare)
        undo.callback(links.close)
        start_engines(links, group)
        router = Router(links=links, config=group, vocabulary=vocabulary_of(described.tokenizer), tracer=tracer)
        deadline = time.monotonic() + group.start_timeout_s
        await_engines(router, router.fitted, deadline)
        if config.model.max_model_len is None:
            shortest = min(fitted.max_model_len for fitted in router.fitted.values())
            described = replace(described, max_model_len=min(described.max_model_len, shortest))
        length = described.max_model_len
        stop_checker = parts["stop_checker"](eos_token_ids=described.eos_token_ids, max_model_len=length)
        router.fix_length(length, stop_checker)
        await_engines(router, router.members, deadline)
        input_processor = build_input_processor(
            config,
            config.scheduler.resolved(length),
            parts,
            described,
            min(member.joined.total_tokens for member in router.members.values()),
            media=media,
            guesses_texts_only=config.speculative.method == "draft_model",
        )
        core = RouterCore(
            input_processor=input_processor,
            router=router,
            output_processor=parts["output_processor"](),
            parts=parts,
            model=str(config.model.model),
        )
        undo.pop_all()
    return core


def links_of(config: Any, parts: Mapping[str, Any], prepare: Callable[..., Any]) -> LocalLinks | SocketLinks:
    """Return links to engines of this process, of processes that it starts, or of those that a user starts."""
    group, is_traced = config.disaggregation, config.trace not in (TraceConfig(), PlainTraceConfig())
    if group.address is not None:
        return SocketLinks(group.address, read_keys(group.key_file).router, group)
    if group.transport != "in_process":
        return ProcessLinks(config, is_traced=is_traced)
    load = WatchedLoader(cache(parts["model_loader"]), config.cache)  # one model for all
    prepare = partial(prepare, load=load)
    make = partial(Engine, parts=parts, prepare=prepare, segments=InProcessSegments(), is_traced=is_traced)
    return LocalLinks(lambda name, role, send: make(role=role, config=on_own_device(config, name), send=send))


def start_engines(links: LocalLinks | SocketLinks, group: DisaggregationConfig) -> None:
    """Start the engines of the group. Raises `EngineLostError` if a process cannot be started."""
    if isinstance(links, LocalLinks | ProcessLinks):
        for role, number_of in group.engines.items():
            for number in range(number_of):
                links.start(f"{role}-{number}", role)


def await_engines(router: Router, engines: Mapping[str, LengthFitted | Member], deadline: float) -> None:
    """Wait until `engines`, a table of the router, has all engines of each role, under any names.

    Raises the error of an engine of the group that cannot be built, and `EngineLostError` if one ends, or does not come
    before the deadline. An engine that a user has started may end: another one may come.
    """
    group = router.config
    expected = Counter(group.engines)
    while missing := expected - Counter(engine.role for engine in engines.values()):
        for name, why, fault in router.links.lost():
            if group.address is None:
                raise error_of(fault, name) if fault else EngineLostError(f"engine {name!r} did not start: {why}")
            router.lose(name, why)
        if time.monotonic() > deadline:
            lacking = " and ".join(f"{number} for {role}" for role, number in missing.items())
            refused = "".join(f"; {router.refused[role]}" for role in missing if role in router.refused)
            raise EngineLostError(f"{lacking} did not join within start_timeout_s={group.start_timeout_s:g}{refused}")
        router.receive(0.1)
