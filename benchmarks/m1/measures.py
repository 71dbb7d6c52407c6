"""m1: the same model without a cache and with one, one request, and several in a queue."""

from functools import cached_property
from random import Random
from typing import Any

import torch
from transformers import DynamicCache

from benchmarks.engines import EMBEDDED
from benchmarks.lesson import SEED, Row
from benchmarks.roofline import Forwards, under_roof
from benchmarks.timing import in_turns, interleaved, medians, ratio, seconds_of
from benchmarks.traces import phases, watched
from benchmarks.workloads import tokens
from m1_single_request import LLMEngine, SamplingParams
from m1_single_request.events import StepDone

LENGTHS = (16, 64, 256, 512, 1024, 2048)
PAIRS = ((256, 1), (16, 32), (256, 32), (1024, 32))
NUM_QUEUED = 8


class Bench:
    """An engine, its bare model, and prompts that are the same on every run."""

    def __init__(self, rounds: int) -> None:
        self.rounds, self.rng = rounds, Random(SEED)

    @cached_property
    def engine(self) -> LLMEngine:
        """Return the engine, loaded at its first use."""
        return LLMEngine()

    @property
    def model(self) -> Any:
        """Return transformers' model in the engine."""
        return self.engine.engine_core.model_runner.model

    def prompt(self, length: int) -> list[int]:
        """Draw a prompt."""
        return tokens(self.rng, length)

    @torch.inference_mode()
    def token_at(self, length: int) -> Row:
        """Measure one token behind `length` tokens: all of them computed again, or only the newest."""
        ids = torch.tensor([self.prompt(length)])
        cache = DynamicCache(config=self.model.config)
        self.model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1)
        cache.crop(-1)

        def recompute() -> float:
            return seconds_of(lambda: self.model(input_ids=ids, use_cache=False, logits_to_keep=1))

        def remember() -> float:
            newest = ids[:, -1:]
            seconds = seconds_of(lambda: self.model(input_ids=newest, cache=cache, use_cache=True, logits_to_keep=1))
            cache.crop(-1)
            return seconds

        seconds = in_turns({"recompute": recompute, "cache": remember}, rounds=self.rounds)
        return {"tokens": length, "times": ratio(*seconds.values())} | medians(seconds)

    @torch.inference_mode()
    def answer(self, prompt_len: int, output_len: int) -> Row:
        """Measure a whole answer: the loop without a cache, and the engine."""
        prompt = self.prompt(prompt_len)
        params = SamplingParams(max_tokens=output_len, ignore_eos=True)
        made: dict[str, list[int]] = {}

        def recompute() -> None:
            ids = list(prompt)
            for _ in range(output_len):
                logits = self.model(input_ids=torch.tensor([ids]), use_cache=False, logits_to_keep=1).logits
                ids.append(int(logits[0, -1].argmax()))
            made["recompute"] = ids[prompt_len:]

        def remember() -> None:
            made["cache"] = list(self.engine.generate(prompt, params).token_ids)

        sides = {"recompute": lambda: seconds_of(recompute), "cache": lambda: seconds_of(remember)}
        seconds = in_turns(sides, rounds=min(self.rounds, 3))
        row: Row = {"prompt": prompt_len, "output": output_len, "times": ratio(*seconds.values())}
        return row | medians(seconds) | {"same_tokens": float(made["recompute"] == made["cache"])}

    def first_token(self, length: int) -> Row:
        """Measure the time to the first token of a prompt of `length` tokens."""
        prompt, params = self.prompt(length), SamplingParams(max_tokens=1)
        ttft = {"only": lambda: self.engine.generate(prompt, params).metrics.time_to_first_token or 0.0}
        return {"tokens": length, "ttft": interleaved(ttft, rounds=self.rounds)["only"]}

    def next_token(self, context: int) -> Row:
        """Measure the time per output token with `context` tokens in the cache, and the bytes of that cache."""
        prompt, params = self.prompt(context), SamplingParams(max_tokens=17, ignore_eos=True)
        runner, held = self.engine.engine_core.model_runner, list[int]()

        def measure() -> float:
            with self.engine.stream(prompt, params) as outputs:
                next(outputs)
                (cache,) = runner.request_caches.values()
                held.append(sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers))
                for output in outputs:
                    last = output
            return last.metrics.time_per_output_token or 0.0

        tpot = interleaved({"only": measure}, rounds=self.rounds)["only"]
        formula = context * runner.kv_bytes_per_token
        return {"tokens": context, "tpot": tpot, "kv_formula": formula, "kv_measured": held[-1]}

    def step_phases(self, context: int) -> dict[str, float]:
        """Return the median seconds of each phase of a decode step, from the trace."""
        params = SamplingParams(max_tokens=33, ignore_eos=True)
        (steps,) = watched(self.engine, lambda: self.engine.generate(self.prompt(context), params), StepDone)
        return phases(steps[1:])

    def queue(self) -> list[Row]:
        """Measure requests that arrive together and are answered one after another: the first token of each."""
        prompts = [self.prompt(64) for _ in range(NUM_QUEUED)]
        outputs = self.engine.generate_batch(prompts, SamplingParams(max_tokens=32, ignore_eos=True), progress=False)
        rows, before = list[Row](), 0.0
        for number, output in enumerate(outputs.values(), start=1):
            ttft, latency = output.metrics.time_to_first_token or 0.0, output.metrics.latency or 0.0
            rows.append(
                {"request": number, "ttft": ttft, "waited": before, "latency": latency, "own": latency - before}
            )
            before = latency
        return rows

    def roofline(self, lengths: tuple[int, ...]) -> Row:
        """Measure prefill and decode below the roof of the machine."""
        forwards = Forwards(None, EMBEDDED)
        prefills = [(n, self.first_token(n)["ttft"]) for n in lengths]
        decodes = [(n, self.next_token(n)["tpot"]) for n in lengths]
        points = [forwards.point("prefill", n, seconds, [n], [0]) for n, seconds in prefills]
        points += [forwards.point("decode", n, seconds, [1], [n]) for n, seconds in decodes]
        return under_roof(points, "float32")
