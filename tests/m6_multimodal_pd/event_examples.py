"""An example of every event of m6, each with words that its sentences must hold."""

from dataclasses import replace

from m1_single_request.trace_event import Event
from m6_multimodal_pd.disaggregation.events import (
    Batch,
    ChunkReceived,
    ChunkSent,
    EngineJoined,
    EngineLost,
    EngineRefused,
    KVPollChanged,
    PathChosen,
    Reported,
    RequestRouted,
    RoomTaken,
)
from m6_multimodal_pd.events import (
    EncoderHit,
    EncoderRun,
    GraphsCaptured,
    GraphsUnavailable,
    ItemEvicted,
    ItemReceived,
    MediaAwaited,
    MediaProcessLost,
    PositionsAssigned,
)
from m6_multimodal_pd.overlap.events import NormalOrder, StepArrived, StepLaunched

CONTENT, OTHER = "3f9a61c0" + 56 * "0", "b7e215d4" + 56 * "1"
RECEIVED = ItemReceived(
    rid="a",
    index=0,
    modality="image",
    size=(640, 480),
    grid_thw=(1, 30, 40),
    num_tokens=300,
    offsets=((12, 312),),
    hash=CONTENT,
    pad_value=151_936,
)
CLIP = ItemReceived(
    rid="a",
    index=1,
    modality="video",
    size=(96, 64),
    grid_thw=(2, 4, 6),
    num_tokens=12,
    offsets=((330, 336), (342, 348)),
    hash=OTHER,
    pad_value=151_937,
)
POSITIONS = PositionsAssigned(
    rid="a",
    num_tokens=1400,
    starts=(12, 350),
    times=((12, 12), (50, 50)),
    heights=((12, 26), (50, 51)),
    widths=((12, 31), (50, 52)),
    delta=-280,
)
RUN = EncoderRun(
    rids=("a", "b"), hashes=(CONTENT, OTHER), num_tokens=312, num_patches=1248, budget=1024, milliseconds=12.34
)
HIT = EncoderHit(rid="b", hash=CONTENT, num_tokens=1300, num_read=1300)
EVICTED = ItemEvicted(rid="b", hash=CONTENT, num_tokens=300, num_bytes=230_400, used_bytes=9216)
GRAPHS = GraphsCaptured(
    model="target", decode_sizes=(1, 2, 4, 8, 12), verify_sizes=(), num_bytes=3 * 2**20, milliseconds=1234.5
)
NO_GRAPHS = GraphsUnavailable(model="draft", reason="OutOfMemoryError: CUDA out of memory")

CHANGED = KVPollChanged(
    rid="a", room=7, side="decode", old="WAITING_FOR_INPUT", new="TRANSFERRING", why="the first pages have come"
)
SENT = ChunkSent(
    rid="a", room=7, number=0, to="decode-0", first_page=3, num_pages=4, num_bytes=2**20, is_last=False, seconds=0.001
)
PATH = PathChosen(peer="decode-0", path="GPU memory", why="it can read this GPU")
CAME = ChunkReceived(rid="a", room=7, number=0, origin="prefill-0", pages=(9, 4), num_bytes=2**20, seconds=0.0005)
TAKEN = RoomTaken(rid="a", room=7, num_tokens=100, num_cached=48, num_pages=4, origin="prefill-0")
ROUTED = RequestRouted(rid="a", room=7, prefill="prefill-0", decode="decode-1", attempt=1, num_output_tokens=0)
JOINED = EngineJoined(name="decode-1", role="decode", total_tokens=131_072, page_size=16, max_model_len=4096)
REFUSED = EngineRefused(name="decode-2", role="decode", why="its page_size is 8, and that of prefill-0 is 16")
LOST = EngineLost(name="decode-1", why="its process was killed by signal 9", rids=("a", "b"))
REPORTED = Reported(
    engine="decode-1", its_step=12, what="decode", rids=("a",), text="a has 3 tokens.", facts=(("n", 3),)
)
BATCH = Batch(
    mode="prebuilt", rids=("a", "b"), extend_lens=(0, 0), prefix_lens=(9, 7), seq_lens=(9, 7), draft_lens=(0, 0),
    out_slots=(), left=("c",), num_prompts=2, chunked=None, num_running=2, budget=64,
)  # fmt: skip

NORMAL = NormalOrder(reason="the torch backend has no thread that runs all layers")
LAUNCHED = StepLaunched(num_tokens=1025, num_futures=2, behind=6, waited_for=None, is_async=True)
ARRIVED = StepArrived(is_async=True, device_ms=1.25, waited_ms=0.5)

