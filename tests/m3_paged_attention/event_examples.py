"""An example of every event of m3, each with words that its sentences must hold."""

import dataclasses

from m1_single_request.trace_event import Event
from m3_paged_attention.events import BackendChosen, EagerSteps, EngineStarted, KVSized, StepLimits, ThreadsChanged
from m3_paged_attention.expert_events import ExpertsLoaded, ExpertsUsed
from m3_paged_attention.kv_events import (
    BlockCopied,
    BlocksAllocated,
    BlocksForked,
    BlocksFreed,
    BlocksSwapped,
    BlocksUsed,
)
from m3_paged_attention.scheduler_events import Admit, LeftOut, NotAdmitted, ParallelSampling, Preempted

STARTED = EngineStarted(
    model="tiny", architecture="Qwen3ForCausalLM", device="cpu", dtype="float32", named_dtype="bfloat16",
    num_parameters=4_200_000, weight_bytes=8_900_000, num_layers=4, num_kv_heads=2, head_dim=64,
    kv_bytes_per_token=1088, max_model_len=512, num_positions=4096, quantization="int8", kv_dtype="int8",
)  # fmt: skip
SIZED = KVSized(
    source="kv_cache_memory_bytes", budget_bytes=512 * 2**20, total_bytes=None, gpu_memory_utilization=None,
    peak_bytes=None, block_size=16, dtype="float32", block_bytes=256 * 2**10, bytes_per_token=16 * 2**10,
    fitting_blocks=2048, num_blocks=2047, num_host_blocks=0, num_bytes=512 * 2**20, num_host_bytes=0,
    max_model_len=1024, max_num_seqs=64,
)  # fmt: skip
ADMIT = Admit(
    rid="req-7", how="prefill", source=None, prefix=0, extend=31, num_output_tokens=0, num_blocks=2, num_free=40,
    num_running=3, max_num_seqs=16, num_waiting=4,
)  # fmt: skip
WAITS = NotAdmitted(rid="req-7", limit="blocks", needed=5, available=7, kept_free=4, num_waiting=1)
PREEMPTED = Preempted(
    rid="req-7", mode="recompute", num_blocks=5, num_freed=3, needed=2, available=1, num_tokens=70, num_output_tokens=9,
)  # fmt: skip
USAGE = BlocksUsed(num_used=10, num_free=1000, num_shared=3, num_host_used=0, block_size=16, tokens_held=152)

