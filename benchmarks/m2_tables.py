"""The tables of milestone 2, made from the numbers that `benchmarks.m2_continuous_batching` has measured."""

from collections.abc import Mapping
from typing import Any

from benchmarks import describe, markdown_table
from m1_single_request.trace_event import size

Row = Mapping[str, Any]


def seconds_of(value: float) -> str:
    """A time for people."""
    return f"{value * 1e3:,.1f} ms" if value < 0.1 else f"{value:,.2f} s"


def share(part: float, whole: float) -> str:
    """A percentage."""
    return f"{part / whole:.0%}"


SIDES = {"per_request": "one by one (`per_request`)", "static": "transformers, static", "padded": "`padded`"}


def tables(results: dict[str, Any]) -> str:
    """What the page includes, piece by piece, each between two marks by which the page names it."""
    pad = results["padding"]
    pieces = {
        "throughput": markdown_table(
            results["throughput"],
            {
                "execution": lambda r: SIDES[r["side"]],
                "requests at a time": lambda r: f"{r['max_num_seqs']}",
                "tokens/s": lambda r: f"{r['tokens_per_second']:,.0f}",
                "times one by one": lambda r: f"{r['times_per_request']:.1f}",
                "times static": lambda r: f"{r['times_static']:.2f}",
                "steps": lambda r: f"{r['steps']:,}",
                "row-steps that gave a token": lambda r: f"{r['rows_used']:.0%}",
                "mean latency": lambda r: seconds_of(r["mean_latency"]),
                "p95 latency": lambda r: seconds_of(r["p95_latency"]),
                "same answers": lambda r: f"{r['same_answers']} of {results['num_requests']}",
            },
        ),
        "phases": markdown_table(
            results["phases"].items(),
            {
                "phase of a decode step of 16": lambda item: item[0],
                "median": lambda item: f"{item[1] * 1e3:.2f} ms",
                "share": lambda item: share(item[1], sum(results["phases"].values())),
            },
        ),
        "limits": markdown_table(
            results["limits"]["max_num_seqs"],
            {
                "max_num_seqs": lambda r: f"{r['max_num_seqs']}",
                "tokens/s": lambda r: f"{r['tokens_per_second']:,.0f}",
                "steps": lambda r: f"{r['steps']:,}",
                "mean TTFT": lambda r: seconds_of(r["mean_ttft"]),
                "mean TPOT": lambda r: seconds_of(r["mean_tpot"]),
                "mean latency": lambda r: seconds_of(r["mean_latency"]),
            },
        ),
        "budgets": markdown_table(
            results["limits"]["max_num_batched_tokens"],
            {
                "max_num_batched_tokens": lambda r: f"{r['max_num_batched_tokens']:,}",
                "tokens/s": lambda r: f"{r['tokens_per_second']:,.0f}",
                "steps": lambda r: f"{r['steps']:,}",
                "mean TTFT": lambda r: seconds_of(r["mean_ttft"]),
                "longest stop of a running answer": lambda r: seconds_of(r["longest_gap"]),
            },
        ),
        "padding": markdown_table(
            pad,
            {
                "max_num_seqs": lambda r: f"{r['max_num_seqs']}",
                "prefill: padding": lambda r: _padding(r["prefill"]),
                "decode: idle rows": lambda r: _padding(r["decode"]),
                "KV read in vain by decodes": lambda r: share(
                    r["decode"]["kv_read"] - r["decode"]["kv_needed"], r["decode"]["kv_read"]
                ),
                "KV reserved": lambda r: size(r["kv_reserved"]),
                "KV used at most": lambda r: f"{size(r['kv_peak'])} ({r['kv_peak'] / r['kv_reserved']:.1%})",
            },
        ),
        "walls": markdown_table(
            [row for row in results["walls"] if row["request"] in (1, 2, 4, 8, 16)],
            {
                "request": lambda r: f"{r['request']}",
                "first token in m1": lambda r: seconds_of(r["m1_ttft"]),
                "first token in m2": lambda r: seconds_of(r["m2_ttft"]),
                "complete in m1": lambda r: seconds_of(r["m1_latency"]),
                "complete in m2": lambda r: seconds_of(r["m2_latency"]),
            },
        ),
        "timeline": markdown_table(
            results["timeline"].items(),
            {
                "batching": lambda item: item[0],
                "steps": lambda item: f"{item[1]['steps']}",
                "row-steps that gave a token": lambda item: f"{item[1]['rows_used']:.0%}",
            },
        ),
        "environment": f"*Measured with {describe(results['environment'])}*",
    }
    return "\n".join(
        f"<!-- --8<-- [start:{name}] -->\n{text}\n<!-- --8<-- [end:{name}] -->\n" for name, text in pieces.items()
    )


def _padding(row: Row) -> str:
    places = row["useful"] + row["padded"]
    return f"{row['padded']:,} of {places:,} ({share(row['padded'], places)})"
