"""Build a group of engines, and the router and input processor in front of them.

The user's process reads the model's config and tokenizer, and no weights: it takes requests in, routes them, and makes
texts of tokens. Engines of this process share one copy of the weights; those of other processes load their own.
"""

import time
from collections.abc import Callable, Mapping, Sized
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, get_args

from m1_single_request.config import TraceConfig
from m1_single_request.errors import ConfigError
from m1_single_request.tracer import Tracer
from m5_chunked_prefill_spec.wiring import build_input_processor
from m6_multimodal_pd.disaggregation.config import DisaggregationConfig
from m6_multimodal_pd.disaggregation.engine import Engine
from m6_multimodal_pd.disaggregation.members import vocabulary_of
from m6_multimodal_pd.disaggregation.router import Router
from m6_multimodal_pd.disaggregation.router_core import RouterCore
from m6_multimodal_pd.disaggregation.runtime.credentials import read_keys
from m6_multimodal_pd.disaggregation.runtime.in_process import InProcessSegments
from m6_multimodal_pd.disaggregation.runtime.jobs import error_of
from m6_multimodal_pd.disaggregation.runtime.links import Links, LocalLinks
from m6_multimodal_pd.disaggregation.runtime.messages import Role
from m6_multimodal_pd.disaggregation.runtime.processes import ProcessLinks
from m6_multimodal_pd.disaggregation.runtime.socket_links import SocketLinks
from m6_multimodal_pd.errors import EngineLostError


def build_disaggregated(
    config: Any,
    parts: Mapping[str, Any],
    tracer: Tracer,
    *,
    prepare: Callable[..., Any],
    sight_of: Callable[..., Any],
    describe: Callable[..., Any],
    standard: Mapping[str, Any],
) -> RouterCore:
    """Build a group of engines behind a router. `prepare` prepares one engine; `standard`: m6's own parts; the others:
    as in m6's wiring and loader."""
    if parts["scheduler"] is not standard["scheduler"]:
        raise ConfigError("the part 'scheduler' has no effect in a group: its engines have schedulers of their roles")
    group = config.disaggregation
    described = describe(config.model)
    sight = sight_of(config, parts, described)
    with ExitStack() as undo:
        links = links_of(config, parts, prepare, standard)
        undo.callback(links.close)
        start_engines(links, group)
        router = router_of(config, parts, described, links, tracer)
        deadline = time.monotonic() + group.start_timeout_s
        await_engines(router, group, router.length.of_role, deadline)
        described = fix_length(config, parts, described, router)
        await_engines(router, group, router.of_role, deadline)
        limits = config.scheduler.resolved(described.max_model_len, described.device.type)
        core = RouterCore(
            input_processor=intake_of(config, limits, parts, described, router, sight),
            router=router,
            output_processor=parts["output_processor"](),
            parts=parts,
            tracer=tracer,
            close_links=links.close,
            model=str(config.model.model),
        )
        undo.pop_all()
    return core


def links_of(
    config: Any, parts: Mapping[str, Any], prepare: Callable[..., Any], standard: Mapping[str, Any]
) -> LocalLinks | SocketLinks:
    """Return links to engines of this process, of processes that it starts, or of those that a user starts."""
    is_traced, group = config.trace != TraceConfig(), config.disaggregation
    if group.transport == "in_process":
        return local_links(config, parts, prepare, is_traced=is_traced)
    check_standard(parts, standard)
    if group.address is not None:
        return SocketLinks(group.address, read_keys(group.key_file).router, group)
    return ProcessLinks(config, is_traced=is_traced)


def local_links(config: Any, parts: Mapping[str, Any], prepare: Callable[..., Any], *, is_traced: bool) -> LocalLinks:
    """Return links to engines of this process, with one copy of the weights."""
    segments, loaded = InProcessSegments(), {}

    def load_once(model_config: Any) -> Any:
        key = repr(model_config)
        if key not in loaded:
            loaded[key] = parts["model_loader"](model_config)
        return loaded[key]

    def make(role: Role, send: Callable[[Any], None]) -> Engine:
        return Engine(
            role=role,
            config=config,
            parts={**parts, "model_loader": load_once},
            prepare=prepare,
            segments=segments,
            send=send,
            is_traced=is_traced,
        )

    return LocalLinks(make)


def start_engines(links: LocalLinks | SocketLinks, group: DisaggregationConfig) -> None:
    """Start the engines of the group. Raises `EngineLostError` if a process cannot be started."""
    if isinstance(links, LocalLinks | ProcessLinks):
        for role in get_args(Role):
            for number in range(getattr(group, role)):
                links.start(f"{role}-{number}", role)


def check_standard(parts: Mapping[str, Any], standard: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for a part that is not m6's: it cannot be sent to another process."""
    own = sorted(role for role, part in parts.items() if part is not standard.get(role))
    if own:
        raise ConfigError(
            f"the parts {', '.join(own)} are not m6's, and cannot go to other processes: use transport='in_process'"
        )


def router_of(config: Any, parts: Mapping[str, Any], described: Any, links: Links, tracer: Tracer) -> Router:
    """Build a router without engines."""
    return Router(
        links=links,
        config=config.disaggregation,
        stop_checker=parts["stop_checker"](
            eos_token_ids=described.eos_token_ids, max_model_len=described.max_model_len
        ),
        speculates=config.speculative.method is not None,
        vocabulary=vocabulary_of(described.tokenizer),
        tracer=tracer,
    )


def await_engines(
    router: Router, group: DisaggregationConfig, of_role: Callable[[str], Sized], deadline: float
) -> None:
    """Wait until `of_role` has all engines of each role, under any names.

    Raises the error of an engine of the group that cannot be built, and `EngineLostError` if one ends, or does not come
    before the deadline. An engine that a user has started may end: another one may come.
    """
    while missing := {
        role: getattr(group, role) - len(of_role(role))
        for role in get_args(Role)
        if len(of_role(role)) < getattr(group, role)
    }:
        for name, why, fault in router.links.lost():
            if group.address is None:
                raise error_of(fault, name) if fault else EngineLostError(f"engine {name!r} did not start: {why}")
            router.lose(name, why)
        if time.monotonic() > deadline:
            lacking = " and ".join(f"{count} for {role}" for role, count in missing.items())
            refused = "".join(f"; {router.refused[role]}" for role in missing if role in router.refused)
            raise EngineLostError(f"{lacking} did not join within start_timeout_s={group.start_timeout_s:g}{refused}")
        router.hear(0.1)


def fix_length(config: Any, parts: Mapping[str, Any], described: Any, router: Router) -> Any:
    """Fix the length of requests: the configured one, or the shortest that an engine has room for. Returns `described`
    with it."""
    length: int = described.max_model_len
    if config.model.max_model_len is None:
        length = min(length, *(fitted.max_model_len for fitted in router.length.waiting.values()))
    router.updater.stop_checker = parts["stop_checker"](eos_token_ids=described.eos_token_ids, max_model_len=length)
    router.length.fix(length)
    return replace(described, max_model_len=length)


def intake_of(config: Any, limits: Any, parts: Mapping[str, Any], described: Any, router: Router, sight: Any) -> Any:
    """Build an input processor for requests that fit into the smallest of the engines."""
    return build_input_processor(
        config,
        limits,
        parts,
        described,
        min(member.joined.total_tokens for member in router.members.values()),
        media=sight,
        guesses_texts_only=config.speculative.method == "draft_model",
    )
