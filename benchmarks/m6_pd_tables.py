"""The tables of prefill and decode apart, as the page of milestone 6 includes them, piece by piece."""

from collections.abc import Callable
from typing import Any

from benchmarks import markdown_table
from benchmarks.m5_tables import environment_note
from m1_single_request.trace_event import size

Row = dict[str, Any]


def tables(results: Row) -> str:
    """What a page includes, piece by piece, each between two marks."""
    parts = results["parts"]
    made: dict[str, tuple[str, Callable[[Row], str]]] = {
        "pd_roofline": ("roofline", _roofline),
        "pd_bytes": ("bytes", _bytes),
        "pd_bandwidth": ("bandwidth", _bandwidth),
        "pd_overhead": ("overhead", _overhead),
        "pd_gaps": ("gaps", _gaps),
    }
    pieces = {name: make(parts[part]) for name, (part, make) in made.items() if part in parts}
    pieces["pd_environment"] = environment_note(results)
    return "\n".join(
        f"<!-- --8<-- [start:{name}] -->\n{text}\n<!-- --8<-- [end:{name}] -->\n" for name, text in pieces.items()
    )


def _bytes(part: Row) -> str:
    table = markdown_table(
        part["rows"],
        {
            "prompt": lambda row: f"{row['tokens']:,} tokens",
            "pages": lambda row: f"{row['pages']:,}",
            "pages times bytes of a page": lambda row: size(row["expected"]),
            "moved": lambda row: size(row["moved"]),
            "16 tokens more in a second turn": lambda row: size(row["second_turn"]),
        },
    )
    page_size = part["page_bytes"] // part["bytes_per_token"]
    note = f"A page of {page_size} tokens has {part['page_bytes']:,} bytes: {part['bytes_per_token']:,} a token."
    return f"{table}\n\n*{note}*"


def _bandwidth(part: Row) -> str:
    return markdown_table(
        part["rows"],
        {
            "pages": lambda row: f"{row['pages']:,}",
            "bytes": lambda row: size(row["bytes"]),
            "through shared memory": lambda row: f"{_brief(row['seconds'])} ({row['gb_s']:.1f} GB/s)",
            "a plain copy": lambda row: f"{_brief(row['plain'])} ({row['plain_gb_s']:.1f} GB/s)",
            "times": lambda row: f"{row['seconds'] / row['plain']:.1f}",
        },
    )


def _brief(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.0f} µs"


def _overhead(part: Row) -> str:
    rows = [(length, name, row) for length, sides in part.items() for name, row in sides.items()]
    return markdown_table(
        rows,
        {
            "prompt": lambda row: f"{int(row[0]):,} tokens",
            "side": lambda row: row[1],
            "first token": lambda row: f"{row[2]['ttft'] * 1e3:.1f} ms",
            "each further one": lambda row: f"{row[2]['tpot'] * 1e3:.2f} ms",
        },
    )


def _gaps(part: Row) -> str:
    table = markdown_table(
        part["sides"].items(),
        {
            "side": lambda item: item[0],
            "median gap": lambda item: f"{item[1]['p50'] * 1e3:.1f} ms",
            "p95": lambda item: f"{item[1]['p95'] * 1e3:.1f} ms ({item[1]['p95_share']:.0%})",
            "longest": lambda item: f"{item[1]['longest'] * 1e3:.1f} ms ({item[1]['longest_share']:.0%})",
            "tokens/s": lambda item: f"{item[1]['tokens_per_second']:,.0f} ({item[1]['throughput_share']:.0%})",
            "prompts' TTFT": lambda item: f"{item[1]['mean_ttft'] * 1e3:,.0f} ms",
        },
    )
    t = part["traffic"]
    note = (
        f"{t['num_streams']} streams of {t['stream_tokens']} tokens; whenever each has got {t['every']} more, a prompt "
        f"of {t['prompt_tokens']:,} tokens, {t['num_prompts']} in all. Gaps are medians of {part['rounds']} rounds."
    )
    return f"{table}\n\n*{note}*"


def _roofline(part: Row) -> str:
    table = markdown_table(
        part["points"],
        {
            "step": _step,
            "takes": lambda point: f"{1e3 * point['seconds']:.0f} ms",
            "operations per byte": lambda point: f"{point['intensity']:.0f}",
            "GFLOP/s": lambda point: f"{point['flops'] / 1e9:,.0f} ({point['flops'] / part['flops']:.0%})",
            "GB/s": lambda point: f"{point['bandwidth'] / 1e9:.1f} ({point['bandwidth'] / part['bandwidth']:.0%})",
        },
    )
    note = (
        f"In brackets: of what this machine can do with one thread, {part['flops'] / 1e9:,.0f} GFLOP/s and "
        f"{part['bandwidth'] / 1e9:.0f} GB/s. The two meet at {part['ridge']:.0f} operations per byte. Those who "
        f"decode have about {part['context']} tokens each. Random weights in the shape of Qwen3-0.6B, bfloat16."
    )
    return f"{table}\n\n*{note}*"


def _step(point: Row) -> str:
    if point["kind"] == "prefill":
        return f"a prompt of {point['tokens']} tokens"
    if point["kind"] == "decode":
        return "1 request decodes" if point["tokens"] == 1 else f"{point['tokens']} requests decode"
    return f"{point['decodes']} decode, beside a prompt of {point['tokens']} tokens"
