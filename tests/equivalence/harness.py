"""Holds every milestone to the same tokens: the list of variants, the reference, and the one comparison.

"The same" means identical up to the first position where the reference's two best logits are closer than 1e-4, in
float32 on the CPU: there two correct programs may add in another order and choose differently, and everything behind it
differs too. Such a cut hides what lies behind it, so a suite in which more than 2 % of the prompts are cut fails.

A new milestone joins by adding its variants to `VARIANTS`: one for each way of running that must not change a token.
"""

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from tests.support.engines import bounded

ENOUGH_TOKENS = 4096  # for all prompts and answers at once
LEAST_TOKENS = 440  # for the longest of them alone
NEAR_TIE = 1e-4
MAX_CUT_SHARE = 0.02
MANY_STEPS = 10_000

Prompt = str | list[int]
ITSELF = object()  # in a configuration: the directory of the model that is asked


# --- what is held to it -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)  # so it has a hash, by which pytest sees that tests want the same engine
class Variant:
    """A milestone in one configuration."""

    milestone: str
    name: str = ""
    """What sets it apart from the milestone's other variants."""
    configs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Keywords of its engine with the fields of their configuration: `{"scheduler_config": {"max_num_seqs": 16}}`."""
    parts: Callable[[], Mapping[str, Any]] = dict
    """Parts of its own, by role; asked for when the engine is made."""
    backend: str | None = None
    """Which kernels, where a milestone has several: named, because `auto` chooses by what a machine has."""
    preempts: bool = False
    """Whether it throws running requests out, so that a test can see that it did."""
    evicts: bool = False
    """Whether its memory is so small that what was cached has to go, likewise."""
    draws_alike: bool = True
    """Whether drawn answers are the same tokens, too. Guesses that are drawn keep the distribution only."""
    shares: bool = False
    """Whether what is asked again starts from what was computed then, so that a test can see that it does."""
    models: Sequence[str] | None = None
    """The models that it is asked with. None: all; one is enough where only decisions differ."""
    ways: Mapping[str, int] = field(
        default_factory=lambda: {"generate": 4, "generate_batch": 1, "stream": 2, "step": 2}
    )
    """The ways (see `WAYS`) in which it is asked, each with its share of the prompts: 1 for all, 2 for every second."""

    def __str__(self) -> str:
        return f"{self.milestone}-{self.name}" if self.name else self.milestone

    @property
    def package(self) -> Any:
        return importlib.import_module(self.milestone)

    def obstacle(self) -> str | None:
        """Why it cannot run here, or None. C++ kernels need a compiler."""
        if self.backend != "native":
            return None
        return importlib.import_module("m3_paged_attention.attention.native_library").obstacle()

    def num_preemptions(self, engine: Any) -> int:
        """How often its engine threw a request out, which each milestone calls by its own name."""
        stats = engine.stats()
        return int(getattr(stats, "num_preemptions" if self.milestone < "m4" else "num_retractions", 0))

    def num_evicted_tokens(self, engine: Any) -> int:
        """How many cached tokens had to go."""
        return int(getattr(engine.stats(), "num_evicted_tokens", 0))

    def make_engine(self, directory: Path, device: str = "cpu") -> Any:
        """Its engine as the rule wants it: float32, on the CPU unless a test asks another device."""
        named = {keyword: _naming(values, directory) for keyword, values in self.configs.items()}
        configs = {keyword: self._config_class(keyword)(**values) for keyword, values in named.items()}
        kernels = {"attention_backend": self.backend} if self.backend else {}
        model_config = self.package.ModelConfig(model=directory, device=device, dtype="float32", **kernels)
        return bounded(self.package.LLMEngine(model_config=model_config, parts=self.parts(), **configs))

    def _config_class(self, keyword: str) -> Any:
        """The class behind an engine's keyword: `scheduler_config` is a `SchedulerConfig`."""
        return getattr(self.package, "".join(word.capitalize() for word in keyword.split("_")))


def _naming(values: Mapping[str, Any], directory: Path) -> Mapping[str, Any]:
    """These fields, with the model's own directory where it is meant."""
    return {name: directory if value is ITSELF else value for name, value in values.items()}


