"""An example of every event of m4, each with words that its sentences must hold."""

from dataclasses import replace

from m1_single_request.trace_event import Event
from m4_radix_cache.events import Admit, Audit, Batch, Matched, NotAdmitted, PolicyOrder, RequestOptions, Retract
from m4_radix_cache.mem_cache.disk_events import DiskFailed, DiskWriteStarted, Prefetched, PrefetchStarted
from m4_radix_cache.mem_cache.events import CacheFlushed, DuplicatesFreed, Evicted, Inserted, Locked, Released, Split
from m4_radix_cache.mem_cache.host_events import (
    Acknowledged,
    Demoted,
    HostEvicted,
    HostFlushed,
    LoadBack,
    Reattached,
    WriteStarted,
)
from m4_radix_cache.preemption_events import Preempt

MATCHED = Matched(rid="c", query_len=545, limit=544, device_hit=512, host_hit=0)
INSERTED = Inserted(
    rid="c", node=4, parent=2, extra_key=None, insert_len=48, existing=16, token_ids=tuple(range(32)), pages=(7, 9),
    priority=0, last_access_time=5, evictable=640, protected=1024,
)  # fmt: skip
SPLIT = Split(rid="c", node=4, upper=9, head=512, tail=32, lock_ref=0, last_access_time=5)
LOCKED = Locked(rid="c", node=4, delta=1, num_tokens=512, last_access_time=5, evictable=128, protected=1024)
EVICTED = Evicted(
    rids=("a", "b"), asked=20, freed=48, nodes=(5, 3), token_counts=(16, 32), strategy="lru", evictable=100,
    protected=1,
)  # fmt: skip
WRITE = WriteStarted(rids=("c",), nodes=(4, 6), num_tokens=48, num_bytes=98304, host_used=1024)
ACK = Acknowledged(
    rids=("c",), direction="write", nodes=(4,), num_tokens=32, num_bytes=65536, error=None, copy_ms=0.5,
)  # fmt: skip
DEMOTED = Demoted(rids=("a", "b"), asked=20, freed=48, nodes=(5, 3), token_counts=(16, 32), strategy="lru")
HOST_EVICTED = HostEvicted(
    rids=("a",), asked=16, freed=32, nodes=(7,), token_counts=(32,), strategy="lru", host_used=992,
)  # fmt: skip
LOAD = LoadBack(
    rid="c", nodes=(5, 3), token_counts=(16, 32), pages=(4, 8, 9), num_tokens=48, num_bytes=98304, evictable=0,
    protected=48,
)  # fmt: skip
REATTACHED = Reattached(rid="c", nodes=(5,), token_counts=(16,), pages=(4,), num_tokens=16)
PREFETCHED = Prefetched(
    rid="c", asked=768, found=512, waited_ms=3.25, failure=None, node=8, parent=2, extra_key=None,
    token_ids=tuple(range(496)), last_access_time=7,
)  # fmt: skip
AUDIT = Audit(available=1000, evictable=500, protected=400, owned=100, total=2000)
ORDER = PolicyOrder(
    policy="lpm", active="lpm", rids=("a", "b", "c"), num_held_back=1, num_retracted=1, hits=(0, 1040, 0),
)  # fmt: skip
ADMIT = Admit(
    rid="a", node=4, prefix=512, extend=32, num_waiting=1, num_output_tokens=0, need=64, rem_total=1000, cur_rem=1200,
    rem_input=2048, evictable=700, result="continue",
)  # fmt: skip
WAITS = NotAdmitted(
    rid="a", limit="memory", is_locked=False, needed=95, available=90, num_waiting=2, prefix=48, cur_rem=112,
    evictable=0,
)  # fmt: skip
PREEMPT = Preempt(
    rids=("u", "a", "b"), priorities=(20, 0, 3), threshold=10, token_counts=(70, 1), need=95, before=40, after=1200,
)  # fmt: skip
RETRACT = Retract(rid="a", num_tokens=70, num_output_tokens=9, needed=32, available=16, new_token_ratio=0.25)
BATCH = Batch(
    mode="extend", rids=("a", "b"), extend_lens=(2, 1), prefix_lens=(512, 15), seq_lens=(514, 16),
    out_slots=(32, 33, 79), left=("c",), num_running=5, budget=2048,
)  # fmt: skip

