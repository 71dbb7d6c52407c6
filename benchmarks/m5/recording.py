"""Two recordings for the plots, taken from the trace: the tokens in every step, and the origin of every token.

They measure no time.
"""

from typing import Any

from benchmarks.engines import Engines
from benchmarks.m5.speculation import METHODS, requests
from benchmarks.serving import encoded, request_params, serve
from benchmarks.streams import Row, Traffic
from benchmarks.texts import KINDS
from benchmarks.traces import watched
from benchmarks.workloads import Request, Workload
from m5_chunked_prefill_spec.events import Batch
from m5_chunked_prefill_spec.views.token_origins import TokenOrigins

BUDGET = 64
FILLED = Traffic(num_streams=8, stream_tokens=40, prompt_tokens=250, every=10)
"""Short enough to show single steps."""
ORIGINS = {"ngram": "ngram, k = 4", "draft_model": "draft_model, k = 4"}


def steps(engines: Engines) -> Row:
    """Record the same traffic under both schedules, with guesses, step by step."""
    guess = {"method": "ngram", "num_speculative_tokens": 2}
    limits = {"max_num_seqs": 16, "max_num_batched_tokens": BUDGET}
    found = {}
    for schedule in ("decode_first", "prefill_first"):
        engine = engines("m5", scheduler=limits | {"schedule": schedule}, speculative=guess)
        questions = [encoded(engine, request.prompt) for request in requests(FILLED.num_streams)["repeat"]]
        serve(engine, Workload([Request(prompt, 1) for prompt in questions]))  # so that the streams begin together
        work = FILLED.workload()
        streams = [Request(prompt, FILLED.stream_tokens) for prompt in questions]
        beside = Workload([*streams, *work.requests[FILLED.num_streams :]], "tokens")
        (batches,) = watched(engine, lambda engine=engine, work=beside: serve(engine, work, flush=False), Batch)
        found[schedule] = [
            {
                "prompt": batch.num_prompt_tokens,
                "decodes": len(batch.rids) - batch.num_prompts,
                "guesses": batch.num_draft_tokens,
            }
            for batch in batches
        ]
    return {"budget": BUDGET, "traffic": FILLED.describe(), "schedules": found}


def origins(engines: Engines) -> Row:
    """Record one answer to a question of each kind, by every method, token by token."""
    found: Row = {kind: {} for kind in KINDS}
    for method, config in ORIGINS.items():
        engine = engines("m5", cache={"prefix_cache": "chunk"}, speculative=METHODS[config])
        tokenizer = engine.engine_core.input_processor.tokenizer
        for kind, asked in requests(8).items():
            request = next(r for r in asked if r.prompt[0]["content"].isascii())  # characters that every font has
            found[kind][method] = answer_of(engine, request, tokenizer)
    return found


def answer_of(engine: Any, request: Request, tokenizer: Any) -> Row:
    """Return the texts and origins of an answer's tokens, and the number of its steps."""
    prompt, params, origins = encoded(engine, request.prompt), request_params(engine, request), TokenOrigins()
    engine.tracer.attach(origins)
    (steps,) = watched(engine, lambda: engine.generate(prompt, params), Batch)
    engine.tracer.detach(origins)
    (found,) = origins.tokens.values()
    tokens = [[tokenizer.decode([token_id]), "plain" if origin == "own" else origin] for token_id, origin in found]
    return {"tokens": tokens, "steps": len(steps)}
