"""What must keep the contract: one entry for each milestone with batches, and for each of its ways to run them.

An entry describes how to make an engine, where its layers and its KV are, and what holds memory. From that the parts
that break on purpose are made for all of them: a runner that fails, a layer, a sampler. A milestone joins with one
entry in `VARIANTS`; what is its own stays in its own directory.
"""

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Literal

import pytest
from torch import Tensor, nn

from tests.m2_continuous_batching import engines as m2
from tests.m3_paged_attention import engines as m3
from tests.m4_radix_cache import engines as m4
from tests.m5_chunked_prefill_spec import engines as m5
from tests.m6_multimodal_pd import engines as m6

Moment = Literal["before", "forward", "after"]
MOMENTS: tuple[Moment, ...] = ("before", "forward", "after")
"""When a step breaks: before the runner did anything, between two layers, or when all KV is in place."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A milestone in one way of running."""

    milestone: str
    name: str = ""
    """What sets it apart from the milestone's other variants."""
    limits: Callable[[int, int | None, int | None], dict[str, Any]]
    """Keywords of an engine with so many seats, such a token budget and room for so many tokens' KV, if that is not
    decided by the seats; None: no bound that a test could meet."""
    run_step: str
    """The method of runner and executor that takes a step's work."""
    starts: Callable[[Any], dict[str, int]]
    """Of that work: where each request's new tokens begin."""
    layers: Callable[[Any], Any]
    """The layers of the model of a runner: a list to put another callable in, or modules of torch."""
    embedding: Callable[[Any], Tensor]
    """The embedding of the model of a runner: `[vocab, hidden_size]`."""
    first_key: Callable[[Any, str], Tensor]
    """Of an engine and a request that runs: where the key of its first token stands, in the first layer."""
    owners: Callable[[Any], Iterable[str]]
    """Of an engine, a closed one as well: the requests that hold KV, a place for it, or a record of a runner."""
    check_step: Callable[[Any], None]
    """What must hold of an engine after every step that was not interrupted."""
    check_drained: Callable[[Any], None]
    """What must hold of an engine when all work is done."""
    parts: Callable[[], Mapping[str, Any]] = dict
    """Parts of all its engines: those that look at what passes through them."""
    mixes: bool = True
    """Whether prompts and decodes share a step, so that no request waits longer than the token budget demands."""
    has_families: bool = True
    """Whether a request may ask for several outputs."""
    cuts: bool = False
    """Whether prompts are cut, so that none is too long for a step, and no running request is ever left out."""

    def __str__(self) -> str:
        return f"{self.milestone.partition('_')[0]}-{self.name}" if self.name else self.milestone.partition("_")[0]

    @property
    def package(self) -> Any:
        """What a user imports."""
        return importlib.import_module(self.milestone)

    def part(self, role: str) -> Any:
        """The default part of a role."""
        return self.parts().get(role) or importlib.import_module(f"{self.milestone}.wiring").PARTS[role]


def runner_of(engine: Any) -> Any:
    """The part that touches the tensors. In m1 the engine core holds it itself."""
    core = engine.engine_core
    return core.executor.worker.model_runner if hasattr(core, "executor") else core.model_runner


# --- parts that break -------------------------------------------------------------------------------------------------


def calling(variant: Variant, role: str, before: Callable[[Any, dict[str, int]], None]) -> Any:
    """A runner or an executor that first calls `before(itself, starts)` in every step; see `Variant.starts`."""
    base = variant.part(role)

    class Calling(base):  # type: ignore[misc,valid-type]
        """What the milestone has, and a call."""

    def run_step(self: Any, work: Any) -> Any:
        before(self, variant.starts(work))
        return getattr(base, variant.run_step)(self, work)

    setattr(Calling, variant.run_step, run_step)
    return Calling


class FailingRunner:
    """`parts`: a runner that raises once, in the step in which `rid` runs from `position` on; `hit`: its requests."""

    def __init__(
        self, variant: Variant, error: BaseException, *, rid: str, position: int, at: Moment = "before"
    ) -> None:
        self.hit: dict[str, int] = {}
        base = variant.part("model_runner")

        class Failing(base):  # type: ignore[misc,valid-type]
            """What the milestone has, until the moment comes."""

        def run_step(runner: Any, work: Any) -> Any:
            starts, run = variant.starts(work), getattr(base, variant.run_step)
            if self.hit or starts.get(rid) != position:
                return run(runner, work)
            self.hit = starts
            if at == "before":
                raise error
            if at == "forward":
                with failing_layer(variant.layers(runner), error):
                    return run(runner, work)
            run(runner, work)
            raise error

        setattr(Failing, variant.run_step, run_step)
        self.parts = {"model_runner": Failing}


