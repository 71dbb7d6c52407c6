"""The tables of milestone 4, made from the numbers that `benchmarks.m4_radix_cache` has measured."""

from typing import Any

from benchmarks import describe, markdown_table
from benchmarks.m3_tables import Promise

Row = dict[str, Any]

PROMISES: tuple[Promise, ...] = (
    ("cache alone: times the tree that is walked", "control_plane.times_walked", 3.0, None, False),
    ("cache alone: tokens/s", "control_plane.sides.candidates kept.tokens_per_second", 0.0, 12e6, False),
    ("0.6B: mean TTFT, times without sharing", "reuse_0_6b.ttft_times_none", 4.0, None, False),
    ("0.6B: total, times without sharing", "reuse_0_6b.total_times_none", 2.8, None, False),
    ("embedded: mean TTFT, times without sharing", "reuse_embedded.ttft_times_none", 4.0, None, False),
    ("embedded: total, times without sharing", "reuse_embedded.total_times_none", 1.8, None, False),
    ("schedule + update, 256 sequences: us per sequence", "scheduling.sides.m4.schedule_and_update_us", 2.0, 1.0, True),
)


def tables(results: Row) -> str:
    """What the page includes, piece by piece, each between two marks by which the page names it."""
    parts = results["parts"]
    pieces = {
        "reuse_0_6b": _reuse(parts["reuse_0_6b"]),
        "reuse_embedded": _reuse(parts["reuse_embedded"]),
        "control_plane": _control_plane(parts["control_plane"]),
        "eviction": _eviction(parts["eviction"], "all"),
        "eviction_paying": _eviction(parts["eviction"], "paying"),
        "trace_of_tenants": _trace(parts["eviction"]["trace"]),
        "designs": _designs(parts["designs"]),
        "decode_gaps": _decode_gaps(parts["decode_gaps"]),
        "decode_gaps_longest": _longest_gaps(parts["decode_gaps"]),
        "scheduling": _scheduling(parts["scheduling"]),
        "environment": _environment(results),
    }
    return "\n".join(
        f"<!-- --8<-- [start:{name}] -->\n{text}\n<!-- --8<-- [end:{name}] -->\n" for name, text in pieces.items()
    )


def _reuse(part: Row) -> str:
    none = part["sides"]["m4, no sharing"]
    return markdown_table(
        part["sides"].items(),
        {
            "side": lambda item: item[0],
            "prompt tokens computed": lambda item: f"{item[1]['computed']:,}",
            "found": lambda item: f"{item[1]['cached']:,}",
            "mean TTFT": lambda item: f"{item[1]['mean_ttft']:,.3f} s",
            "times without sharing": lambda item: f"{none['mean_ttft'] / item[1]['mean_ttft']:.2f}",
            "all requests": lambda item: f"{item[1]['seconds']:,.2f} s",
            "times without": lambda item: f"{none['seconds'] / item[1]['seconds']:.2f}",
            "same answers": lambda item: f"{part['same_answers'][item[0]]} of {part['num_requests']}",
        },
    )


def _control_plane(part: Row) -> str:
    walked = part["sides"]["whole tree walked"]["tokens_per_second"]
    return markdown_table(
        part["sides"].items(),
        {
            f"eviction, {part['nodes']:,} nodes": lambda item: item[0],
            "million tokens/s": lambda item: f"{item[1]['tokens_per_second'] / 1e6:.2f}",
            "per sequence": lambda item: f"{item[1]['us_per_sequence']:.0f} us",
            "times the walk": lambda item: f"{item[1]['tokens_per_second'] / walked:.2f}",
        },
    )


def _eviction(part: Row, who: str) -> str:
    rows = {f"tree, {name}": rates[who] for name, rates in part["strategies"].items()}
    rows["hashes, lru"] = part["hashes"][who]
    ceiling = part["ceiling" if who == "all" else f"ceiling_{who}"]
    columns: Row = {f"found, of at most {ceiling:.1%}": lambda item: item[0]}
    for index, size in enumerate(part["capacities"]):
        columns[f"{size // 1024}k"] = lambda item, index=index: f"{item[1][index]:.1%}"
    return markdown_table(rows.items(), columns)