def _m2(execution: str, **settings: Any) -> Variant:
    config = {"execution": execution, "max_num_seqs": 16}
    return Variant("m2_continuous_batching", execution, {"scheduler_config": config}, **settings)


def _m3(
    name: str,
    *,
    backend: str = "torch",
    cache: Mapping[str, Any] | None = None,
    preempted: str | None = None,
    **settings: Any,
) -> Variant:
    """Blocks of 16 tokens, unless `cache` changes that; `preempted`: a request loses its place in every third step."""
    scheduler: dict[str, Any] = {"max_num_seqs": 16}
    if preempted is not None:
        scheduler["preemption_mode"] = preempted
        settings |= {"parts": forced("ForcedPreemption", "forced_preemption"), "preempts": True}
    cache = dict(cache or {})
    cache["num_blocks"] = ENOUGH_TOKENS // cache.get("block_size", 16)  # the default are 512 MiB, of which each is set
    configs = {"cache_config": cache, "scheduler_config": scheduler}
    return Variant("m3_paged_attention", name, configs, backend=backend, **settings)


def _m4(
    name: str,
    *,
    backend: str = "torch",
    policy: str = "lpm",
    cache: Mapping[str, Any] | None = None,
    retracted: bool = False,
    **settings: Any,
) -> Variant:
    """A tree of pages of 16 tokens, unless `cache` changes that; `retracted`: a request is, every three steps."""
    cache = {"max_total_tokens": ENOUGH_TOKENS} | dict(cache or {})
    scheduler = {"max_num_seqs": 16, "schedule_policy": policy}
    if retracted:
        settings |= {"parts": forced("ForcedRetraction"), "preempts": True}
    evicts = cache["max_total_tokens"] < ENOUGH_TOKENS
    shares = cache.get("prefix_cache") != "chunk" and not evicts
    configs = {"cache_config": cache, "scheduler_config": scheduler}
    return Variant("m4_radix_cache", name, configs, backend=backend, evicts=evicts, shares=shares, **settings)


def forced(scheduler: str, module: str = "forced_retraction") -> Callable[[], Mapping[str, Any]]:
    """Parts with a scheduler that takes a request's place every three steps, need it or not."""
    return lambda: {"scheduler": getattr(importlib.import_module(f"tests.equivalence.{module}"), scheduler)}


def _m5(
    name: str,
    *,
    backend: str = "torch",
    cache: Mapping[str, Any] | None = None,
    scheduler: Mapping[str, Any] | None = None,
    guesses: Mapping[str, Any] | None = None,
    retracted: bool = False,
    parts: Callable[[], Mapping[str, Any]] = dict,
    milestone: str = "m5_chunked_prefill_spec",
    **settings: Any,
) -> Variant:
    """Pages of 16 tokens and steps of 64, unless changed. The draft model is the target itself unless named:
    then all its guesses are right, and what is tested is that as many tokens come at once."""
    cache = {"max_total_tokens": ENOUGH_TOKENS} | dict(cache or {})
    configs = {
        "cache_config": cache,
        "scheduler_config": {"max_num_seqs": 16, "max_num_batched_tokens": 64} | dict(scheduler or {}),
        "speculative_config": dict(guesses or {}),
    }
    if retracted:
        settings |= {"preempts": True}
        parts = forced("ForcedRetractionInPieces")
    settings |= {"shares": cache.get("prefix_cache") != "chunk", "draws_alike": "draft" not in str(guesses)}
    return Variant(milestone, name, configs, backend=backend, parts=parts, **settings)


def _m6(name: str, **settings: Any) -> Variant:
    """m5's, in the engine that also sees: these models do not."""
    return _m5(name, milestone="m6_multimodal_pd", **settings)


def random_guesses() -> Mapping[str, Any]:
    """A proposer of random tokens."""
    return {"proposer": importlib.import_module("tests.m5_chunked_prefill_spec.engines").Guessing}


OVERLAP = {"enable_overlap": True}
ON_ONE_MODEL: dict[str, Any] = {"models": ("qwen3",), "ways": {"generate_batch": 1, "step": 2}}

