"""Tour of the demo: pictures, their positions, a picture that comes again; batch and streams through two engines; and
overlapped steps.

Part of `python -m m6_multimodal_pd.demo`; no part of the engine depends on it. The remark that opens a part is the
text of its function's docstring. The model that ships has learned such questions.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.status import Status
from rich.table import Column, Table
from rich.text import Text

from m1_single_request.demo_tour import QUESTION, bullets, checked, prompt_of
from m1_single_request.errors import InvalidPromptError
from m1_single_request.events import some
from m2_continuous_batching.demo_tour import PACE, open_part, same_answers
from m3_paged_attention.demo_tour import several
from m4_radix_cache.demo_tour import NOUNS, Stage, codes
from m5_chunked_prefill_spec.demo_tour import TEXT, run_streams, show_times
from m6_multimodal_pd import DisaggregationConfig, LLMEngine, RequestOutput, SamplingParams, SpeculativeConfig
from m6_multimodal_pd.config import MultimodalConfig
from m6_multimodal_pd.demo_terminal import loaded, shown
from m6_multimodal_pd.overlap.events import NormalOrder, StepArrived, StepLaunched
from m6_multimodal_pd.views.positions import KEY, PositionsView
from m6_multimodal_pd.views.two_engines import replay

MOST_COLUMNS = 32
"""Width of a picture, in characters."""
PICTURES = Path(__file__).parent / "demo_pictures"
Outputs = dict[str, RequestOutput]
"""By request id."""
NUM_STREAMS, STREAM_TOKENS, EVERY, PROMPT_TOKENS = 4, 180, 12, 1000
"""A prompt arrives whenever the streams, on average, have EVERY tokens more."""
TWO, ONE = "with two engines", "with one engine"
RECORDED = {"gap": {TWO: 0.00595, ONE: 0.01747}, "wait": {TWO: 0.766, ONE: 0.1175}, "total": {TWO: 1.64, ONE: 1.77}}
RECORDED_ON = "with tiny-qwen3 on 2 cores of an AMD EPYC"
"""Seconds, from `benchmarks/results/m6_pd.json`, and the machine."""


@dataclass(frozen=True)
class Ask:
    """A question, and the file of the picture or the clip that it is about."""

    question: str
    file: str = ""
    kind: str = "image"

    @property
    def content(self) -> Any:
        """The content of the user's message."""
        parts = [{"type": self.kind, self.kind: PICTURES / self.file}, {"type": "text", "text": self.question}]
        return parts if self.file else self.question

    def drawn(self, console: Console, columns: int) -> Text:
        """Return the picture or the clip in this width; where it cannot be drawn, the name of the file as a text."""
        media = loaded(self.content[0], MultimodalConfig(), self.file)
        return shown(media, self.file.partition(".")[0].replace("_", " "), console, columns)


SEEN = (
    Ask("Describe the picture.", "a_big_red_circle.png"),
    Ask("What is at the left?", "a_blue_square_and_a_yellow_star.png"),
    Ask("How many shapes are there?", "a_purple_cross_an_orange_triangle_and_a_black_circle.png"),
    Ask("What happens in the clip?", "a_green_square_moves_to_the_right.png", "video"),
)
READ = (Ask(QUESTION), Ask(f"{codes(range(20))} What is the code of {NOUNS[5]}?"), Ask(f"Repeat this text:\n{TEXT}"))
"""The second one is longer than a step; n-grams of its prompt draft the answer to the third one."""
NEXT = replace(SEEN[1], question="Where is the yellow star?")
OTHER = replace(SEEN[1], file="a_blue_square_and_a_green_star.png")