@contextmanager
def failing_layer(layers: Any, error: BaseException) -> Iterator[None]:
    """The last layer raises: those before it have done their work."""

    def fail(*_: Any) -> Any:
        raise error

    if isinstance(layers, nn.ModuleList):
        hook = layers[-1].register_forward_pre_hook(fail)
        try:
            yield
        finally:
            hook.remove()
    else:
        last, layers[-1] = layers[-1], fail
        try:
            yield
        finally:
            layers[-1] = last


def failing_part(variant: Variant, role: str, method: str, error: BaseException, *, call: int) -> Any:
    """A part that raises at the end of its `call`th `method`: its work is done, and not reported."""
    base, calls = variant.part(role), count(1)

    class Failing(base):  # type: ignore[misc,valid-type]
        """What the milestone has, except for once."""

    def failing(self: Any, *args: Any) -> Any:
        result = getattr(base, method)(self, *args)
        if next(calls) == call:
            raise error
        return result

    setattr(Failing, method, failing)
    return Failing


# --- m1 ---------------------------------------------------------------------------------------------------------------


def _check_step_m1(engine: Any) -> None:
    core = engine.engine_core
    core.scheduler.check_invariants()
    held = {rid: cache.get_seq_length() for rid, cache in core.model_runner.request_caches.items()}
    running = {request.request_id: request.sequence.num_computed_tokens for request in core.scheduler.running}
    assert held == running, "KV is held for exactly the computed tokens of the running request"


def _check_drained_m1(engine: Any) -> None:
    core = engine.engine_core
    core.scheduler.check_invariants()
    assert not core.scheduler.requests and not core.model_runner.request_caches


M1 = Variant(
    milestone="m1_single_request",
    limits=lambda seats, budget, room: {},
    run_step="execute_model",
    starts=lambda inputs: {inputs.request_id: inputs.num_computed_tokens},
    layers=lambda runner: runner.model.model.layers,
    embedding=lambda runner: runner.model.get_input_embeddings().weight,
    first_key=lambda engine, rid: engine.engine_core.model_runner.request_caches[rid].layers[0].keys[0, :, 0],
    owners=lambda engine: list(engine.engine_core.model_runner.request_caches),
    check_step=_check_step_m1,
    check_drained=_check_drained_m1,
    has_families=False,
)
"""Has no batches, so it is not in `VARIANTS`."""


# --- m2 ---------------------------------------------------------------------------------------------------------------


def _starts_of_rows(batch: Any) -> dict[str, int]:
    return dict(zip(batch.req_ids, batch.start_positions, strict=True))


def _first_key_of_m2(engine: Any, rid: str) -> Tensor:
    execution = runner_of(engine).execution
    if hasattr(execution, "cache"):
        return execution.cache.key_cache[0, execution.slots[rid], :, 0]
    return execution.runner.request_caches[rid].layers[0].keys[0, :, 0]


def _owners_in_m2(engine: Any) -> list[str]:
    core = engine.engine_core
    return [*core.executor.worker.model_runner.execution.lengths(), *core.scheduler.kv_manager.owned()]


def _m2(execution: str) -> Variant:
    return Variant(
        milestone="m2_continuous_batching",
        name=execution,
        limits=lambda seats, budget, room: m2.limits(seats, budget, execution),
        run_step="execute_model_batch",
        starts=_starts_of_rows,
        layers=lambda runner: runner.model.model.layers,
        embedding=lambda runner: runner.model.get_input_embeddings().weight,
        first_key=_first_key_of_m2,
        owners=_owners_in_m2,
        check_step=m2.check_step,
        check_drained=m2.check_drained,
        has_families=False,
    )


M2_PADDED, M2_PER_REQUEST = _m2("padded"), _m2("per_request")


# --- m3 ---------------------------------------------------------------------------------------------------------------


def _first_key_of_m3(engine: Any, rid: str) -> Tensor:
    block_id = engine.engine_core.scheduler.kv_manager.block_ids(rid)[0]
    return runner_of(engine).kv.layer(0).key_cache[block_id, 0]


