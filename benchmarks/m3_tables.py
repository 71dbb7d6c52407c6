"""The tables of milestone 3, made from the numbers that `benchmarks.m3_paged_attention` has measured."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import describe, markdown_table
from m1_single_request.trace_event import size

Row = Mapping[str, Any]

Promise = tuple[str, str, float, float | None, bool]
# what, where it stands in the results, the least that was promised, what was hoped for, whether less is better
PROMISES: tuple[Promise, ...] = (
    ("single stream, 0.6B: times transformers", "single_0_6b.times_transformers", 2.0, 2.5, False),
    ("single stream, 0.6B: share of read bandwidth", "single_0_6b.sides.m3.bandwidth_share", 0.45, None, False),
    ("single stream, embedded, with text: times transformers", "single_embedded.times_transformers", 2.0, 2.6, False),
    (
        "ragged 16, 0.6B: times transformers",
        "ragged_0_6b.sides.m3, 16 at a time.times_transformers",
        2.5,
        4.0,
        False,
    ),
    (
        "ragged 64, embedded: times transformers, static 16",
        "ragged_embedded.sides.m3, 64 at a time.times_transformers",
        2.5,
        5.0,
        False,
    ),
    ("schedule + update, 256 sequences: us per sequence", "scheduling.both_us", 2.0, 1.0, True),
    ("ragged 16, blocks of 16: KV unused", "fragmentation_16.layouts.blocks of 16.unused", 0.04, None, True),
    ("ragged 64, blocks of 16: KV unused", "fragmentation_64.layouts.blocks of 16.unused", 0.04, None, True),
)


def promises(parts: Mapping[str, Any], promised: Sequence[Promise]) -> str:
    """What a milestone set out to reach, beside what was measured; "not measured" where a part is missing."""

    def row(promise: Promise) -> dict[str, Any]:
        what, path, floor, hoped, less = promise
        value: Any = parts
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        missed = value is not None and (value > floor if less else value < floor)
        return {"what": what, "value": value, "floor": floor, "hoped": hoped, "less": less, "missed": missed}

    return markdown_table(
        map(row, promised),
        {
            "figure": lambda r: r["what"],
            "measured": lambda r: "not measured" if r["value"] is None else f"{r['value']:,.3f}",
            "promised": lambda r: f"{'<=' if r['less'] else '>='} {r['floor']:,.3g}",
            "hoped for": lambda r: "" if r["hoped"] is None else f"{r['hoped']:,g}",
            "": lambda r: "MISSED" if r["missed"] else "",
        },
    )


def tables(results: dict[str, Any]) -> str:
    """What the page includes, piece by piece, each between two marks by which the page names it."""
    parts = results["parts"]
    pieces = {
        "single": _single(parts),
        "ragged_0_6b": _ragged(parts["ragged_0_6b"]),
        "ragged_embedded": _ragged(parts["ragged_embedded"]),
        "fragmentation": _fragmentation(parts["fragmentation_64"]),
        "fragmentation_16": _fragmentation(parts["fragmentation_16"]),
        "preemption": _preemption(parts["preemption"]),
        "parallel_sampling": _parallel_sampling(parts["parallel_sampling"]),
        "scheduling": _scheduling(parts["scheduling"]),
        "machine": _machine(parts),
        "roofline": _roofline(parts["roofline_0_6b"]),
        "roofline_embedded": _roofline(parts["roofline_embedded"]),
        "environment": _environment(results),
    }
    return "\n".join(
        f"<!-- --8<-- [start:{name}] -->\n{text}\n<!-- --8<-- [end:{name}] -->\n" for name, text in pieces.items()
    )


def _single(parts: Row) -> str:
    rows = []
    for model, part in (("0.6B, bfloat16", "single_0_6b"), ("embedded, float32, with text", "single_embedded")):
        sides = parts[part]["sides"]
        for name, side in sides.items():
            times = side["tokens_per_second"] / sides["transformers"]["tokens_per_second"]
            rows.append({"model": model, "name": name, "times": times} | side)
    return markdown_table(
        rows,
        {
            "model": lambda r: r["model"],
            "side": lambda r: r["name"],
            "tokens/s": lambda r: f"{r['tokens_per_second']:,.1f}",
            "times transformers": lambda r: f"{r['times']:.2f}",
            "share of the read bandwidth": lambda r: f"{r['bandwidth_share']:.0%}" if "bandwidth_share" in r else "",
        },
    )


def _ragged(part: Row) -> str:
    return markdown_table(
        part["sides"].items(),
        {
            "side": lambda item: item[0],
            "tokens/s": lambda item: f"{item[1]['tokens_per_second']:,.1f}",
            "times transformers": lambda item: f"{item[1]['times_transformers']:.2f}",
            "seconds": lambda item: f"{item[1]['seconds']:.1f}",
            "steps": lambda item: f"{item[1]['steps']:,}",
            "same answers": lambda item: f"{item[1]['same_answers']} of {part['num_requests']}",
        },
    )


def _fragmentation(part: Row) -> str:
    return markdown_table(
        part["layouts"].values(),
        {
            "KV memory": lambda r: r["layout"],
            "tokens reserved at most": lambda r: f"{r['peak_reserved']:,}",
            "held at most": lambda r: f"{r['peak_held']:,}",
            "unused then": lambda r: f"{r['unused_at_peak']:.1%}",
            "unused on average": lambda r: f"{r['unused']:.1%}",
        },
    )


def _preemption(part: Row) -> str:
    blocks = {"room for all": part["peak_blocks"]}
    return markdown_table(
        part["sides"].items(),
        {
            "out of memory": lambda item: f"{item[0]}: {blocks.get(item[0], part['pool_blocks']):,} blocks",
            "tokens/s": lambda item: f"{item[1]['tokens_per_second']:,.0f}",
            "steps": lambda item: f"{item[1]['steps']:,}",
            "mean batch": lambda item: f"{item[1]['mean_batch']:.1f}",
            "preemptions": lambda item: f"{item[1]['preemptions']:,}",
            "computed again": lambda item: f"{item[1]['tokens_again']:,}",
            "swapped out": lambda item: f"{item[1]['tokens_swapped']:,}",
        },
    )


def _parallel_sampling(part: Row) -> str:
    names = {
        "forked": f"one request, n = {part['continuations']}",
        "separate": f"{part['continuations']} requests",
    }
    return markdown_table(
        part["ways"].items(),
        {
            "continuations": lambda item: names[item[0]],
            "prefill tokens": lambda item: f"{item[1]['prefill_tokens']:,}",
            "blocks at most": lambda item: f"{item[1]['peak_blocks']:,}",
            "of them shared": lambda item: f"{item[1]['peak_shared']:,}",
            "blocks copied": lambda item: f"{item[1]['blocks_copied']:,}",
            "seconds": lambda item: f"{item[1]['seconds']:.2f}",
        },
    )


def _scheduling(part: Row) -> str:
    return markdown_table(
        ("schedule", "update", "both"),
        {
            f"decode step of {part['sequences']} sequences": lambda name: name,
            "per sequence": lambda name: f"{part[name] * 1e6:.2f} us",
            "per step": lambda name: f"{part[name] * part['sequences'] * 1e6:,.0f} us",
        },
    )


def _machine(parts: Row) -> str:
    precisions = {"bfloat16": "roofline_0_6b", "float32": "roofline_embedded"}
    return markdown_table(
        precisions.items(),
        {
            "precision": lambda item: item[0],
            "reads": lambda item: f"{parts[item[1]]['bandwidth'] / 1e9:.1f} GB/s",
            "multiplies": lambda item: f"{parts[item[1]]['flops'] / 1e9:,.0f} GFLOP/s",
            "operations in the time of a byte": lambda item: f"{parts[item[1]]['ridge']:.0f}",
        },
    )


def _roofline(part: Row) -> str:
    def what(point: Row) -> str:
        if point["kind"] == "prefill":
            return f"prefill of {point['tokens']} tokens"
        return f"decode of {point['tokens']} requests" if point["tokens"] > 1 else "decode of 1 request"

    return markdown_table(
        part["points"],
        {
            "forward": what,
            "operations": lambda r: f"{r['flop'] / 1e9:,.2f} billion",
            "bytes": lambda r: size(int(r["bytes"])),
            "operations per byte": lambda r: f"{r['intensity']:.1f}",
            "measured": lambda r: f"{r['seconds'] * 1e3:,.2f} ms",
            "bound": lambda r: f"{r['bound'] * 1e3:,.2f} ms",
            "of the roof": lambda r: f"{r['bound'] / r['seconds']:.0%}",
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
        most = max(part["other_cores"] for _, part in load)
        quiet = f"Other processes took at most {most:.0%} of a core."
    small = " Measured with --quick: no results." if results["quick"] else ""
    shape = results["environment"]["random_model"]
    return (
        f"*Measured with {describe(results['environment'])} The 0.6B shape is Qwen3 with "
        f"{shape['num_hidden_layers']} layers and random weights. Where nothing else is said, m3 runs on the "
        f"{results['environment']['backend']} backend. {quiet}{small}*"
    )
