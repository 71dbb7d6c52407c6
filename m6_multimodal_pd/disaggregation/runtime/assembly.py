"""Puts a group of engines together, and what stands in front of them.

The user's process reads the model's config and tokenizer, and no weights: it takes requests in, routes them, and makes
texts of tokens. Engines of this process share one copy of the weights; those of other processes load their own.
"""

import time
from collections.abc import Callable, Mapping, Sized
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
from m6_multimodal_pd.disaggregation.runtime.by_hand import HandLinks
from m6_multimodal_pd.disaggregation.runtime.in_process import InProcessSegments
from m6_multimodal_pd.disaggregation.runtime.jobs import error_of
from m6_multimodal_pd.disaggregation.runtime.links import Links, LocalLinks
from m6_multimodal_pd.disaggregation.runtime.messages import Role
from m6_multimodal_pd.disaggregation.runtime.processes import started
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
    """A group of engines behind a router. `prepare`: one engine; `standard`: m6's own parts; the others: as m6's wiring
    and loader have them."""
    if parts["scheduler"] is not standard["scheduler"]:
        raise ConfigError("the part 'scheduler' has no effect in a group: its engines have schedulers of their roles")
    group = config.disaggregation
    described = describe(config.model)
    sight = sight_of(config, parts, described)
    names = [f"{role}-{number}" for role in get_args(Role) for number in range(getattr(group, role))]
    links = links_of(config, parts, prepare, names, standard, is_traced=config.trace != TraceConfig())
    try:
        router = router_of(config, parts, described, links, tracer)
        deadline = time.monotonic() + group.start_timeout_s
        if group.address is None:
            await_engines(router, links, names, router.length.waiting, group.start_timeout_s, deadline)
        else:
            await_roles(router, group, router.length.of_role, deadline)
        described = fix_length(config, parts, described, router)
        if group.address is None:
            await_engines(router, links, names, router.members, group.start_timeout_s, deadline)
        else:
            await_roles(router, group, router.of_role, deadline)
        limits = config.scheduler.resolved(described.max_model_len, described.device.type)
        return RouterCore(
            input_processor=intake_of(config, limits, parts, described, router, sight),
            router=router,
            output_processor=parts["output_processor"](),
            parts=parts,
            tracer=tracer,
            close_links=links.close,
            model=str(config.model.model),
        )
    except BaseException:
        links.close()
        raise


def router_of(config: Any, parts: Mapping[str, Any], described: Any, links: Links, tracer: Tracer) -> Router:
    """A router that knows nobody yet."""
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


def fix_length(config: Any, parts: Mapping[str, Any], described: Any, router: Router) -> Any:
    """Fix the length of requests: the one that is named here, else the shortest that an engine has room for. Returns
    `described` with it."""
    length: int = described.max_model_len
    if config.model.max_model_len is None:
        length = min(length, *(fitted.max_model_len for fitted in router.length.waiting.values()))
    router.updater.stop_checker = parts["stop_checker"](eos_token_ids=described.eos_token_ids, max_model_len=length)
    router.length.fix(length)
    return replace(described, max_model_len=length)


def intake_of(config: Any, limits: Any, parts: Mapping[str, Any], described: Any, router: Router, sight: Any) -> Any:
    """An input processor for what the smallest of the engines can take."""
    return build_input_processor(
        config,
        limits,
        parts,
        described,
        min(member.joined.total_tokens for member in router.members.values()),
        media=sight,
        guesses_texts_only=config.speculative.method == "draft_model",
    )


def links_of(
    config: Any,
    parts: Mapping[str, Any],
    prepare: Callable[..., Any],
    names: list[str],
    standard: Mapping[str, Any],
    *,
    is_traced: bool,
) -> Links:
    """To engines of this process, of processes that are started for it, or of those that somebody has started."""
    if config.disaggregation.transport == "in_process":
        return local_links(config, parts, prepare, names, is_traced=is_traced)
    check_standard(parts, standard)
    if config.disaggregation.address is not None:
        return HandLinks(config.disaggregation)
    return started(config, names, is_traced=is_traced)


def local_links(
    config: Any, parts: Mapping[str, Any], prepare: Callable[..., Any], names: list[str], *, is_traced: bool
) -> LocalLinks:
    """Engines of this process, with one copy of the weights."""
    links, segments = LocalLinks(), InProcessSegments()
    loaded: dict[str, Any] = {}

    def load_once(model_config: Any) -> Any:
        key = repr(model_config)
        if key not in loaded:
            loaded[key] = parts["model_loader"](model_config)
        return loaded[key]

    try:
        for name in names:
            links.add(
                name,
                lambda send, name=name: Engine(  # type: ignore[misc]
                    role=name.partition("-")[0],
                    config=config,
                    parts={**parts, "model_loader": load_once},
                    prepare=prepare,
                    segments=segments,
                    send=send,
                    is_traced=is_traced,
                ),
            )
    except BaseException:
        links.close()
        raise
    return links


def check_standard(parts: Mapping[str, Any], standard: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for parts of somebody's own: they cannot be sent to another process."""
    own = sorted(role for role, part in parts.items() if part is not standard.get(role))
    if own:
        raise ConfigError(
            f"the parts {', '.join(own)} are not m6's, and cannot go to other processes: use transport='in_process'"
        )


def await_engines(
    router: Router, links: Links, names: list[str], there: Mapping[str, Any], timeout_s: float, deadline: float
) -> None:
    """Wait until all are `there`. Raises the error of one that cannot be built, `EngineLostError` if one does not come
    until the deadline, which is `timeout_s` behind the start."""
    while missing := [name for name in names if name not in there]:
        for name, why, fault in links.lost():
            raise error_of(fault, name) if fault else EngineLostError(f"engine {name!r} did not start: {why}")
        if time.monotonic() > deadline:
            raise EngineLostError(f"{', '.join(missing)} did not start within start_timeout_s={timeout_s:g}")
        router.hear(0.1)


def await_roles(router: Router, group: DisaggregationConfig, of_role: Callable[[str], Sized], deadline: float) -> None:
    """Wait until `of_role` has as many engines of each role as there are to be, under whatever names."""
    while missing := {
        role: getattr(group, role) - len(of_role(role))
        for role in get_args(Role)
        if len(of_role(role)) < getattr(group, role)
    }:
        if time.monotonic() > deadline:
            lacking = " and ".join(f"{count} for {role}" for role, count in missing.items())
            refused = "".join(f"; {router.refused[role]}" for role in missing if role in router.refused)
            raise EngineLostError(f"{lacking} did not join within start_timeout_s={group.start_timeout_s:g}{refused}")
        router.listen(0.1)
