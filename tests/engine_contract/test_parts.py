"""Parts of a user's own, in every role of every milestone: what fits is used, what does not is a readable error.

An error comes before anything is loaded. What a part of one's own can change is tested with the milestone that brings
its role.
"""

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from m1_single_request import ConfigError
from tests.engine_contract.variants import M1, M2_PADDED, M3, M4_RADIX, M5_GUESSING, M6, Variant
from tests.support.engines import EngineMaker, greedy

MILESTONES = [M1, M2_PADDED, M3, M4_RADIX, M5_GUESSING, M6]
each_milestone = pytest.mark.parametrize("variant", MILESTONES, ids=str)
each_role = pytest.mark.parametrize(
    ("package", "role"),
    [
        pytest.param(variant.package, role, id=f"{variant.milestone[:2]}-{role}")
        for variant in MILESTONES
        for role in variant.package.PARTS
    ],
)


class Empty:
    """Takes whatever it is given, and has no method."""

    def __init__(self, **arguments: Any) -> None: ...


def insisting(default: Any) -> Any:
    """The default part, but for one argument more."""
    if not isinstance(default, type):
        return lambda *arguments, another, **named: None

    def insist(self: Any, *arguments: Any, another: int, **named: Any) -> None: ...

    return type("Insisting", (default,), {"__init__": insist})


@each_role
def test_a_part_without_the_methods_of_its_role_is_refused(package: Any, role: str) -> None:
    with pytest.raises(ConfigError, match=rf"^parts: '{role}': Empty (has no \w+\(\)|cannot be called as)"):
        package.LLMEngine("/nowhere", parts={role: Empty})


@each_role
def test_a_part_that_needs_another_argument_is_refused(package: Any, role: str) -> None:
    with pytest.raises(ConfigError, match=f"^parts: '{role}': .* cannot be called as the default part is: .*'another'"):
        package.LLMEngine("/nowhere", parts={role: insisting(package.PARTS[role])})


@each_role
def test_what_is_no_class_is_refused(package: Any, role: str) -> None:
    for value in (None, 5, "its name"):
        with pytest.raises(ConfigError, match=f"^parts: '{role}' must be a class or a function, not {value!r}"):
            package.LLMEngine("/nowhere", parts={role: value})


@each_milestone
def test_a_role_that_does_not_exist_is_refused_with_those_that_do(variant: Variant) -> None:
    for role in ("block_manager", 5):
        with pytest.raises(ConfigError, match=f"there is no role {role!r}; the roles are .*scheduler"):
            variant.package.LLMEngine("/nowhere", parts={role: Empty})


@each_milestone
def test_the_table_is_the_one_of_the_milestone_before_with_the_roles_that_it_brings(variant: Variant) -> None:
    assert variant.package.LLMEngine.parts is variant.package.PARTS
    roles = variant.package.PARTS.keys()
    number = MILESTONES.index(variant)
    before = MILESTONES[number - 1].package.PARTS.keys() if number else set()
    assert roles - before == NEW_ROLES[variant.milestone]
    assert before - roles == ({"kv_manager"} if variant.milestone == "m4_radix_cache" else set())


NEW_ROLES: dict[str, set[str]] = {
    "m1_single_request": {
        *("wiring", "model_loader", "input_processor", "request", "detokenizer", "stop_checker"),
        *("scheduler", "model_runner", "sampler", "output_processor", "engine_core"),
    },
    "m2_continuous_batching": {"kv_manager", "worker", "executor"},
    "m3_paged_attention": {"preemption"},
    "m4_radix_cache": {
        *("req_to_token_pool", "token_to_kv_pool_allocator", "prefix_cache", "schedule_policy", "prefill_adder"),
        *("tiered_cache", "disk_cache", "host_kv_pool"),
    },
    "m5_chunked_prefill_spec": {"composer", "proposer", "speculation", "draft_runner", "rejection_sampler"},
    "m6_multimodal_pd": {"media_reader", "embedding_cache", "encoder", "encoder_budget"},
}
ONLY_IF_ASKED = {
    *("draft_runner", "rejection_sampler", "media_reader", "embedding_cache", "encoder", "encoder_budget"),
    *("tiered_cache", "disk_cache", "host_kv_pool"),
}
"""Roles that a text model without a draft model and without tiers may do without."""


def noting(default: Any, role: str, built: set[str]) -> Any:
    """The default part, which notes that it was built or called."""
    if not isinstance(default, type):

        def call(*arguments: Any, **named: Any) -> Any:
            built.add(role)
            return default(*arguments, **named)

        return call

    def init(self: Any, *arguments: Any, **named: Any) -> None:
        built.add(role)
        default.__init__(self, *arguments, **named)

    return type("Noting", (default,), {"__init__": init})


@each_milestone
def test_a_part_of_ones_own_in_every_role_is_used_by_this_engine_alone(variant: Variant, load: Any) -> None:
    defaults, built = {**variant.package.PARTS, **variant.parts()}, set[str]()
    own = {role: noting(part, role, built) for role, part in defaults.items() if role != "model_loader"}
    maker = EngineMaker(variant.package, load(variant.package, variant.part("model_loader")))
    limits = variant.limits(2, None, None)
    answers = [maker(parts, **limits).generate([5, 6, 7], greedy(4)).token_ids for parts in (variant.parts(), own)]
    assert answers[0] == answers[1]
    assert own.keys() - built <= ONLY_IF_ASKED
    built.clear()
    maker(variant.parts(), **limits)
    assert not built and importlib.import_module(f"{variant.milestone}.wiring").PARTS is variant.package.PARTS
    maker.check()


@pytest.mark.parametrize("variant", [M4_RADIX, M5_GUESSING, M6], ids=str)
@pytest.mark.parametrize("role", ["tiered_cache", "disk_cache"])
def test_a_part_of_ones_own_in_the_role_of_a_tier_is_used_if_the_configuration_names_it(
    variant: Variant, role: str, load: Any, tmp_path: Path
) -> None:
    defaults, built = {**variant.package.PARTS, **variant.parts()}, set[str]()
    tiers = {each: noting(defaults[each], each, built) for each in ("tiered_cache", "disk_cache", "host_kv_pool")}
    maker = EngineMaker(variant.package, load(variant.package, variant.part("model_loader")))
    limits = variant.limits(2, None, None)
    disk = tmp_path / "disk" if role == "disk_cache" else None
    cache = replace(limits["cache_config"], host_memory_bytes=2**20, disk_path=disk)
    engine = maker({**variant.parts(), **tiers}, **limits | {"cache_config": cache})
    assert len(engine.generate([5, 6, 7], greedy(4)).token_ids) == 4
    assert built == {role, "host_kv_pool"}
    maker.check()
