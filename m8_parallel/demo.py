"""Demo of m8, a model on several ranks: `torchrun --nproc-per-node 2 -m m8_parallel.demo --tp 2`.

Without --prompt and --chat: which part of the model each rank has; a batch of pictures and texts on all ranks; one step
of it, with what each rank waits for; then the same batch in one process. Without torchrun this is the demo of m6.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

import m6_multimodal_pd
from m1_single_request import demo as m1
from m1_single_request.demo_tour import checked, prompt_of
from m1_single_request.errors import ConfigError, InvalidPromptError
from m1_single_request.events import some
from m1_single_request.flags import config_of, given
from m1_single_request.trace_event import size
from m1_single_request.trace_readers import Records
from m1_single_request.tracer import TraceReader
from m2_continuous_batching.demo_tour import open_part, same_answers
from m3_paged_attention import demo as m3
from m3_paged_attention.demo_tour import several
from m4_radix_cache import demo as m4
from m6_multimodal_pd import DisaggregationConfig, SamplingParams, demo as m6
from m6_multimodal_pd.demo_tour import READ, SEEN, Ask, Outputs, cards, options_for
from m8_parallel import LLMEngine, ParallelConfig
from m8_parallel.events import Collectives, RanksJoined
from m8_parallel.job import place

HOW_TO_START = "torchrun --nproc-per-node 2 -m m8_parallel.demo --tp 2"
FLAGS: m1.Flags = {
    **m6.FLAGS,
    "ranks": (ParallelConfig, "tensor_parallel_size=--tp expert_parallel step_timeout_s digest_interval"),
}
"""Those of m6, and of ranks."""


def make_parser() -> argparse.ArgumentParser:
    """Return a parser of all flags."""
    return m1.make_parser("m8_parallel.demo", __doc__, FLAGS)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; return the exit status."""
    return m1.exit_status(run, make_parser().parse_args(argv))


def run(args: argparse.Namespace, console: Console) -> None:
    """Run the demo on this rank."""
    parallel, (rank, size) = config_of(args, ParallelConfig), place()
    if size == 1:
        parallel.check_size(size)
        console.print(f"There is one process, so this is m6. Several ranks: {HOW_TO_START}\n", highlight=False)
        m6.run(args, console)
        return
    if rank:
        console = Console(quiet=True)
    if given(args, DisaggregationConfig) or config_of(args, m6.UserConfig).pd:
        raise ConfigError("the flags of engines that share the work have no effect on ranks")
    params, options = m3.answer_params(args), m4.request_options(args)
    configs = m6.configs_of(args, console) | {"parallel_config": parallel}
    if m1.is_tour(args):
        with TemporaryDirectory() as folder:
            Tour(configs, params, options, console, Path(folder)).run(config_of(args, m6.DemoConfig).num_prompts)
        return
    with LLMEngine(**configs) as engine:
        m6.Conversation(engine, params, console, options, config_of(args, m6.UserConfig)).run(args)