EXAMPLES: dict[Event, list[str]] = {
    MediaAwaited(rid="a", num_items=2): ["until another process has read 2 items."],
    MediaProcessLost(what="image 0 of message 1", cause="EOFError: closed", status=-9): [
        "is lost, with image 0 of message 1: EOFError: closed (status -9)."
    ],
    MediaProcessLost(what=None, cause="it has ended", status=1): ["is lost: it has ended (status 1)."],
    CHANGED: ["Room 7 (a), decode side: waiting for input -> transferring: the first pages have come."],
    SENT: ["4 pages of a, from page 3 on, lie ready for decode-0: 1.0 MiB in 1.00 ms (1.0 GB/s); more will come."],
    replace(SENT, num_pages=1, is_last=True): ["1 page of a, from page 3 on", "the last ones."],
    PATH: ["KV between this engine and decode-0 goes through GPU memory: it can read this GPU."],
    CAME: ["2 pages of a came from prefill-0: 1.0 MiB in 0.50 ms (2.1 GB/s)."],
    TAKEN: ["room for the 100 tokens of a: 4 pages may come from prefill-0.", "48 tokens are cached here"],
    BATCH: ["No forward for a, b: another engine has computed prompt and first token. Since the last batch left: c."],
    replace(BATCH, mode="decode", num_prompts=0, extend_lens=(1, 1), left=()): ["Batch of 2 requests: a, b decode."],
    ROUTED: ["a goes to prefill-0 for its prompt, and to decode-1 for its answer."],
    replace(ROUTED, attempt=2, num_output_tokens=5): ["for its answer (attempt 2, behind 5 tokens)."],
    JOINED: ["Engine decode-1 joins, for decode", "131,072 tokens in pages of 16", "at most 4,096."],
    REFUSED: ["Engine decode-2 may not join, for decode: its page_size is 8, and that of prefill-0 is 16."],
    LOST: ["Engine decode-1 is lost: its process was killed by signal 9; it had a, b."],
    replace(LOST, rids=()): ["it had no requests."],
    REPORTED: ["On decode-1, step 12: a has 3 tokens."],
    RECEIVED: [
        "image 0, 640 x 480 pixels: 30 x 40 patches, merged to 300 tokens from place 12 on",
        "3f9a61c0",
        "151,936",
    ],
    CLIP: ["a brings video 1, 96 x 64 pixels: 2 x 4 x 6 patches, merged to 12 tokens from place 330 on"],
    replace(RECEIVED, num_tokens=1, offsets=((12, 13),)): ["merged to 1 token from"],
    POSITIONS: [
        "Positions of a: time 12, height 12 to 26, width 12 to 31; time 50, height 50 to 51, width 50 to 52.",
        "Its 1,400 tokens end at position 1,119: the answer goes on at 1,120.",
    ],
    replace(POSITIONS, times=((9, 9),) * 5, heights=((9, 10),) * 5, widths=((9, 9),) * 5): [
        "time 9, height 9 to 10, width 9; and 2 more."
    ],
    RUN: ["encodes 3f9a61c0, b7e215d4 for a, b", "1,248 patches to 312 embeddings, of at most 1,024", "12.3 ms."],
    replace(RUN, num_tokens=1): ["1 embedding,"],
    HIT: ["b finds 3f9a61c0 encoded already, and reads the 1,300 embeddings"],
    replace(HIT, num_read=1100): ["reads 1,100 of the 1,300 embeddings"],
    EVICTED: ["3f9a61c0 (300 embeddings, 225.0 KiB) are evicted for an item of b: this step", "9.0 KiB stay."],
    GRAPHS: ["graphs of the target model: decodes of up to 12 rows in 5 sizes.", "3.0 MiB", "1,234 ms."],
    replace(GRAPHS, verify_sizes=(1, 2, 3)): ["in 5 sizes, verifications of up to 3 tokens in 3 sizes. They"],
    NO_GRAPHS: ["Steps of the draft model", "without CUDA graphs: OutOfMemoryError: CUDA out of memory."],
    NORMAL: ["Steps do not overlap: the torch backend has no thread that runs all layers."],
    LAUNCHED: ["A step of 1,025 tokens (2 of them unknown", "launched before the tokens of step 6 have arrived."],
    replace(LAUNCHED, waited_for="drafts continue its tokens"): ["after its tokens have arrived: drafts continue"],
    replace(LAUNCHED, num_tokens=1, num_futures=0, behind=None, is_async=False): ["A step of 1 token is launched."],
    ARRIVED: ["the device took 1.25 ms.", "other work for 0.75 ms of that", "waited for 0.50 ms."],
}
