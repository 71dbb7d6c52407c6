"""The engine in action: `python -m m1_single_request.demo`.

Without flags: a short tour on the checkpoint that ships with the course, every decision explained, then a table of what
it cost. `--prompt` answers one prompt, `--chat` is a conversation in the terminal. Later milestones keep these flags
and add their own.
"""

import argparse
import io
import sys
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.text import Text

from m1_single_request.config import DTYPES, ModelConfig, TraceConfig
from m1_single_request.demo_tour import TourReader, show_answer, tour
from m1_single_request.errors import EngineError
from m1_single_request.llm_engine import LLMEngine
from m1_single_request.outputs import RequestOutput
from m1_single_request.sampling_params import SamplingParams
from m1_single_request.trace_readers import ConsoleReader
from m1_single_request.tracer import TraceReader


def make_parser(prog: str = "python -m m1_single_request.demo") -> argparse.ArgumentParser:
    """The flags that every milestone's demo has."""
    parser = argparse.ArgumentParser(prog=prog, description="Watch the engine answer and explain every step.")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--prompt", help="answer this and stop")
    what.add_argument("--chat", action="store_true", help="talk to the model; /reset forgets, /quit leaves")
    parser.add_argument("--raw", action="store_true", help="with --prompt: do not apply the chat template")
    parser.add_argument("--model", help="a Hugging Face directory or hub id; default: the embedded checkpoint")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    parser.add_argument("--dtype", default="auto", choices=("auto", *DTYPES))
    parser.add_argument("--max-model-len", type=int, help="prompt and output together; default: the model's own limit")
    parser.add_argument(
        "--trace",
        choices=("verbose", "summary", "off"),
        help="default: verbose with --prompt, off with --chat; without either, what the tour finds best",
    )
    parser.add_argument("--trace-file", metavar="OUT.jsonl", help="also write every event to this file")
    parser.add_argument("--max-tokens", type=int, default=128)
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--temperature", type=float, default=0.0)
    sampling.add_argument("--top-k", type=int, default=-1)
    sampling.add_argument("--top-p", type=float, default=1.0)
    sampling.add_argument("--min-p", type=float, default=0.0)
    sampling.add_argument("--presence-penalty", type=float, default=0.0)
    sampling.add_argument("--frequency-penalty", type=float, default=0.0)
    sampling.add_argument("--repetition-penalty", type=float, default=1.0)
    sampling.add_argument("--stop", action="append", default=[], help="a stop string; may be repeated")
    sampling.add_argument("--seed", type=int)
    return parser


SAMPLING_FLAGS = (
    "max_tokens", "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "stop", "seed",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit status."""
    return exit_status(run, make_parser().parse_args(argv))


def run(args: argparse.Namespace, console: Console) -> None:
    """Run the mode that the flags select."""
    params = sampling_params(args)
    reader = TourReader(console) if is_tour(args) and args.trace is None else console_reader(args, console)
    with LLMEngine(model_config=model_config(args), trace_config=trace_config(args, reader)) as engine:
        if is_tour(args):
            tour(engine, params, console, reader)
        else:
            converse(engine, args, params, console)


# --- what the demos of all milestones have in common ------------------------------------------------------------------


def exit_status(run: Callable[[argparse.Namespace, Console], None], args: argparse.Namespace) -> int:
    """Run a demo and turn whatever can go wrong into one clear line and an exit status."""
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that cannot show a character shows a question mark
            stream.reconfigure(errors="replace")
    try:
        run(args, Console(highlight=False))
    except EngineError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # the other end of a pipe is gone, or the disk is full
        print(f"the output cannot be written: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def is_tour(args: argparse.Namespace) -> bool:
    """Whether nothing was asked, so that the demo shows what it likes."""
    return not args.chat and args.prompt is None


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """The sampling flags, checked."""
    return SamplingParams(**{flag: getattr(args, flag) for flag in SAMPLING_FLAGS})


def model_config(args: argparse.Namespace) -> ModelConfig:
    """The model flags, checked."""
    return ModelConfig(model=args.model or None, device=args.device, dtype=args.dtype, max_model_len=args.max_model_len)


def trace_config(args: argparse.Namespace, *readers: TraceReader | None) -> TraceConfig:
    """The trace file of the flags, and these readers."""
    return TraceConfig(jsonl=args.trace_file, readers=tuple(reader for reader in readers if reader))


def console_reader(args: argparse.Namespace, console: Console) -> TraceReader | None:
    """The trace on the console that the flags ask for."""
    level = args.trace or ("verbose" if args.prompt is not None else "off")
    return None if level == "off" else ConsoleReader(verbose=level == "verbose", console=console)


def converse(engine: LLMEngine, args: argparse.Namespace, params: SamplingParams, console: Console) -> None:
    """Run the mode of `--prompt` or `--chat`."""
    if args.chat:
        chat(engine, params, console)
    else:
        show_answer(console, answer(engine, args.prompt, params, raw=args.raw))


def answer(engine: LLMEngine, prompt: str, params: SamplingParams, *, raw: bool) -> RequestOutput:
    """Answer one prompt."""
    return engine.generate(as_prompt(engine, prompt, raw=raw), params)


def as_prompt(engine: LLMEngine, text: str, *, raw: bool = False) -> str | list[int]:
    """A text as a user's message where the model has a chat template, unless it is to be taken as it is."""
    if raw or engine.engine_core.input_processor.tokenizer.chat_template is None:
        return text
    return engine.chat_prompt([{"role": "user", "content": text}])


# --- the conversation -------------------------------------------------------------------------------------------------


Commands = Mapping[str, Callable[[str], str]]
"""Commands of a later milestone's conversation besides /quit: name -> function that gets the rest of the line and
returns the answer. One for /reset runs in addition to clearing the conversation."""


def chat(engine: LLMEngine, params: SamplingParams, console: Console, commands: Commands | None = None) -> None:
    """A conversation with history, streamed; ends with /quit or end of input."""
    commands = {"/reset": lambda _: "forgotten", **(commands or {})}
    console.print("[dim]/reset forgets the conversation, /quit leaves[/dim]")
    history: list[dict[str, str]] = []
    while True:
        try:
            line = input("you    > ").strip()
        except EOFError:
            console.print()
            return
        if line == "/quit":
            return
        name, _, rest = line.partition(" ")
        if name == "/reset":
            history.clear()
        if name in commands:
            console.print(Text(commands[name](rest.strip()), style="dim"))
        elif line.startswith("/"):
            console.print(f"[dim]there is {', '.join(sorted(commands))} and /quit[/dim]")
        elif line:
            history.append({"role": "user", "content": line})
            answer = _stream_answer(engine, history, params, console)
            if answer is None:
                history.pop()
            else:
                history.append({"role": "assistant", "content": answer})


def _stream_answer(
    engine: LLMEngine, history: list[dict[str, str]], params: SamplingParams, console: Console
) -> str | None:
    """Print the answer as it comes; None if there was none. Ctrl-C ends the answer, not the conversation."""
    shown = ""
    try:
        console.print("model  > ", end="")
        for output in engine.stream(engine.chat_prompt(history), params):
            console.print(output.text[len(shown) :], end="", markup=False, soft_wrap=True)
            shown = output.text
            if output.error is not None:
                console.print(f"{type(output.error).__name__}: {output.error}", style="red", markup=False)
                return None
    except KeyboardInterrupt:
        console.print(" [dim](interrupted)[/dim]", end="")
    except EngineError as error:
        console.print(f"{type(error).__name__}: {error}", style="red", markup=False)
        return None
    console.print()
    return shown


if __name__ == "__main__":
    raise SystemExit(main())
