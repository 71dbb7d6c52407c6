"""Two recordings for the plots, taken from the trace: what steps were filled with, and where each token came from.

Nothing here is a measurement of time.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from benchmarks.m5_gaps import Traffic, serve
from benchmarks.m5_models import Engines
from benchmarks.m5_speculation import KINDS, MAX_TOKENS, prompts
from m1_single_request.output_events import Result
from m5_chunked_prefill_spec import LLMEngine, SamplingParams, SpeculativeConfig, TraceReader, TraceRecord
from m5_chunked_prefill_spec.events import Batch, Verified

BUDGET = 64
FILLED = Traffic(num_streams=8, stream_tokens=40, prompt_tokens=250, every=10)
"""Short enough to see single steps."""
Row = dict[str, Any]


class Listener(TraceReader):
    """Keeps what the plots show."""

    def __init__(self) -> None:
        self.steps: list[Row] = []
        self.tokens: list[Row] = []
        """Of everybody, in the order in which they came: `id`, and `origin`."""
        self._verified: dict[str, Verified] = {}

    def read(self, record: TraceRecord) -> None:
        """Take one record."""
        event = record.event
        if isinstance(event, Batch):
            decodes = len(event.rids) - event.num_prompts
            row = {"prompt": event.num_prompt_tokens, "decodes": decodes, "guesses": event.num_draft_tokens}
            self.steps.append(row)
        elif isinstance(event, Verified):
            self._verified[event.rid] = event
        elif isinstance(event, Result):
            self._take(event, self._verified.pop(event.rid, None))

    def close(self) -> None:
        """Nothing to write."""

    def _take(self, result: Result, verified: Verified | None) -> None:
        for place, token_id in enumerate(result.tokens):
            origin = "plain" if verified is None else verified.origin(place)
            self.tokens.append({"id": token_id, "origin": origin})


def recorded(engine: LLMEngine, run: Any) -> Listener:
    """What the trace said while `run()` ran on this engine."""
    listener = Listener()
    engine.tracer.attach(listener)
    run()
    engine.tracer.detach(listener)
    return listener


def steps(engines: Engines, *, seed: int) -> Row:
    """The same traffic under both schedules, with guesses, step by step."""
    guess = SpeculativeConfig(method="ngram", num_speculative_tokens=2)
    limits: Row = {"max_num_seqs": 16, "max_num_batched_tokens": BUDGET}
    found = {}
    for schedule in ("decode_first", "prefill_first"):
        engine = engines.m5(guess, schedule=schedule, **limits)
        tokenizer = engine.engine_core.input_processor.tokenizer
        questions = prompts(tokenizer, FILLED.num_streams, seed)["repeat"]
        once = [SamplingParams(max_tokens=1)] * len(questions)
        engine.generate_batch(questions, once, progress=False)  # so that the streams begin together
        run = partial(serve, engine, FILLED, questions, flush=False)
        found[schedule] = recorded(engine, run).steps
    return {"budget": BUDGET, "traffic": vars(FILLED) | {"num_prompts": FILLED.num_prompts}, "schedules": found}


def origins(engines: Engines, configs: Mapping[str, SpeculativeConfig], *, seed: int) -> Row:
    """One answer to a question of each kind, by every way to guess, token by token."""
    found: Row = {kind: {} for kind in KINDS}
    for method, config in configs.items():
        engine = engines.m5(config, prefix_cache="chunk")
        tokenizer = engine.engine_core.input_processor.tokenizer
        for kind, asked in prompts(tokenizer, 8, seed).items():
            prompt = next(ids for ids in asked if tokenizer.decode(ids).isascii())  # what every font can show
            params = SamplingParams(max_tokens=MAX_TOKENS)
            listener = recorded(engine, partial(engine.generate, prompt, params))
            texts = [tokenizer.decode([token["id"]]) for token in listener.tokens]
            found[kind][method] = {
                "tokens": [[text, token["origin"]] for text, token in zip(texts, listener.tokens, strict=True)],
                "steps": len(listener.steps),
            }
    return found
