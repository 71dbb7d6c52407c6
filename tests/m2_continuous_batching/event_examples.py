"""An example of every event of m2, each with words that its sentences must hold."""

import dataclasses

from m1_single_request.trace_event import Event
from m2_continuous_batching.events import Admit, Batch, Forward, KVUsage, LeftOut, NotAdmitted

ADMIT = Admit(
    rid="req-7", prefix=0, extend=31, block_ids=(2,), num_running=3, max_num_seqs=16, budget_left=2000,
    max_num_batched_tokens=2048, num_waiting=4,
)  # fmt: skip
BATCH = Batch(
    mode="mixed", rids=("d", "a", "c"), extend_lens=(12, 1, 1), prefix_lens=(0, 10, 6), seq_lens=(12, 11, 7),
    joined=("d",), left=("b",), total_tokens=14, budget=2048,
)  # fmt: skip
FORWARD = Forward(
    mode="prefill", num_requests=3, num_rows=3, width=9, useful_tokens=17, padded_tokens=10, kv_read=27, kv_needed=17,
)  # fmt: skip
USAGE = KVUsage(useful_tokens=17, padded_tokens=10, kv_bytes_used=8192, kv_bytes_reserved=2**20)

EXAMPLES: dict[Event, list[str]] = {
    ADMIT: [
        "req-7 joins", "31 prompt tokens", "2,000 of this step's 2,048", "slot 2", "3 of at most 16", "4 still wait",
    ],
    dataclasses.replace(ADMIT, extend=1): ["its 1 prompt token "],
    NotAdmitted(rid="req-7", limit="max_num_seqs", needed=3, available=2, num_waiting=1): [
        "req-7 must wait:", "max_num_seqs = 2",
    ],
    NotAdmitted(
        rid="req-7", limit="max_num_batched_tokens", needed=1200, available=1100, num_waiting=2,
    ): ["req-7 must wait, and 1 other behind it", "1,200 prompt tokens", "1,100 that are left"],
    NotAdmitted(rid="req-7", limit="kv_memory", needed=40, available=0, num_waiting=4): [
        "3 others behind it", "no KV memory for its 40 tokens",
    ],
    LeftOut(rids=("a", "b"), available=2048): ["No token for a, b", "budget of 2,048"],
    BATCH: [
        "3 requests", "1 prefill of 12 tokens and 2 decodes of 1 token", "14 of at most 2,048 new tokens", "joined: d",
        "left: b",
    ],
    dataclasses.replace(
        BATCH, mode="prefill", rids=("d", "e"), extend_lens=(12, 3), prefix_lens=(0, 0), seq_lens=(12, 3),
        joined=("d", "e"), left=(), total_tokens=15,
    ): ["Batch of 2 requests: 2 prefills of 15 tokens, 15 of at most 2,048", "joined: d, e"],
    dataclasses.replace(
        BATCH, mode="decode", rids=("a",), extend_lens=(1,), prefix_lens=(10,), seq_lens=(11,), joined=(), left=(),
        total_tokens=1,
    ): ["Batch of 1 request: 1 decode of 1 token, 1 of at most 2,048 new tokens."],
    FORWARD: ["all prefills", "3 x 9", "10 of 27 places are padding", "27 positions", "17 of them needed"],
    dataclasses.replace(
        FORWARD, mode="decode", width=1, useful_tokens=3, padded_tokens=0, kv_read=30, kv_needed=20,
    ): ["all decodes", "3 x 1", "no padding", "30 positions of KV, 20 of them needed"],
    USAGE: ["17 useful tokens", "10 padded", "8.0 KiB of 1.0 MiB", "(0.8%)"],
    dataclasses.replace(USAGE, kv_bytes_used=0, kv_bytes_reserved=0): ["0 bytes of 0 bytes"],
}  # fmt: skip
