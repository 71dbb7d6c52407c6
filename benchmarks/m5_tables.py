"""The tables of milestone 5, made from the numbers that `benchmarks.m5_chunked_prefill_spec` has measured."""

from collections.abc import Callable
from typing import Any

from benchmarks import describe, markdown_table
from benchmarks.m3_tables import Promise

Row = dict[str, Any]

PROMISES: tuple[Promise, ...] = (
    ("decode_first: p95 gap, times less than prefill_first", "gaps.best.p95_times_less", 4.0, None, False),
    ("decode_first: longest gap, times less", "gaps.best.longest_times_less", 6.0, None, False),
    ("decode_first: share of the throughput", "gaps.best.throughput_share", 0.9, None, False),
    ("ngram on repeat, one at a time: times no guesses", "speculation.best.repeat.1.ngram", 2.5, None, False),
    ("draft on explain, one at a time: times no guesses", "speculation.best.explain.1.draft_model", 1.3, None, False),
    ("draft model: share of the parameters", "speculation.draft.parameter_share", 1 / 8, None, True),
    ("draft model: cost of a token, share of the target's", "speculation.draft.cost_share", 1 / 3, None, True),
    ("schedule + update of plain decodes, times m4", "scheduling.sides.m5, no guesses.times_m4", 1.2, None, True),
)


def tables(results: Row) -> str:
    """What the page includes, piece by piece, each between two marks by which the page names it."""
    parts = results["parts"]
    made: dict[str, tuple[str, Callable[[Row], str]]] = {
        "gaps": ("gaps", _gaps),
        "gaps_traffic": ("gaps", _traffic),
        "gaps_best": ("gaps", _best_gaps),
        "targets": ("gaps", _targets),
        "costs": ("gaps", _costs),
        "speculation_1": ("speculation", lambda part: _speculation(part, "1")),
        "speculation_8": ("speculation", lambda part: _speculation(part, "8")),
        "draft": ("speculation", _draft),
        "scheduling": ("scheduling", _scheduling),
    }
    pieces = {name: make(parts[part]) for name, (part, make) in made.items() if part in parts}
    pieces["environment"] = environment_note(results)
    return "\n".join(
        f"<!-- --8<-- [start:{name}] -->\n{text}\n<!-- --8<-- [end:{name}] -->\n" for name, text in pieces.items()
    )


def _gaps(part: Row) -> str:
    return _gaps_of(part["references"] | {f"decode_first, {name}": row for name, row in part["budgets"].items()})


def _targets(part: Row) -> str:
    return _gaps_of({f"decode_first, {name}": row for name, row in part["targets"].items()})


def _gaps_of(rows: Row) -> str:
    return markdown_table(
        rows.items(),
        {
            "schedule, limit of a step": lambda item: item[0],
            "median gap": lambda item: f"{item[1]['p50'] * 1e3:,.1f} ms",
            "p95 (times less)": lambda item: f"{item[1]['p95'] * 1e3:,.1f} ms ({item[1]['p95_times_less']:.1f})",
            "longest (times less)": lambda item: (
                f"{item[1]['longest'] * 1e3:,.1f} ms ({item[1]['longest_times_less']:.1f})"
            ),
            "tokens/s": lambda item: f"{item[1]['tokens_per_second']:,.0f} ({item[1]['throughput_share']:.0%})",
            "prompts' TTFT": lambda item: f"{item[1]['mean_ttft'] * 1e3:,.0f} ms",
        },
    )


def _traffic(part: Row) -> str:
    traffic = part["traffic"]
    return (
        f"*{traffic['num_streams']} streams of {traffic['stream_tokens']:,} tokens; a prompt of "
        f"{traffic['prompt_tokens']:,} tokens, unlike all others, whenever each of them has got {traffic['every']} "
        f"tokens more, {traffic['num_prompts']} in all, for {traffic['answer']} tokens each. Gaps are those of the "
        f"streams, each the median of the same gap in {part['rounds']} rounds; tokens/s counts all tokens of prompts "
        f"and answers until nobody is left.*"
    )