class Tour(Stage):
    """The parts of m6's tour."""

    engine_class = LLMEngine

    def run(self, num_texts: int, group: DisaggregationConfig | None) -> None:
        """Run the parts that one engine shows, then those that this group of engines shows."""
        with self.stack:
            self.readers.append(positions := PositionsView())
            engine, asks = self.engine(), [READ[number % len(READ)] for number in range(num_texts)]
            try:
                prompt_of(engine, SEEN[0].content)
                asks = [*SEEN, *asks]
            except InvalidPromptError as error:
                self.console.print(Text(f"Pictures, with parts 2 and 3, are left out: {error}.", style="yellow"))
            batch = {f"req-{number}": ask for number, ask in enumerate(asks)}
            alone = self.show_batch(engine, batch)
            if len(asks) > num_texts:
                self.show_positions(positions)
                self.show_again(engine, alone["req-1"].text)
            if group is not None:
                two = self.show_two_engines(group, batch, alone)
                self.show_gaps({TWO: two, ONE: engine})
            self.show_overlap({rid: ask for rid, ask in batch.items() if not ask.file})

    def steps(self, engine: LLMEngine, batch: Mapping[str, Ask]) -> Iterator[Outputs]:
        """Add all requests, and yield their outputs after each step."""
        params, outputs = several(self.params), Outputs()
        for rid, ask in batch.items():
            prompt = prompt_of(engine, ask.content)
            engine.add_request(prompt, params, request_id=rid, **options_for(engine, self.options, prompt))
        while engine.has_unfinished_requests():
            outputs |= {rid: checked(output) for rid, output in engine.step().items()}
            yield outputs

    def show_batch(self, engine: LLMEngine, batch: Mapping[str, Ask]) -> Outputs:
        """Run the batch, with the answers below their pictures, on a terminal as they come.

        All requests come at the same time. The vision tower makes embeddings of the patches of a picture. They stand in
        the prompt as tokens, and the scheduler treats them like all others.
        """
        open_part(self.console, "1. Pictures, a clip and texts in one batch", self.show_batch)
        outputs = Outputs()
        with Live(get_renderable=lambda: cards(batch, outputs, self.console), console=self.console):
            for changed in self.steps(engine, batch):
                outputs |= changed
                time.sleep(PACE if self.console.is_terminal else 0)
        stats: Any = engine.stats()
        made = f"{some(stats.num_encoded_tokens, 'token')} of {some(stats.num_encoded_items, 'item')}"
        tower = f"the vision tower made {made} in {stats.encoder_seconds * 1e3:.1f} ms"
        self.console.print(f"\nThe prompts have {some(stats.num_prompt_tokens, 'token')} in all; {tower}.")
        return outputs

    def show_positions(self, view: PositionsView) -> None:
        """Draw the positions of the first picture and of the clip.

        Every token has three positions: in time, in height and in width. A text counts up on all three alike. The
        tokens of a picture share the time, and have the row and the column of their patch. The frames of a clip are
        encoded in pairs, each behind its time as a text: a later pair has a later position.
        """
        open_part(self.console, "2. The positions of the tokens", self.show_positions)
        for rid in ("req-0", "req-3"):
            assigned = view.assigned[rid]
            end = assigned.num_tokens + assigned.delta
            self.console.print(Text(f"{rid}: {assigned.num_tokens} tokens, {end} positions ({KEY})", style="bold"))
            self.console.print(view.draw(rid, self.console.width))

    def show_again(self, engine: LLMEngine, answer: str) -> None:
        """Ask about the second picture again, and about one that differs in a colour; print the work for each.

        The KV of a picture depends on all tokens before it, its embeddings on the picture alone. So the next question
        in a conversation finds the KV. Another conversation, with other words before the picture, finds the embeddings.
        A picture whose star has another colour is a new one.
        """
        open_part(self.console, "3. The same picture again", self.show_again)
        past = [{"role": "user", "content": SEEN[1].content}, {"role": "assistant", "content": answer}]
        prompts = {
            "next question": prompt_of(engine, NEXT.question, past),
            "other conversation": prompt_of(engine, NEXT.content[::-1]),
            "other star": prompt_of(engine, OTHER.content),
        }
        columns = [Column(name, no_wrap=True) for name in ("", "prompt", "KV found", "embeddings", "first token")]
        table = Table(*columns, "answer", box=None, padding=(0, 2, 0, 0))
        for name, prompt in prompts.items():
            before: Any = engine.stats()
            output = checked(
                engine.generate(prompt, replace(self.params, n=1), **options_for(engine, self.options, prompt))
            )
            after: Any = engine.stats()
            made = after.num_encoded_tokens - before.num_encoded_tokens
            found = after.num_encoder_hits - before.num_encoder_hits
            embeddings = f"{made} made" if made else "found" if found else "not read"
            ttft = f"{(output.metrics.time_to_first_token or 0.0) * 1e3:.1f} ms"
            cached = str(output.metrics.cached_tokens)
            table.add_row(name, f"{len(prompt)} tokens", cached, embeddings, ttft, Text(output.text, style="green"))
        self.console.print(table)

    def show_two_engines(self, group: DisaggregationConfig, batch: Mapping[str, Ask], alone: Outputs) -> LLMEngine:
        """Run the batch through a group of engines; return the group. `alone`: the outputs of one engine.

        The same requests once more. One engine computes prompts, another one the answers. Before it can answer, it must
        have the KV of the prompt, which moves in chunks of whole pages, the first ones while the rest of the prompt is
        still being computed. Chunks and pages: arrived/sent, and arrived/expected; on a terminal in slow motion.
        """
        open_part(self.console, "4. Prefill in one engine, decode in another", self.show_two_engines)
        start = len(self.records)
        with starting(group, self.console):
            engine: LLMEngine = self.engine(disaggregation_config=group, parts=None)
            *_, together = self.steps(engine, batch)
        replay(self.records[start:], self.console)
        same = same_answers([alone[rid].outputs for rid in batch], [together[rid].outputs for rid in batch])
        self.console.print(f"\nCompared with one engine, in part 1: {same}")
        return engine

    def show_gaps(self, engines: Mapping[str, LLMEngine]) -> None:
        """Measure the engines in turn, without a trace; print the gaps of the streams, and the price.

        {streams} streams of {length} tokens, and a prompt of {prompt:,} tokens whenever each has {every} more. One
        engine must compute the prompts between the tokens of the streams; of two, the one that decodes never computes a
        prompt. The two sides take turns; that takes some seconds.
        """
        length, rng = min(PROMPT_TOKENS, engines[ONE].stats().max_model_len // 2), Random(0)
        numbers = {"streams": NUM_STREAMS, "length": STREAM_TOKENS, "prompt": length, "every": EVERY}
        title = "5. The longest gap of a stream, with one engine and with two"
        open_part(self.console, title, self.show_gaps, **numbers)
        params = SamplingParams(max_tokens=STREAM_TOKENS, ignore_eos=True)
        tokens = partial(rng.choices, range(256, 4000))
        streams = [(tokens(k=64), params) for _ in range(NUM_STREAMS)]
        late = [(tokens(k=length), replace(params, max_tokens=8)) for _ in range(STREAM_TOKENS // EVERY - 1)]
        run = partial(run_streams, streams=streams, late=late, every=EVERY, options={"speculate": False})
        rounds = self.measured(engines, run)
        show_times(self.console, rounds, RECORDED, RECORDED_ON)
        price = "The price: with two engines a prompt waits behind the prompts before it."
        total = (
            "The total: on one machine the two share cores and memory, and messages come on top; in a larger system "
            "each has a device of its own."
        )
        bullets(self.console, [price, total])

    def show_overlap(self, batch: Mapping[str, Ask]) -> None:
        """Run these requests in overlapped steps; print the last launches and arrivals, and the time that was hidden.

        One engine again. Up to here the device waits while Python decides about a step and books it. Now a step is
        launched before the tokens of the step before have arrived, so that the device computes meanwhile.
        """
        open_part(self.console, "6. The device never waits", self.show_overlap)
        start, limits = len(self.records), replace(self.configs["scheduler_config"], enable_overlap=True)
        engine = self.engine(scheduler_config=limits, speculative_config=SpeculativeConfig())
        *_, _ = self.steps(engine, batch)
        bullets(self.console, self.sentences(lambda e: isinstance(e, NormalOrder | StepLaunched | StepArrived))[-6:])
        arrived = [record.event for record in self.records[start:] if isinstance(record.event, StepArrived)]
        device, hidden = sum(e.device_ms for e in arrived), sum(max(e.device_ms - e.waited_ms, 0.0) for e in arrived)
        if arrived:
            self.console.print(
                f"\n{some(len(arrived), 'step')}: the device computed for {device:.1f} ms, and the host did other work "
                f"during {hidden:.1f} ms of that."
            )


def options_for(engine: Any, options: Mapping[str, Any], prompt: Any) -> dict[str, Any]:
    """Return the options of a request with this prompt: a draft model takes texts only."""
    has_pictures = getattr(prompt, "multimodal_inputs", None) is not None
    is_excluded = has_pictures and engine.config.speculative.method == "draft_model"
    return {**options, "speculate": False} if is_excluded else dict(options)


def starting(group: DisaggregationConfig | None, console: Console) -> Status:
    """Print that the engines of a group start; return the sign of progress of a start, on a terminal, as a context."""
    if group is not None:
        console.print(f"{some(group.prefill + group.decode, 'engine')} load the model and join ...")
    return console.status("starting")


def cards(batch: Mapping[str, Ask], outputs: Outputs, console: Console) -> Group:
    """Return the pictures side by side, each above its question and its answers; then the texts."""
    seen = [rid for rid, ask in batch.items() if ask.file]
    columns = min(console.width // max(len(seen), 1) - 2, MOST_COLUMNS)
    pictures = Table.grid(*(Column(width=columns) for _ in seen), padding=(0, 2, 0, 0))
    pictures.add_row(*(batch[rid].drawn(console, columns) for rid in seen))
    pictures.add_row(*(card(rid, batch[rid], outputs) for rid in seen))
    return Group(pictures, *(card(rid, batch[rid], outputs) for rid in batch if rid not in seen))


def card(rid: str, ask: Ask, outputs: Outputs) -> Text:
    """Return a question, without the middle of a long one, and the answers to it."""
    line = " ".join(ask.question.split())
    question = line if len(line) < 72 else f"{line[:28]} ... {line[-36:]}"
    answers = [" ".join(answer.text.split()) for answer in outputs[rid].outputs] if rid in outputs else []
    return Text.assemble((f"{rid}: {question}\n", "bold"), ("\n".join(answers), "green"), "\n")
