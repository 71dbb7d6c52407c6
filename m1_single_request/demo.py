"""Demo of m1, one request at a time: `python -m m1_single_request.demo`.

Without --prompt and --chat: four requests on the checkpoint that ships, with every decision explained; then the cost of
one of them, and the reason for it.
"""

import argparse
import io
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from m1_single_request.config import ModelConfig, TraceConfig
from m1_single_request.demo_tour import checked, prompt_of, show_answer, text_of, tour
from m1_single_request.errors import ConfigError, EngineError
from m1_single_request.flags import add_flags, config_of
from m1_single_request.input_processor import Message
from m1_single_request.llm_engine import LLMEngine
from m1_single_request.outputs import RequestOutput
from m1_single_request.sampling_params import SamplingParams
from m1_single_request.trace_readers import ConsoleReader

Flags = Mapping[str, tuple[type, str]]
"""Title of a group of flags -> a configuration class, and the names of those of its fields that have a flag."""
MAX_THREADS = 1024


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """Settings of the demo itself."""

    threads: int | None = None
    """Number of CPU threads. Default: 1 for the model that ships, whose operations are too small to share; else that of
    torch."""

    def __post_init__(self) -> None:
        if self.threads is not None and not 1 <= self.threads <= MAX_THREADS:
            raise ConfigError(f"threads={self.threads} must be from 1 to {MAX_THREADS}")