def _best_gaps(part: Row) -> str:
    found = part["best"]
    return (
        f"Of all that keep nine tenths of the throughput, and whose prompts wait at most twice as long for their first "
        f"token, *{found['side']}* cuts the longest gap most: {found['longest_times_less']:.1f} times, the p95 "
        f"{found['p95_times_less']:.1f} times, at {found['throughput_share']:.0%} of the throughput."
    )


def _costs(part: Row) -> str:
    costs = part["costs"]
    table = markdown_table(
        zip(costs["num_tokens"], costs["step_ms"], strict=True),
        {
            "tokens in a step": lambda row: f"{row[0]:,}",
            "the step": lambda row: f"{row[1]:.2f} ms",
            "a token of it": lambda row: f"{row[1] / row[0]:.3f} ms",
        },
    )
    return (
        f"{table}\n\n*For each thousand tokens before it, a token of a piece costs {costs['context_ms']:.3f} ms more, "
        f"that of a decode {costs['decode_context_ms']:.3f} ms.*"
    )


def _speculation(part: Row, batch: str) -> str:
    rows = [(kind, name, row) for kind, batches in part["kinds"].items() for name, row in batches[batch].items()]
    return markdown_table(
        rows,
        {
            "text": lambda row: row[0],
            "guesses": lambda row: row[1],
            "guessed (right)": lambda row: (
                f"{row[2]['drafted']:,} ({row[2]['acceptance_rate']:.0%})" if row[2]["drafted"] else ""
            ),
            "tokens a verification": lambda row: f"{row[2]['accept_length']:.2f}" if row[2]["drafted"] else "",
            "steps": lambda row: f"{row[2]['steps']:,}",
            "tokens/s": lambda row: f"{row[2]['tokens_per_second']:,.0f}",
            "times none": lambda row: f"{row[2]['times_none']:.2f}",
        },
    )


def _draft(part: Row) -> str:
    draft = part["draft"]
    if draft is None:
        return "*There was no draft model when this was measured.*"
    return markdown_table(
        ["target", "draft"],
        {
            "": lambda name: name,
            "parameters": lambda name: f"{draft['parameters'][name]:,}",
            "a token, four of the draft in a row": lambda name: f"{draft['seconds'][name] * 1e3:.3f} ms",
            "share of the parameters": lambda name: f"{draft['parameter_share']:.1%}" if name == "draft" else "",
            "share of the time": lambda name: f"{draft['cost_share']:.1%}" if name == "draft" else "",
        },
    )


def _scheduling(part: Row) -> str:
    return markdown_table(
        part["sides"].items(),
        {
            f"{part['sequences']} sequences, for each": lambda item: item[0],
            "schedule": lambda item: f"{item[1]['schedule'] * 1e6:.2f} us",
            "update": lambda item: f"{item[1]['update'] * 1e6:.2f} us",
            "both (times m4)": lambda item: f"{item[1]['schedule_and_update_us']:.2f} us ({item[1]['times_m4']:.2f})",
            "make tensors": lambda item: f"{item[1]['prepare'] * 1e6:.2f} us",
            "tokens": lambda item: f"{item[1]['tokens_per_step']}",
            "both, per token": lambda item: f"{item[1]['schedule_and_update_us'] / item[1]['tokens_per_step']:.2f} us",
        },
    )


def environment_note(results: Row) -> str:
    """Where these results were measured, and how quietly: a note to stand below the tables."""
    disturbed = [name for name, load in results["load"].items() if load["disturbed"]]
    shares = [load["other_cores"] for load in results["load"].values()]
    if disturbed:
        quiet = f"Other processes took more than a tenth of a core during: {', '.join(disturbed)}."
    elif None in shares:
        quiet = "What other processes took is not known."
    else:
        quiet = f"Other processes took at most {max(shares, default=0):.0%} of a core."
    small = " Measured with --quick: no results." if results["quick"] else ""
    return (
        f"*Measured with {describe(results['environment'])} The engines run on the "
        f"{results['environment']['backend']} backend. {quiet}{small}*"
    )
