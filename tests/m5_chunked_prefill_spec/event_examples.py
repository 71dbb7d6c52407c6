"""An example of every event of m5, each with words that its sentences must hold."""

from dataclasses import replace

from m1_single_request.trace_event import Event
from m5_chunked_prefill_spec.events import Batch, ChunkCut, CostsMeasured, RolledBack, Verified

COSTS = CostsMeasured(
    given=False, num_tokens=(1, 16, 256), step_ms=(1.5, 2.0, 20.25), context_ms=0.1, decode_context_ms=0.4
)
CUT = ChunkCut(rid="a", asked=520, given=60, start=32, total=552, bound_by="max_num_batched_tokens")
BATCH = Batch(
    mode="mixed",
    rids=("a", "b", "c"),
    extend_lens=(60, 3, 1),
    prefix_lens=(32, 99, 15),
    seq_lens=(92, 102, 16),
    draft_lens=(0, 2, 0),
    out_slots=tuple(range(64)),
    left=("d",),
    num_prompts=1,
    chunked="a",
    num_running=3,
    budget=64,
)
VERIFIED = Verified(
    rid="b", method="ngram", drafted=(7, 8), accepted=1, tokens=(7, 9), texts=(" the", " cat"), own=" dog"
)

EXAMPLES: dict[Event, list[str]] = {
    COSTS: ["Costs of a step by its tokens, measured once: 1 1.50 ms, 256 20.25 ms."],
    replace(COSTS, given=True): ["as given"],
    CUT: [
        "a is cut: tokens 32 to 91 of 552 run now, 60 of the 520 that it lacks",
        "what is left of the step's budget",
        "no token yet",
    ],
    replace(CUT, bound_by="chunked_prefill_size"): ["chunked_prefill_size allows no more"],
    replace(CUT, bound_by="target_gap_ms"): ["a longer step would miss target_gap_ms"],
    replace(CUT, bound_by="memory"): ["there is no free memory for more"],
    BATCH: [
        "Batch of 3 requests: a prefills 60 tokens; b verifies 2 drafts; c decodes. New tokens: 64 of at most 64.",
        "Since the last batch left: d.",
    ],
    replace(BATCH, mode="target_verify", num_prompts=0, rids=("b",), extend_lens=(2,), draft_lens=(1,), left=()): [
        "Batch of 1 request: b verifies 1 draft. New tokens: 2 of at most 64. 2 running requests must wait for that."
    ],
    replace(BATCH, num_prompts=2, draft_lens=(0, 0, 2)): ["requests: a, b prefill 63 tokens; c verifies 2 drafts. New"],
    VERIFIED: [
        "b: n-grams drafted ' the' ' cat'. 1 of 2 drafts accepted: ' cat' is wrong, ' dog' is right. "
        "2 tokens in one step."
    ],
    replace(VERIFIED, accepted=2, tokens=(7, 8, 9)): [
        "2 of 2 drafts accepted: all are right, and ' dog' comes behind them. 3 tokens in one step."
    ],
    replace(VERIFIED, drafted=(7,), texts=(" the",), accepted=0, tokens=(9,)): [
        "0 of 1 draft accepted",
        "1 token in one",
    ],
    RolledBack(rid="b", num_tokens=1, committed=101): ["b frees the slots of 1 token; it keeps 101 with KV."],
}