PENALTIES = "presence_penalty frequency_penalty repetition_penalty"
FLAGS: Flags = {
    "model": (ModelConfig, "model device dtype max_model_len"),
    "sampling": (SamplingParams, f"max_tokens temperature top_k top_p min_p {PENALTIES} stop seed"),
    "demo": (DemoConfig, "threads"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; return the exit status."""
    return exit_status(run, make_parser("m1_single_request.demo", __doc__, FLAGS).parse_args(argv))


def run(args: argparse.Namespace, console: Console) -> None:
    """Run the tour, or answer the prompt or the chat that the flags request."""
    params, configs = config_of(args, SamplingParams), configs_of(args, console, model=ModelConfig)
    if is_tour(args):
        tour(configs, params, console, is_explained=args.trace is None)
        return
    with LLMEngine(**configs) as engine:
        Conversation(engine, params, console).run(args)


# --- what the demos of all milestones have in common ------------------------------------------------------------------


def make_parser(prog: str, doc: str | None, flags: Flags) -> argparse.ArgumentParser:
    """Return a parser of `--prompt`, `--chat`, the trace and these flags. Its description is the text of `doc`."""
    parser = argparse.ArgumentParser(prog=f"python -m {prog}", description=text_of(doc).replace("`", ""))
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument("--prompt", help="Answer this prompt and stop.")
    asked.add_argument("--chat", action="store_true", help="Hold a conversation; /reset forgets it, /quit ends it.")
    parser.add_argument(
        "--trace",
        choices=("verbose", "summary", "off"),
        help="Print every decision, or a line per step. Default: verbose with --prompt, off with --chat.",
    )
    parser.add_argument("--trace-file", metavar="OUT.jsonl", help="Write every event to this file, one per line.")
    parser.add_argument(
        "--chrome-trace", metavar="OUT.json", help="Write a trace for https://ui.perfetto.dev to this file at the end."
    )
    parser.add_argument(
        "--player", metavar="OUT.html", help="Write a page that replays the trace to this file at the end."
    )
    for title, (config_class, names) in flags.items():
        add_flags(parser.add_argument_group(title), config_class, names)
    return parser


def exit_status(run: Callable[[argparse.Namespace, Console], None], args: argparse.Namespace) -> int:
    """Run a demo; turn an error into one clear line and an exit status."""
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that cannot show a character shows a question mark
            stream.reconfigure(errors="replace")
    try:
        run(args, Console(highlight=False))
    except (EngineError, OSError) as error:  # OSError: the other end of a pipe is closed, for example
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2 if isinstance(error, EngineError) else 1
    except KeyboardInterrupt:
        return 130
    return 0


def is_tour(args: argparse.Namespace) -> bool:
    """Return whether the demo shows its tour: neither `--prompt` nor `--chat` is given."""
    return not args.chat and args.prompt is None


def configs_of(args: argparse.Namespace, console: Console, **classes: type) -> dict[str, Any]:
    """Return the configurations of the flags, with the trace, as keywords of an engine; set its number of threads."""
    trace = trace_of(args, console, classes.pop("trace", TraceConfig))
    configs: dict[str, Any] = {
        f"{name}_config": config_of(args, config_class) for name, config_class in classes.items()
    }
    threads = config_of(args, DemoConfig).threads or (1 if configs["model_config"].model is None else None)
    if threads is not None:
        torch.set_num_threads(threads)
    return {**configs, "trace_config": trace}


def trace_of(args: argparse.Namespace, console: Console, config_class: type) -> TraceConfig:
    """Return the trace that the flags request, with its readers. `config_class`: m1's `TraceConfig`, or a later one."""
    level = args.trace or ("off" if args.prompt is None else "verbose")
    readers = () if level == "off" else (ConsoleReader(verbose=level == "verbose", console=console),)
    files = {"jsonl": args.trace_file, "chrome": args.chrome_trace, "player": args.player}
    return config_of(args, config_class, readers=readers, **files)


class Conversation:
    """Prints the answer to `--prompt`, or the answers to the lines of `--chat`, whose history it keeps.

    A later milestone overrides `message` or `stream`, and adds `commands`: a name, and a function that gets the rest of
    the line and returns the text to print.
    """

    def __init__(self, engine: LLMEngine, params: SamplingParams, console: Console) -> None:
        self.engine, self.params, self.console = engine, params, console
        self.history: list[Message] = []
        self.commands: dict[str, Callable[[str], str]] = {"/reset": self.reset}

    def run(self, args: argparse.Namespace) -> None:
        """Answer the prompt of the flags, or hold a chat."""
        if args.chat:
            self.chat()
        else:
            *_, output = self.stream(prompt_of(self.engine, self.message(args.prompt)["content"]))
            show_answer(self.console, output)

    def chat(self) -> None:
        """Answer line after line, until /quit or the end of the input."""
        commands = f"[dim]there is {', '.join(sorted(self.commands))} and /quit[/dim]"
        self.console.print(commands)
        while (line := read_line()) != "/quit":
            name, _, rest = line.partition(" ")
            if name in self.commands:
                self.console.print(Text(self.commands[name](rest.strip()), style="dim"))
            elif line.startswith("/"):
                self.console.print(commands)
            elif line:
                self._answer(self.message(line))
        self.console.print()

    def message(self, text: str) -> Message:
        """Return the user's message of a prompt or a line."""
        return {"role": "user", "content": text}

    def stream(self, prompt: str | list[int]) -> Iterable[RequestOutput]:
        """Run one request; yield its output after each step."""
        return self.engine.stream(prompt, self.params)

    def reset(self, _: str) -> str:
        """Forget the conversation."""
        self.history.clear()
        return "forgotten"

    def _answer(self, question: Message) -> None:
        """Print an answer as it is generated. A failed one leaves the history. Ctrl-C ends the answer, not the chat."""
        shown = ""
        self.console.print("model  > ", end="")
        try:
            for output in self.stream(prompt_of(self.engine, question["content"], self.history)):
                self.console.print(checked(output).text[len(shown) :], end="", markup=False, soft_wrap=True)
                shown = output.text
        except KeyboardInterrupt:
            self.console.print(" [dim](interrupted)[/dim]", end="")
        except EngineError as error:
            self.console.print(f"{type(error).__name__}: {error}", style="red", markup=False)
            return
        self.console.print()
        self.history += [question, {"role": "assistant", "content": shown}]


def read_line() -> str:
    """Return a line of the user; /quit at the end of the input."""
    try:
        return input("you    > ").strip()
    except EOFError:
        return "/quit"


if __name__ == "__main__":
    raise SystemExit(main())