EXAMPLES: dict[Event, list[str]] = {
    STARTED: ["8.5 MiB as float32, linear layers as int8. The KV of one token takes 1,088 bytes as int8. ", "most 512"],
    dataclasses.replace(STARTED, quantization=None): ["8.5 MiB as float32. The KV of one token takes 1,088 bytes as"],
    dataclasses.replace(STARTED, quantization=None, kv_dtype="float32", kv_bytes_per_token=4096): [
        "8.5 MiB as float32. The KV of one token takes 2 (K and V) x 4 layers", "64 x 4 bytes = 4,096 bytes",
    ],
    BackendChosen(asked="auto", backend="native", obstacle=None): ["Kernels: native, the fastest here."],
    BackendChosen(asked="torch", backend="torch", obstacle=None): ["Kernels: torch, as asked for."],
    ThreadsChanged(num_threads=1, limit=2, num_cores=2, other_cores=0.97): ["1 of 2 CPU threads", "1.0 of 2 cores"],
    BackendChosen(asked="auto", backend="torch", obstacle="no compiler"): ["torch;", "cannot run here: no compiler."],
    StepLimits(max_num_seqs=512, max_num_batched_tokens=8192, total_bytes=80 * 2**30): [
        "At most 512 requests run", "8,192 new tokens in a step, on a device of 80.0 GiB.",
    ],
    EagerSteps(reason="head_dim=24 is no multiple of 32"): [
        "operations of its layers one by one", "not all layers at once: head_dim=24 is no multiple of 32.",
    ],
    ExpertsLoaded(
        num_layers=24, num_sparse_layers=20, num_experts=48, top_k=4, expert_bytes=3 * 2**20, weight_bytes=3 * 2**30,
    ): [
        "20 of 24 layers have 48 experts of 3.0 MiB each: 2.8 GiB of the model's 3.0 GiB.",
        "A token uses 4 in each layer: it reads 240.0 MiB of them.",
    ],
    ExpertsUsed(
        layers=(0, 2), num_experts=4, loads=(3, 0, 1, 2, 0, 4, 0, 2), top_k=2, expert_bytes=3 * 2**20,
    ): [
        "3 tokens chose 2 of 4 experts in each of 2 layers: 5 of 8 were read, 15.0 MiB of 24.0 MiB.",
        "The busiest, expert 1 of layer 2, has 4 tokens; the mean is 1.5.",
    ],
    SIZED: [
        "512.0 MiB / 256.0 KiB per block = 2,048 blocks of 16 tokens", "block 0", "32,752 tokens", "32.0 requests",
        "its numbers are float32.",
    ],
    dataclasses.replace(SIZED, num_blocks=64, num_bytes=65 * 2**18, max_num_seqs=1): [
        "1 request of 64 blocks at most never fill more than 64, so no more are made",
    ],
    dataclasses.replace(
        SIZED, source="num_blocks", budget_bytes=None, num_blocks=7, fitting_blocks=8,
    ): ["num_blocks=7 of 16 tokens was asked for, 256.0 KiB each"],
    dataclasses.replace(
        SIZED, source="gpu_memory_utilization", total_bytes=80 * 2**30, gpu_memory_utilization=0.9,
        peak_bytes=20 * 2**30, budget_bytes=52 * 2**30,
    ): ["90% of 80.0 GiB, less 20.0 GiB for all else, leave 52.0 GiB"],
    dataclasses.replace(SIZED, dtype="int8"): ["numbers are int8, with a float32 scale per token and head"],
    dataclasses.replace(SIZED, num_host_blocks=100, num_host_bytes=100 * 2**18): ["100 more blocks on the host"],
    BlocksAllocated(
        owner="a", block_ids=(3, 4, 5, 9), num_tokens=50, num_owned=6, num_free=12,
    ): ["a needs room for 50 tokens", "blocks 3-5, 9", "owns 6 now", "12 are free"],
    BlocksFreed(owner="a", block_ids=(3,), num_kept=1, on_host=False, num_free=12): [
        "a frees block 3", "1 stays in use",
    ],
    BlocksFreed(owner="a", block_ids=(), num_kept=2, on_host=True, num_free=12): [
        "frees no block", "2 stay in use", "12 host blocks are free",
    ],
    BlocksForked(owner="a/1", parent="a/0", block_ids=(3, 4), num_tokens=30): [
        "a/1 shares blocks 3-4 with a/0", "30 tokens",
    ],
    BlockCopied(owner="a/1", source=4, target=9, num_holders=1, num_free=3): [
        "a/1 is about to write into block 4", "1 other holds", "gets a copy, block 9",
    ],
    BlocksSwapped(
        owner="a", direction="out", block_ids=(1, 2), host_block_ids=(0, 7), num_free=3, num_host_free=1,
    ): ["a is swapped out: blocks 1-2 to host blocks 0, 7"],
    BlocksSwapped(
        owner="a", direction="in", block_ids=(5, 2), host_block_ids=(0, 7), num_free=3, num_host_free=1,
    ): ["a is swapped in: host blocks 0, 7 to blocks 5, 2"],
    USAGE: ["10 of 1,010 blocks in use", "3 of them shared", "152 tokens in 160 slots", "95.0% used, 5.0% reserved"],
    dataclasses.replace(USAGE, num_used=0, num_shared=0, tokens_held=0, num_host_used=2): ["2 blocks on the host"],
    ParallelSampling(rid="a", children=("a/0", "a/1"), seeds=(7, 8)): ["a asks for 2", "a/0, a/1", "7, 8"],
    ADMIT: ["req-7 joins: 31 tokens to compute", "takes 2 free blocks, 40 are left", "3 of at most 16", "4 still wait"],
    dataclasses.replace(ADMIT, num_output_tokens=9): ["9 of them its own output from before it was preempted"],
    dataclasses.replace(ADMIT, how="fork", source="req-7/0", extend=1, num_blocks=1): [
        "req-7 joins on the blocks of req-7/0", "1 free block,",
    ],
    dataclasses.replace(ADMIT, how="fork", source="req-7/0", extend=0, num_blocks=0): [
        "it starts when that prompt is computed",
    ],
    dataclasses.replace(ADMIT, how="swap_in", extend=1, prefix=40): [
        "comes back from host memory with the KV of 40 tokens",
    ],
    WAITS: ["req-7 must wait:", "5 blocks of 7 free ones", "4 must stay free"],
    dataclasses.replace(WAITS, limit="max_num_seqs", needed=3, available=2, num_waiting=4): [
        "req-7 must wait, and 3 others behind it", "max_num_seqs = 2",
    ],
    dataclasses.replace(
        WAITS, limit="max_num_batched_tokens", needed=1200, available=1100, num_waiting=2,
    ): ["1 other behind it", "1,200 tokens", "1,100"],
    LeftOut(rids=("a", "b"), limit="max_num_batched_tokens", available=64): [
        "No token for a, b: the budget of 64 is used up",
    ],
    LeftOut(rids=("a",), limit="blocks", available=0): ["too few blocks are free (0) until the requests that end"],
    PREEMPTED: ["2 new blocks", "1 is free", "frees 3 of its 5 blocks", "70 tokens is dropped", "before new requests"],
    dataclasses.replace(PREEMPTED, mode="swap"): ["70 tokens moves to host memory"],
}  # fmt: skip