VARIANTS = [
    Variant("m1_single_request", ways={"generate": 1, "generate_batch": 2, "stream": 2, "step": 2}),
    _m2("padded"),
    # Each row runs through m1's own runner, which the first variant has put to the test: only the batch is new.
    _m2("per_request", ways={"generate_batch": 2}),
    _m3("block-16", ways={"generate": 4, "generate_batch": 1, "stream": 2, "step": 2}),
    _m3("block-1", cache={"block_size": 1}, ways={"generate_batch": 2}),
    _m3("block-4", cache={"block_size": 4}, ways={"step": 2}),
    _m3("block-128", cache={"block_size": 128}, ways={"generate_batch": 2}),
    _m3("recompute", preempted="recompute", ways={"generate": 4, "generate_batch": 1, "step": 2}),
    _m3("swap", preempted="swap", cache={"block_size": 4}, ways={"generate": 4, "generate_batch": 1, "step": 2}),
    _m3("native", backend="native", ways={"generate": 4, "generate_batch": 1}),
    _m3(
        "native-block-1",
        backend="native",
        cache={"block_size": 1},
        preempted="recompute",
        ways={"generate_batch": 2, "step": 2},
    ),
    _m3("native-swap", backend="native", preempted="swap", ways={"generate_batch": 2}),
    # m4's model and kernels are m3's: what is new are decisions, which look the same on every model.
    _m4("radix-16", ways={"generate": 4, "generate_batch": 1, "stream": 4, "step": 2}),
    _m4("radix-1-fcfs", policy="fcfs", cache={"page_size": 1}, **ON_ONE_MODEL),
    _m4("radix-4-dfs-weight", policy="dfs-weight", cache={"page_size": 4}, **ON_ONE_MODEL),
    _m4("radix-4-lof", policy="lof", cache={"page_size": 4, "eviction_policy": "slru"}, **ON_ONE_MODEL),
    _m4("radix-1-random", policy="random", cache={"page_size": 1, "eviction_policy": "fifo"}, **ON_ONE_MODEL),
    _m4("radix-4-priority", policy="priority", cache={"page_size": 4, "eviction_policy": "lfu"}, **ON_ONE_MODEL),
    _m4("hash-4", cache={"page_size": 4, "prefix_cache": "hash"}, **ON_ONE_MODEL),
    _m4("chunk", cache={"page_size": 4, "prefix_cache": "chunk"}, **ON_ONE_MODEL),
    _m4("retracted", cache={"page_size": 4}, retracted=True, **ON_ONE_MODEL),
    _m4("evicting", cache={"page_size": 4, "max_total_tokens": LEAST_TOKENS}, **ON_ONE_MODEL),
    _m4("native", backend="native", ways={"generate_batch": 2, "step": 4}),
    _m4("native-1", backend="native", cache={"page_size": 1}, retracted=True, **ON_ONE_MODEL),
    # m5 shares steps: pieces of every size beside decodes and guesses.
    _m5("pieces-64", ways={"generate": 4, "generate_batch": 1, "stream": 4, "step": 2}),
    _m5("pieces-16-1", cache={"page_size": 1}, scheduler={"max_num_batched_tokens": 16}, **ON_ONE_MODEL),
    _m5("pieces-23-4", cache={"page_size": 4}, scheduler={"max_num_batched_tokens": 23}, **ON_ONE_MODEL),
    _m5("whole", scheduler={"max_num_batched_tokens": 2048, "enable_chunked_prefill": False}, **ON_ONE_MODEL),
    _m5("prefill-first", scheduler={"schedule": "prefill_first", "chunked_prefill_size": 16}, **ON_ONE_MODEL),
    _m5("ngram", guesses={"method": "ngram", "prompt_lookup_min": 1}, ways={"generate_batch": 1, "stream": 4}),
    _m5("random-guesses-1", cache={"page_size": 1}, guesses={"method": "ngram"}, parts=random_guesses, **ON_ONE_MODEL),
    _m5("draft", guesses={"method": "draft_model", "model": ITSELF}, ways={"generate_batch": 2, "step": 4}),
    _m5("draft-1", cache={"page_size": 1}, guesses={"method": "draft_model", "model": ITSELF}, **ON_ONE_MODEL),
    _m5("retracted", cache={"page_size": 4}, guesses={"method": "ngram"}, retracted=True, **ON_ONE_MODEL),
    _m5("chunk", cache={"page_size": 4, "prefix_cache": "chunk"}, guesses={"method": "ngram"}, **ON_ONE_MODEL),
    _m5("native", backend="native", guesses={"method": "draft_model", "model": ITSELF}, ways={"generate_batch": 2}),
    # m6 runs models without eyes as m5 does: another loader, runner and intake, the same decisions.
    _m6("pieces-64", ways={"generate": 4, "generate_batch": 1, "stream": 4}),
    _m6("pieces-16-1", cache={"page_size": 1}, scheduler={"max_num_batched_tokens": 16}, **ON_ONE_MODEL),
    _m6("ngram", guesses={"method": "ngram", "prompt_lookup_min": 1}, ways={"generate_batch": 2}),
    _m6("draft", guesses={"method": "draft_model", "model": ITSELF}, **ON_ONE_MODEL),
    _m6("retracted", cache={"page_size": 4}, guesses={"method": "ngram"}, retracted=True, **ON_ONE_MODEL),
    _m6("chunk", cache={"page_size": 4, "prefix_cache": "chunk"}, **ON_ONE_MODEL),
    _m6("native", backend="native", ways={"generate_batch": 2}),
    _m6(
        "overlap",
        backend="native",
        scheduler=OVERLAP,
        ways={"generate": 4, "generate_batch": 1, "stream": 4, "step": 2},
    ),
    _m6(
        "overlap-16-1",
        backend="native",
        cache={"page_size": 1},
        scheduler=OVERLAP | {"max_num_batched_tokens": 16},
        **ON_ONE_MODEL,
    ),
    _m6(
        "overlap-prefill-first",
        backend="native",
        scheduler=OVERLAP | {"schedule": "prefill_first", "chunked_prefill_size": 16},
        **ON_ONE_MODEL,
    ),
    _m6(
        "overlap-retracted", backend="native", cache={"page_size": 4}, scheduler=OVERLAP, retracted=True, **ON_ONE_MODEL
    ),
    _m6(
        "overlap-draft",
        backend="native",
        scheduler=OVERLAP,
        guesses={"method": "draft_model", "model": ITSELF},
        ways={"generate_batch": 2, "step": 4},
    ),
    _m6(
        "overlap-chunk",
        backend="native",
        cache={"page_size": 4, "prefix_cache": "chunk"},
        scheduler=OVERLAP,
        **ON_ONE_MODEL,
    ),
]