def _trace(trace: Row) -> str:
    return (
        f"*{trace['requests']:,} requests in {trace['chats'] - trace['documents']:,} chats of 24 tenants, "
        f"{trace['documents']:,} of them documents; {trace['prompt_tokens']:,} prompt tokens, "
        f"{trace['unique_tokens']:,} tokens without those that were there before. Recorded in `{trace['file']}`.*"
    )


def _designs(part: Row) -> str:
    return markdown_table(
        part["sides"].items(),
        {
            f"{part['capacity'] // 1024}k tokens": lambda item: item[0],
            "found": lambda item: f"{item[1]['hit_rate']:.1%}",
            "match": lambda item: f"{item[1]['us_per_request']['match']:,.0f} us",
            "insert": lambda item: f"{item[1]['us_per_request']['insert']:,.0f} us",
            "evict": lambda item: f"{item[1]['us_per_request']['evict']:,.0f} us",
            "lock": lambda item: f"{item[1]['us_per_request']['lock']:,.0f} us",
            "entries": lambda item: f"{item[1]['entries']:,}",
            "bytes per cached token": lambda item: f"{item[1]['bytes_per_token']:.1f}",
        },
    )


def _decode_gaps(part: Row) -> str:
    rows = [(name, side, row) for name, sides in part["situations"].items() for side, row in sides.items()]
    return markdown_table(
        rows,
        {
            "beside the stream": lambda row: row[0],
            "engine": lambda row: row[1],
            "median gap": lambda row: f"{row[2]['median'] * 1e3:,.1f} ms",
            "p99": lambda row: f"{row[2]['p99'] * 1e3:,.1f} ms",
            "longest": lambda row: f"{row[2]['longest'] * 1e3:,.1f} ms",
            f"all {part['stream']:,} tokens": lambda row: f"{row[2]['total']:,.2f} s",
        },
    )


def _longest_gaps(part: Row) -> str:
    rows = [(f"a prompt of {int(n):,} tokens", sides) for n, sides in part["by_length"].items()]
    rows += [(f"{n} of {part['by_count_length']:,}, step after step", s) for n, s in part["by_count"].items()]
    return markdown_table(
        rows,
        {
            "longest gap of the stream": lambda row: row[0],
            "m3": lambda row: f"{row[1]['m3']['longest'] * 1e3:,.0f} ms",
            "m4": lambda row: f"{row[1]['m4']['longest'] * 1e3:,.0f} ms",
        },
    )


def _scheduling(part: Row) -> str:
    names = {"schedule": "schedule", "update": "update", "schedule_and_update": "both", "prepare": "make tensors"}
    sides = part["sides"]
    return markdown_table(
        names.items(),
        {
            f"decode step of {part['sequences']} sequences, per sequence": lambda item: item[1],
            "m3": lambda item: f"{sides['m3'][item[0]] * 1e6:.2f} us",
            "m4": lambda item: f"{sides['m4'][item[0]] * 1e6:.2f} us",
        },
    )


def _environment(results: Row) -> str:
    load = results["load"].items()
    disturbed = [name for name, part in load if part["disturbed"]]
    if disturbed:
        quiet = f"Other processes took more than a tenth of a core during: {', '.join(disturbed)}."
    elif any(part["other_cores"] is None for _, part in load):
        quiet = "What other processes took is not known."
    else:
        quiet = f"Other processes took at most {max(part['other_cores'] for _, part in load):.0%} of a core."
    small = " Measured with --quick: no results." if results["quick"] else ""
    shape = results["environment"]["random_model"]
    return (
        f"*Measured with {describe(results['environment'])} The 0.6B shape is Qwen3 with "
        f"{shape['num_hidden_layers']} layers and random weights. The engines run on the "
        f"{results['environment']['backend']} backend. {quiet}{small}*"
    )