EXAMPLES: dict[Event, list[str]] = {
    PREEMPT: [
        "u of priority 20 may need 95 slots and has no room: 40 are neither taken nor reserved, or no row is free.",
        "It preempts a (priority 0, 70 tokens), b (priority 3, 1 token), because its priority is higher",
        "Then 1,200 are neither taken nor reserved.",
    ],
    MATCHED: ["c can skip 512 of its 545 tokens, whose KV is in the cache", "544 would be the most", "33 are left"],
    replace(MATCHED, device_hit=544): ["skip 544 of its 545 tokens", "1 is left to compute."],
    replace(MATCHED, device_hit=0): ["c can skip none of its 545 tokens: no prefix of it is cached."],
    replace(MATCHED, device_hit=0, limit=0): ["none of its 545 tokens: the logits of its whole prompt are needed."],
    replace(MATCHED, host_hit=16): ["in the cache, and 16 more in host memory", "17 are left"],
    INSERTED: ["c inserts 48 tokens into the cache: 16 are cached already, 32 are new, from node 2 down to node 4."],
    replace(INSERTED, existing=0, parent=0, extra_key="t"): ["under the salt 't': 48 are new, from the root down to"],
    replace(INSERTED, existing=48, pages=()): ["c inserts 48 tokens into the cache: all are cached already."],
    replace(INSERTED, rid=None): ["A request inserts 48 tokens"],
    SPLIT: [
        "Node 4 of 544 tokens is split, because c shares only its first 512: they become node 9",
        "and node 4 keeps the other 32 below it.",
    ],
    replace(SPLIT, lock_ref=2): ["both have 2 locks."],
    replace(SPLIT, rid=None): ["is split, because a request shares"],
    LOCKED: ["c adds a lock to the path to node 4: 512 tokens are protected now.", "128 tokens evictable, 1,024 prot"],
    replace(LOCKED, delta=-1, num_tokens=1): ["c removes its lock from the path to node 4: 1 token is evictable"],
    replace(LOCKED, num_tokens=0): ["c adds a lock to the path to node 4; all of it was protected already."],
    replace(LOCKED, num_tokens=0, delta=-1): ["from the path to node 4; all of it stays protected."],
    replace(LOCKED, rid=None): ["A request adds a lock"],
    EVICTED: [
        "20 slots are missing for a, b: 2 nodes with 48 tokens are evicted, chosen by lru.",
        "Cached now: 100 tokens evictable, 1 p",
    ],
    replace(EVICTED, rids=(), asked=50, freed=16, nodes=(5,), token_counts=(16,)): [
        "50 slots are to be freed: 1 node with 16 tokens is evicted, chosen by lru, all that no request has locked.",
    ],
    WRITE: ["2 nodes with 48 tokens (96.0 KiB) are copied to host memory for c, beside the steps.", "1,024 tokens"],
    replace(WRITE, rids=(), nodes=(4,)): ["Node 4 with 48 tokens (96.0 KiB) is copied to host memory, beside"],
    ACK: ["Node 4 with 32 tokens has been copied to host memory for c: 64.0 KiB in 0.50 ms, 0.1 GB/s."],
    replace(ACK, direction="load", nodes=(4, 6), copy_ms=0.0): [
        "2 nodes with 32 tokens have been copied to the device for c: 64.0 KiB in 0.00 ms.",
    ],
    replace(ACK, error="no memory"): [
        "could not be copied to host memory for c: no memory. Host memory does not have these tokens.",
    ],
    DEMOTED: [
        "20 slots are missing for a, b: 2 nodes with 48 tokens, chosen by lru, are in host memory only from now on.",
    ],
    replace(DEMOTED, nodes=(5,), token_counts=(16,), freed=16): ["node 5 with 16 tokens, chosen by lru, is in host"],
    HOST_EVICTED: [
        "Host memory lacks room for 16 tokens for a: node 7 with 32 tokens, chosen by lru, is evicted from it.",
        "Host memory holds 992 tokens now.",
    ],
    replace(HOST_EVICTED, rids=()): ["16 tokens are to leave host memory: node 7 with 32 tokens, chosen by lru, is"],
    replace(HOST_EVICTED, asked=0): [
        "Node 7 with 32 tokens is discarded with what was above, which host memory lacks. Host memory holds 992 tokens",
    ],
    HostFlushed(nodes=(), num_tokens=0): ["Host memory is flushed."],
    HostFlushed(nodes=(5, 3), num_tokens=48): [
        "Host memory is flushed: 2 nodes with 48 tokens are on the device only.",
    ],
    LOAD: ["c finds 48 tokens more in host memory: 2 nodes (96.0 KiB) are copied to the device."],
    REATTACHED: ["Node 5 with 16 tokens is on the device again: c has computed what was in host memory only."],
    replace(REATTACHED, rid=None): ["on the device again: a request has computed"],
    PrefetchStarted(rid="c", asked=768, policy="timeout"): [
        "The disk has KV of c: the pages of its next 768 tokens are read to host memory", "missing (timeout).",
    ],
    PREFETCHED: [
        "c has waited 3.2 ms for the disk: KV of 512 of 768 tokens was read to host memory, of which 496 are new "
        "there: node 8.",
    ],
    replace(PREFETCHED, found=0, node=None, parent=None, token_ids=(), failure="wrong checksum"): [
        "KV of 0 of 768 tokens was read to host memory. The page behind them cannot be used: wrong checksum.",
    ],
    DiskWriteStarted(rids=("c",), node=4, num_tokens=48): [
        "48 tokens of node 4 go to the disk for c, beside the steps; a page that is there already is not written again."
    ],
    DiskFailed(reason="no space left"): ["A page of KV could not be written to the disk: no space left."],
    CacheFlushed(evictable=512, protected=0): ["The cache is flushed: 512 tokens are discarded."],
    CacheFlushed(evictable=0, protected=0): ["The cache is flushed; it was empty."],
    CacheFlushed(evictable=1, protected=32): ["33 tokens are discarded, 32 of them locked."],
    DuplicatesFreed(rid="b", start=16, num_tokens=32): [
        "b computed its tokens 16 to 47", "its own copy, 32 slots, is freed.",
    ],
    Released(rid="b", start=48, num_tokens=3, pages=(9,)): ["b frees 1 page with its last 3 tokens", "keep: 9."],
    Released(rid="b", start=16, num_tokens=35, pages=(4, 9, 3)): ["b frees 3 pages", "keep: 4, 9, 3."],
    AUDIT: ["1,000 free + 500 evictable + 400 protected + 100 owned by requests = 2,000 slots: none is lost"],
    replace(AUDIT, owned=84): ["is not 2,000 slots: 16 slots lost."],
    replace(AUDIT, owned=101): ["is not 2,000 slots: 1 slot counted twice."],
    RequestOptions(rid="a", priority=-3, extra_key=None): ["a has priority -3."],
    RequestOptions(rid="a", priority=0, extra_key="t"): ["a shares KV only with requests under the salt 't'."],
    RequestOptions(rid="a", priority=7, extra_key="t"): ["a has priority 7 and shares KV only with"],
    ORDER: ["Order by lpm, with the tokens", "a (0), b (1,040). 1 retracted request first.", "the same prefix: c (0)."],
    replace(ORDER, active="fcfs", num_held_back=0, num_retracted=0, hits=()): ["Order by lpm, here as fcfs: a, b, c."],
    ADMIT: [
        "a joins: 32 tokens to compute, 512 more are in the cache.",
        "may need 64 slots of 1,000 (1,200 not taken yet, 700 of them only by eviction, less 200 kept",
        "could compute 2,048.",
    ],
    replace(ADMIT, prefix=0, num_output_tokens=9, result="no_token"): [
        "32 tokens to compute; 9 of all are its own output", "No other request fits into the memory.",
    ],
    replace(ADMIT, result="other"): ["No other request fits into this step."],
    WAITS: ["a must wait: it may need 95 slots, which is not less than 90 (112 not taken yet, less 22 kept"],
    replace(WAITS, is_locked=True): ["once its 48 cached tokens are locked."],
    replace(WAITS, limit="max_num_seqs", needed=5, available=4): ["this step admits 4 requests, then max_num_seqs run"],
    replace(WAITS, limit="max_num_batched_tokens", needed=31, available=32): [
        "its 31 tokens, in whole pages", "the 32",
    ],
    RETRACT: [
        "need 32 slots, 16 are free or evictable.", "It keeps its 9 output tokens",
        "its 70 tokens is freed, except what is cached", "25% of their remaining tokens",
    ],
    BATCH: [
        "Prefill of 2 requests (a, b): 3 tokens to compute, of at most 2,048, and 527 more are read from the cache.",
        "3 running requests must wait", "left: c.",
    ],
    replace(BATCH, mode="decode", left=(), extend_lens=(1, 1), num_running=2): [
        "Decode of 2 requests (a, b): 1 token each.",
    ],
}  # fmt: skip