# --- the reference ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reference:
    """What transformers answered to one prompt."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    gaps: tuple[float, ...]
    """Per output position: the best logit less the second best."""

    @property
    def cut(self) -> int | None:
        """The first position that is too close to call, if there is one."""
        return next((i for i, gap in enumerate(self.gaps) if gap < NEAR_TIE), None)


class ReferenceModel:
    """A checkpoint in the hands of transformers alone."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory)
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.eos_token_ids = self._eos_token_ids()

    def token_ids(self, prompt: Prompt) -> list[int]:
        """A prompt as token ids."""
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt

    def decode(self, token_ids: Sequence[int]) -> str:
        """Token ids as the text that an engine shows."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def answer(self, prompt: Prompt, max_tokens: int) -> Reference:
        """Greedy generation."""
        ids = torch.tensor([self.token_ids(prompt)])
        result = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=self.eos_token_ids,
            pad_token_id=self.eos_token_ids[0],
            output_logits=True,
            return_dict_in_generate=True,
        )
        logits = torch.cat(result.logits)  # [output tokens, vocab]
        best = logits.topk(2, dim=-1).values
        return Reference(
            prompt_token_ids=tuple(ids[0].tolist()),
            token_ids=tuple(result.sequences[0, ids.shape[1] :].tolist()),
            gaps=tuple((best[:, 0] - best[:, 1]).tolist()),
        )

    @torch.inference_mode()
    def logprobs(self, token_ids: Sequence[int]) -> torch.Tensor:
        """log_softmax of the logits after each token: `[tokens, vocab]`, without any cache."""
        return self.model(torch.tensor([list(token_ids)]), use_cache=False).logits[0].log_softmax(dim=-1)

    def _eos_token_ids(self) -> list[int]:
        sources = (self.model.config, self.model.generation_config, self.tokenizer)
        ids: set[int] = set()
        for value in (source.eos_token_id for source in sources):
            ids.update(value if isinstance(value, list) else [] if value is None else [value])
        return sorted(ids)


# --- the comparison ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """What a comparison that passed has seen."""

    num_prompts: int
    num_cut: int


def compare(references: Sequence[Reference], answers: Iterable[Sequence[int]]) -> Comparison:
    """Raise `AssertionError` unless every answer is its reference's, and few enough of them had to be cut."""
    for number, (reference, answer) in enumerate(zip(references, answers, strict=True)):
        check_answer(reference, answer, f"prompt {number}")
    return check_cuts(references)


