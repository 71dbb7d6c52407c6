"""An example of every event of m8, each with words that its sentences must hold."""

from m1_single_request.trace_event import Event
from m8_parallel.events import Collectives, RanksJoined

EXAMPLES: dict[Event, list[str]] = {
    RanksJoined(
        rank=1,
        size=4,
        num_heads=4,
        num_kv_heads=1,
        num_experts=None,
        first_token=1024,
        num_tokens=1024,
        weight_bytes=3 * 2**20,
    ): ["Rank 1 of 4", "4 heads", "1 KV head", "1,024 tokens of the vocabulary from 1,024 on", "3.0 MiB"],
    RanksJoined(
        rank=0, size=2, num_heads=8, num_kv_heads=2, num_experts=16, first_token=0, num_tokens=9, weight_bytes=2**30
    ): ["16 experts", "1.0 GiB"],
    Collectives(
        rank=0,
        kinds=("broadcast", "all-reduce", "all-reduce", "gather"),
        sizes=(1024, 2048, 2048, 512),
        began=(1.0, 1.1, 1.2, 1.3),
        seconds=(0.001, 0.002, 0.0005, 0.0001),
    ): ["Rank 0", "1 broadcast of 1.0 KiB in 1.0 ms", "2 all-reduces of 4.0 KiB in 2.5 ms", "1 gather of 512 bytes"],
}
