"""The tables of milestone 6, made from the numbers that `benchmarks.m6_multimodal` has measured."""

from collections.abc import Callable
from typing import Any

from benchmarks import markdown_table
from benchmarks.m3_tables import Promise
from benchmarks.m5_tables import environment_note
from benchmarks.m6_answers import COLD, ELSEWHERE, TURN
from benchmarks.m6_steps import M5, M6, PHASES, TEXTS
from m1_single_request.trace_event import size

Row = dict[str, Any]

PROMISES: tuple[Promise, ...] = (
    ("a second turn: encoder runs", f"answers.cases.{TURN}.encoder_runs", 0, None, True),
    ("behind another text: encoder runs", f"answers.cases.{ELSEWHERE}.encoder_runs", 0, None, True),
    ("a second turn: time to the first token, share of cold", f"answers.cases.{TURN}.times_cold", 0.6, None, True),
    ("a step of texts, m6: times m5", f"steps.sides.{M6}.times_m5.step", 1.05, 1.0, True),
    ("the same on the model that sees: times m5", f"steps.sides.{TEXTS}.times_m5.step", 1.05, 1.0, True),
)


def tables(results: Row) -> str:
    """What the page includes, piece by piece, each between two marks by which the page names it."""
    parts = results["parts"]
    made: dict[str, tuple[str, Callable[[Row], str]]] = {
        "stations": ("memory", _stations),
        "rows": ("memory", _rows),
        "answers": ("answers", _answers),
        "answers_split": ("answers", _split),
        "tower": ("tower", _tower),
        "gaps_traffic": ("gaps", _traffic),
        "gaps": ("gaps", _gaps),
        "steps": ("steps", _steps),
    }
    pieces = {name: make(parts[part]) for name, (part, make) in made.items() if part in parts}
    pieces["environment"] = environment_note(results)
    return "\n".join(
        f"<!-- --8<-- [start:{name}] -->\n{text}\n<!-- --8<-- [end:{name}] -->\n" for name, text in pieces.items()
    )


def _stations(part: Row) -> str:
    """What becomes of a picture."""
    return markdown_table(
        part["pictures"].items(),
        {
            "picture": lambda item: item[0],
            "numbers in its pixels": lambda item: f"{item[1]['pixels']:,}",
            "patches": lambda item: f"{item[1]['patches']:,}",
            "tokens": lambda item: f"{item[1]['tokens']:,}",
            "numbers per token": lambda item: f"{item[1]['pixels'] // item[1]['tokens']:,}",
        },
    )


def _rows(part: Row) -> str:
    table = markdown_table(
        part["pictures"].items(),
        {
            "picture": lambda item: item[0],
            "patches, float32": lambda item: size(item[1]["feature_bytes"]),
            "embeddings": lambda item: size(item[1]["embedding_bytes"]),
            "KV": lambda item: size(item[1]["kv_bytes"]),
            f"such pictures in {size(part['capacity_bytes'])}": lambda item: f"{item[1]['held']:,}",
        },
    )
    vectors = 1 + part["num_deepstack"]
    return (
        f"{table}\n\n*The row of a token has {vectors} vectors of {part['hidden_size']} numbers: the embedding, and "
        f"{part['num_deepstack']} of DeepStack; in float32 {part['bytes_per_token']:,} bytes. Its KV takes "
        f"{part['kv_bytes_per_token']:,} bytes.*"
    )


def _answers(part: Row) -> str:
    table = markdown_table(
        part["cases"].items(),
        {
            "the picture comes": lambda item: "first" if item[0] == COLD else item[0],
            "prompt": lambda item: f"{item[1]['prompt_tokens']:,}",
            "computed": lambda item: f"{item[1]['computed_tokens']:,}",
            "tower runs": lambda item: f"{item[1]['encoder_runs']}",
            "first token": lambda item: f"{item[1]['ttft'] * 1e3:,.1f} ms",
            "share": lambda item: f"{item[1]['times_cold']:.0%}",
        },
    )
    width, height = part["size"]
    return f"{table}\n\n*Pictures of {width} x {height} pixels; prompt and computed in tokens.*"


def _split(part: Row) -> str:
    def milliseconds(key: str) -> Callable[[Any], str]:
        return lambda item: f"{item[1][key] * 1e3:,.1f} ms"

    return markdown_table(
        part["cases"].items(),
        {
            "the picture comes": lambda item: "first" if item[0] == COLD else item[0],
            "to patches": milliseconds("patches"),
            "the tower": milliseconds("tower"),
            "the model": milliseconds("model"),
            "the rest": milliseconds("rest"),
        },
    )


def _tower(part: Row) -> str:
    rows = [(name, sizes["tokens"], row) for name, sizes in part["sizes"].items() for row in sizes["numbers"]]
    return markdown_table(
        rows,
        {
            "pictures of": lambda row: row[0],
            "how many": lambda row: f"{row[2]['number']}",
            "tokens": lambda row: f"{row[1] * row[2]['number']:,}",
            "one by one": lambda row: f"{row[2]['one by one'] * 1e3:,.1f} ms",
            "in one pass": lambda row: f"{row[2]['in one pass'] * 1e3:,.1f} ms",
            "times faster": lambda row: f"{row[2]['times']:.2f}",
        },
    )


def _traffic(part: Row) -> str:
    traffic = part["traffic"]
    width, height = traffic["size"]
    return (
        f"*{traffic['num_streams']} streams of {traffic['stream_tokens']:,} tokens of text; whenever each of them has "
        f"got {traffic['every']} tokens more, {traffic['at_once']} prompts with {traffic['num_pictures']} pictures of "
        f"{width} x {height} each, {traffic['prompt_tokens']:,} tokens a prompt, {traffic['num_prompts']} prompts in "
        f"all. No picture comes twice. A step may have 1,024 tokens, so the encoder's budget alone cuts prompts. Gaps "
        f"are those of the streams, each the median of the same gap in {part['rounds']} rounds.*"
    )


def _gaps(part: Row) -> str:
    def share(key: str) -> Callable[[Any], str]:
        return lambda item: f"{item[1][key] * 1e3:,.1f} ms ({item[1][f'{key}_share']:.0%})"

    return markdown_table(
        part["budgets"].items(),
        {
            "encoder budget": lambda item: item[0],
            "median gap": lambda item: f"{item[1]['p50'] * 1e3:,.1f} ms",
            "p95 (of none)": share("p95"),
            "longest (of none)": share("longest"),
            "tokens/s (of none)": lambda item: (
                f"{item[1]['tokens_per_second']:,.0f} ({item[1]['throughput_share']:.0%})"
            ),
            "prompts' TTFT": lambda item: f"{item[1]['mean_ttft'] * 1e3:,.0f} ms",
        },
    )


def _steps(part: Row) -> str:
    def phase(name: str) -> Callable[[Any], str]:
        def cell(item: Any) -> str:
            ratio = "" if item[0] == M5 else f" ({item[1]['times_m5'][name]:.2f})"
            return f"{item[1][name] * 1e3:,.3f} ms{ratio}"

        return cell

    heading = f"a decode step of {part['requests']} requests"
    return markdown_table(part["sides"].items(), {heading: lambda item: item[0]} | {p: phase(p) for p in PHASES})