def check_answer(reference: Reference, answer: Sequence[int], name: str) -> None:
    """Raise `AssertionError` unless `answer` is the reference's, as far as that is clear."""
    wanted, given = reference.token_ids[: reference.cut], tuple(answer)
    given = given if reference.cut is None else given[: reference.cut]
    if wanted != given:
        at = next((i for i, (w, g) in enumerate(zip(wanted, given, strict=False)) if w != g), None)
        at = min(len(wanted), len(given)) if at is None else at
        gap = f", where the two best logits are {reference.gaps[at]:.4g} apart" if at < len(reference.gaps) else ""
        raise AssertionError(f"{name} differs at output {at}{gap}:\nwanted {wanted}\n   got {given}")


def check_cuts(references: Sequence[Reference]) -> Comparison:
    """Raise `AssertionError` if too many of the references are not clear up to their end."""
    num_cut = sum(reference.cut is not None for reference in references)
    if num_cut > MAX_CUT_SHARE * len(references):
        raise AssertionError(
            f"{num_cut} of {len(references)} prompts were cut at two logits closer than {NEAR_TIE}: more than "
            f"{MAX_CUT_SHARE:.0%}. Use a model with clearer gaps."
        )
    return Comparison(len(references), num_cut)


# --- the ways to ask an engine ----------------------------------------------------------------------------------------


def by_generate(engine: Any, prompts: Sequence[Prompt], params: Any) -> list[Any]:
    """One after the other."""
    return [engine.generate(prompt, params) for prompt in prompts]


def by_generate_batch(engine: Any, prompts: Sequence[Prompt], params: Any) -> list[Any]:
    """All at once."""
    return list(engine.generate_batch(prompts, params).values())


def by_streams(engine: Any, prompts: Sequence[Prompt], params: Any) -> list[Any]:
    """Streams side by side, each read a little in turn; the text of a stream must only ever grow."""
    streams = {number: engine.stream(prompt, params) for number, prompt in enumerate(prompts)}
    last: dict[int, Any] = {}
    while streams:
        for number, stream in list(streams.items()):
            output = next(stream)
            if before := last.get(number):
                assert output.token_ids[: len(before.token_ids)] == before.token_ids
                assert output.text.startswith(before.text)
            last[number] = output
            if output.finished:
                assert next(stream, None) is None
                del streams[number]
    return [last[number] for number in range(len(prompts))]


def by_steps(engine: Any, prompts: Sequence[Prompt], params: Any) -> list[Any]:
    """`step()` by `step()`; a new request arrives at every third one, the last ones first."""
    coming = list(enumerate(prompts))
    ids: dict[str, int] = {}
    done: dict[int, Any] = {}
    for _ in range(MANY_STEPS):
        if not coming and not engine.has_unfinished_requests():
            break
        if coming:
            number, prompt = coming.pop()
            ids[engine.add_request(prompt, params)] = number
        for _ in range(3 if coming else 1):
            done |= {ids[rid]: output for rid, output in engine.step().items() if output.finished}
    assert len(done) == len(prompts), f"{len(done)} of {len(prompts)} prompts are answered after {MANY_STEPS} steps"
    return [done[number] for number in range(len(prompts))]


WAYS: dict[str, Callable[[Any, Sequence[Prompt], Any], list[Any]]] = {
    "generate": by_generate,
    "generate_batch": by_generate_batch,
    "stream": by_streams,
    "step": by_steps,
}
