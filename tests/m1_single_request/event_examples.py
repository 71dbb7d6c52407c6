"""An example of every event of m1, each with words that its sentences must hold."""

import dataclasses

from m1_single_request.events import Abort, Admit, Alloc, Batch, EngineStarted, Event, Free, RequestAdded, StepDone
from m1_single_request.output_events import Finish, Result, Sampled, TextHeld
from m1_single_request.trace_event import Phase

STARTED = EngineStarted(
    model="tiny", architecture="Qwen3ForCausalLM", device="cpu", dtype="float32", named_dtype="bfloat16",
    num_parameters=4_200_000, weight_bytes=16_800_000, num_layers=4, num_kv_heads=2, head_dim=64,
    kv_bytes_per_token=4096, max_model_len=512, num_positions=512,
)  # fmt: skip
SHORTENED = dataclasses.replace(STARTED, named_dtype="float16", num_positions=40_960)
PREFILL = Batch(mode="prefill", rids=("req-7",), extend_lens=(31,), prefix_lens=(0,), seq_lens=(31,))
DECODE = Batch(mode="decode", rids=("req-7",), extend_lens=(1,), prefix_lens=(33,), seq_lens=(34,))
GREEDY = Sampled(
    rid="req-7", position=4, token_id=802, text=" cat", greedy=True, settings="", uniform=None,
    candidates=((" cat", 0.625), (" dog", 0.25)),
)  # fmt: skip
DRAWN = dataclasses.replace(GREEDY, greedy=False, settings="temperature 0.7, top_k 5", uniform=0.43219)
STEP = StepDone(
    num_tokens=31, num_waiting=2, num_running=1, kv_tokens=64,
    laps=(
        Phase("schedule", 10.0025, 10.00275), Phase("execute", 10.00275, 10.00825),
        Phase("sample", 10.00825, 10.00925), Phase("update", 10.00925, 10.01),
    ),
)  # fmt: skip


def result(rid: str, out_len: int, new_text: str) -> Result:
    return Result(rid=rid, tokens=(802,), out_len=out_len, max_tokens=16, new_text=new_text)


def finish(rid: str) -> Finish:
    return Finish(rid=rid, reason="length", matched="max_tokens", why="max_tokens = 16 is reached", out_len=16)


EXAMPLES: dict[Event, list[str]] = {
    SHORTENED: ["as float32 (config.json names float16)", "A request has at most 512 tokens, of 40,960"],
    STARTED: [
        "Qwen3ForCausalLM", "tiny", "cpu", "4.2 M", "16.0 MiB", "float32", "4 layers", "2 KV heads", "64",
        "4,096 bytes", "x 4 bytes",
    ],
    RequestAdded(rid="req-7", len=31, max_tokens=16, greedy=False, seed=99, num_waiting=0): [
        "req-7", "31 prompt tokens", "16", "first in line", "99",
    ],
    RequestAdded(rid="req-8", len=1, max_tokens=16, greedy=True, seed=99, num_waiting=3): [
        "req-8", "1 prompt token,", "behind 3 others",
    ],
    Admit(rid="req-7", prefix=0, extend=31, num_waiting=0): ["req-7", "31 tokens", "no other waits"],
    Admit(rid="req-7", prefix=0, extend=31, num_waiting=2): ["req-7", "31 tokens", "2 requests must wait"],
    PREFILL: ["Prefill", "req-7", "31 prompt tokens", "0 to 30"],
    DECODE: ["Decode", "req-7", "position 33", "33 tokens"],
    Alloc(owner="req-7", tokens=31, total_tokens=31, total_bytes=126976): [
        "req-7", "+31 tokens", "31 x 4,096 bytes", "124.0 KiB",
    ],
    Free(owner="req-7", tokens=34, bytes=139264): ["req-7", "34 tokens", "136.0 KiB"],
    GREEDY: ["' cat' 62.5%", "' dog' 25.0%", "output 5", "greedy", "token 802"],
    dataclasses.replace(GREEDY, settings="presence_penalty 0.5"): ["greedy after presence_penalty 0.5"],
    DRAWN: ["' cat' 62.5%", "temperature 0.7, top_k 5", "0.4322", "token 802", "output 5"],
    result("req-7", 5, "\n cat"): ["req-7", "5 of at most 16 output tokens", r"grows by '\n cat'"],
    result("req-7", 1, ""): ["req-7", "1 of at most 16 output tokens", "does not grow"],
    TextHeld(rid="req-7", text="EN", stops=("END", "ENOUGH")): ["'EN'", "held back", "'END' or 'ENOUGH'"],
    TextHeld(rid="req-7", text="\ufffd", stops=()): ["req-7", "half a character"],
    finish("req-7"): ["req-7", "16 output tokens", "length", "max_tokens = 16"],
    Abort(rid="req-7", state="running"): ["req-7", "aborted", "running"],
    STEP: ["7.50 ms", "schedule 0.25", "model 5.50", "sample 1.00", "text 0.75"],
}  # fmt: skip