class Tour:
    """The parts of the tour. On ranks other than 0 the first line of `run` does not return: it raises `SystemExit`."""

    def __init__(
        self,
        configs: Mapping[str, Any],
        params: SamplingParams,
        options: Mapping[str, Any],
        console: Console,
        folder: Path,
    ) -> None:
        """`folder`: for the Chrome trace, if the flags name no file for it."""
        self.configs, self.params, self.options, self.console = dict(configs), params, options, console
        self.records, trace = Records(), configs["trace_config"]
        self.chrome = trace.chrome or folder / "trace.json"
        own: tuple[TraceReader, ...] = (self.records, *trace.readers)
        self.configs["trace_config"] = replace(trace, chrome=self.chrome, readers=own)

    def run(self, num_texts: int) -> None:
        """Run all parts."""
        with LLMEngine(**self.configs) as engine:
            asks = [READ[number % len(READ)] for number in range(num_texts)]
            try:
                prompt_of(engine, SEEN[0].content)
                asks = [*SEEN, *asks]
            except InvalidPromptError as error:
                self.console.print(Text(f"Images are left out: {error}.", style="yellow"))
            batch = {f"req-{number}": ask for number, ask in enumerate(asks)}
            self.show_ranks(engine)
            together = self.show_batch(engine, batch)
            num_layers = engine.engine_core.executor.worker.model_runner.model.config.num_layers
            stats: Any = engine.stats()
        self.show_step(num_layers)
        for each in stats.ranks:
            self.console.print(
                f"Rank {each.rank} in all: {each.num_collectives:,} collectives of {size(each.collective_bytes)}, "
                f"{each.collective_seconds:.2f} s."
            )
        self.show_alone(batch, together)

    def show_ranks(self, engine: LLMEngine) -> None:
        """Print what each rank has.

        Every rank is a whole engine: scheduler, cache, sampler. It differs from the others in its weights and in the KV
        of its heads alone. All have loaded their parts of the same files.
        """
        open_part(self.console, "1. The ranks", self.show_ranks)
        table = Table(*(Column(name, justify="right") for name in ("rank", "weights", "KV memory")), box=None)
        stats: Any = engine.stats()
        for each in stats.ranks:
            table.add_row(str(each.rank), size(each.weight_bytes), size(each.kv_bytes))
        self.console.print(table)
        for _, event in self.records.of(RanksJoined):
            self.console.print(f"\n{event.explain()}")

    def show_batch(self, engine: LLMEngine, batch: Mapping[str, Ask]) -> Outputs:
        """Run the batch on all ranks.

        Rank 0 broadcasts the requests that have arrived, and at the end of a step the tokens that it has sampled. Each
        rank schedules the step by itself, and all choose the same batch. Each encodes some of the images, and then all
        have all embeddings.
        """
        open_part(self.console, "2. A batch on all ranks", self.show_batch)
        outputs = self.answers(engine, batch)
        self.console.print(cards(batch, outputs, self.console))
        return outputs

    def answers(self, engine: Any, batch: Mapping[str, Ask]) -> Outputs:
        """Return the finished outputs of the batch."""
        outputs, params = Outputs(), several(self.params)
        for rid, ask in batch.items():
            prompt = prompt_of(engine, ask.content)
            engine.add_request(prompt, params, request_id=rid, **options_for(engine, self.options, prompt))
        while engine.has_unfinished_requests():
            outputs |= {rid: checked(output) for rid, output in engine.step().items()}
        return outputs

    def show_step(self, num_layers: int) -> None:
        """Draw the collectives of one step on all ranks.

        The last step of the batch. A rank that enters an all-reduce early waits for the others, and all leave it at
        about the same time: the shortest time is its cost, and what others take longer they have waited.
        """
        open_part(self.console, "3. One step on all ranks", self.show_step)
        step, last = self.records.of(Collectives)[-1]
        bars = bars_of(json.loads(Path(self.chrome).read_text("utf-8"))["traceEvents"], len(last.kinds))
        table = Table(
            *(Column(name, justify="right") for name in ("", "collective", "bytes", *(f"rank {r}" for r in bars))),
            box=None,
        )
        for number, (kind, num_bytes) in enumerate(zip(last.kinds, last.sizes, strict=True)):
            times = (f"{each[number]['dur'] / 1e3:.2f} ms" for each in bars.values())
            table.add_row(str(number + 1), kind, f"{num_bytes:,}", *times)
        self.console.print(Text(f"step {step}", style="bold"), table)
        self.console.print(
            f"\n{some(num_layers, 'layer')}: {2 * num_layers + 1} all-reduces, one for the embedding and two for each "
            "layer; before them the inputs of the step, and after them the logits, which rank 0 gathers, and the "
            f"tokens that it has sampled. {last.explain()}"
        )

    def show_alone(self, batch: Mapping[str, Ask], together: Outputs) -> None:
        """Run the batch in one process, which is rank 0 alone; compare the answers.

        m6, with all the weights. On one machine ranks share its cores and its memory, so there is nothing to gain: they
        are for a model that is too large for one device, or for devices that each have a memory of their own.
        """
        open_part(self.console, "4. The same batch in one process", self.show_alone)
        configs = {name: value for name, value in self.configs.items() if name != "parallel_config"}
        configs["trace_config"] = replace(configs["trace_config"], chrome=None, jsonl=None, player=None, readers=())
        with m6_multimodal_pd.LLMEngine(**configs) as engine:
            alone = self.answers(engine, batch)
        runs = ([outputs[rid].outputs for rid in batch] for outputs in (together, alone))
        self.console.print(same_answers(*runs))


def bars_of(events: Sequence[Mapping[str, Any]], number: int) -> dict[int, list[Any]]:
    """Return the bars of the last collectives of each rank in a Chrome trace, by rank."""
    found: dict[int, list[Any]] = {}
    for event in events:
        if event["ph"] == "X" and "bytes" in event["args"]:
            found.setdefault(event["pid"] - 1, []).append(event)
    return {rank: bars[-number:] for rank, bars in sorted(found.items())}


if __name__ == "__main__":
    raise SystemExit(main())