def _owners_in_m3(engine: Any) -> list[str]:
    core = engine.engine_core
    kv_manager = core.scheduler.kv_manager
    return [*core.executor.held_request_ids(), *kv_manager.owned(), *kv_manager.swapped()]


M3 = Variant(
    milestone="m3_paged_attention",
    limits=lambda seats, budget, room: m3.setting(seats, budget, block_size=2, blocks=room and room // 2),
    run_step="execute_model",
    starts=m3.starts,
    layers=lambda runner: runner.model.layers,
    embedding=lambda runner: runner.model.embedding,
    first_key=_first_key_of_m3,
    owners=_owners_in_m3,
    check_step=m3.check_step,
    check_drained=m3.check_drained,
    parts=lambda: {"executor": m3.CheckingExecutor},
)


# --- m4 ---------------------------------------------------------------------------------------------------------------


def _starts_in_m4(batch: Any) -> dict[str, int]:
    return dict(zip(batch.rids, batch.prefix_lens or (batch.seq_lens - 1).tolist(), strict=True))


def _first_key_of_m4(engine: Any, rid: str) -> Tensor:
    scheduler, runner = engine.engine_core.scheduler, runner_of(engine)
    row = scheduler.requests[rid].req_pool_idx
    (slot,) = scheduler.pools.req_to_token_pool.read(row, 0, 1).tolist()
    return runner.kv.layer(0).key_cache[slot // runner.page_size, slot % runner.page_size]


def _owners_in_m4(engine: Any) -> list[str]:
    return [req.rid for req in engine.engine_core.scheduler.requests.values() if req.req_pool_idx is not None]


def _m4(cache: str) -> Variant:
    return Variant(
        milestone="m4_radix_cache",
        name=cache,
        limits=lambda seats, budget, room: m4.setting(seats, budget, cache=cache, tokens=room or 2048, page_size=2),
        run_step="execute_model",
        starts=_starts_in_m4,
        layers=lambda runner: runner.model.layers,
        embedding=lambda runner: runner.model.embedding,
        first_key=_first_key_of_m4,
        owners=_owners_in_m4,
        check_step=m4.check_step,
        check_drained=m4.check_drained,
        mixes=False,
    )


M4_RADIX, M4_HASH, M4_CHUNK = _m4("radix"), _m4("hash"), _m4("chunk")


# --- m5 ---------------------------------------------------------------------------------------------------------------


def _m5(name: str, *, parts: Callable[[], Mapping[str, Any]] = dict, **settings: Any) -> Variant:
    return replace(
        M4_RADIX,
        milestone="m5_chunked_prefill_spec",
        name=name,
        limits=lambda seats, budget, room: m5.setting(seats, budget, tokens=room or 2048, page_size=2, **settings),
        check_step=m5.check_step,
        check_drained=m5.check_drained,
        parts=parts,
        mixes=True,
        cuts=True,
    )


M5_MIXED = _m5("mixed")
M5_GUESSING = _m5("guessing", method="ngram", drafts=3, parts=lambda: {"proposer": m5.Guessing})


# --- m6 ---------------------------------------------------------------------------------------------------------------


def _m6(variant: Variant, name: str, **settings: Any) -> Variant:
    return replace(
        variant,
        milestone="m6_multimodal_pd",
        name=name,
        limits=lambda seats, budget, room: m6.setting(seats, budget, tokens=room or 2048, page_size=2, **settings),
    )


M6 = _m6(M5_GUESSING, "", method="ngram", drafts=3)
"""On a model without eyes: what is its own stands in its own directory."""


# --- all --------------------------------------------------------------------------------------------------------------

VARIANTS = [M2_PADDED, M2_PER_REQUEST, M3, M4_RADIX, M4_HASH, M4_CHUNK, M5_MIXED, M5_GUESSING, M6]
WITH_M1 = [pytest.param(M1, marks=pytest.mark.alone), *VARIANTS]
"""For what a request is promised whether it shares its steps or not."""
WHOLE, CUT = [variant for variant in VARIANTS if not variant.cuts], [variant for variant in VARIANTS if variant.cuts]
"""Those that take prompts whole, and those that cut them."""


def each_of(variants: Iterable[Any]) -> Any:
    """The fixture `variant` of a file whose tests run with each of these."""

    @pytest.fixture(params=variants, ids=str)
    def variant(request: pytest.FixtureRequest) -> Variant:
        return request.param  # type: ignore[no-any-return]

    return variant
