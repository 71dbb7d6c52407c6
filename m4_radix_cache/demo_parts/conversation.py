"""Part 2 of the demo's tour: a conversation, whose every turn begins with all turns before it.

Part of `python -m m4_radix_cache.demo`; nothing in the engine depends on it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.text import Text

from m1_single_request.errors import EngineError
from m1_single_request.events import some
from m1_single_request.outputs import RequestOutput
from m4_radix_cache.demo_parts import stories
from m4_radix_cache.demo_parts.measure import checked, measure, run_together
from m4_radix_cache.demo_parts.stage import Row, Stage, faster, reuse_table
from m4_radix_cache.demo_parts.stories import Ask
from m4_radix_cache.llm_engine import LLMEngine


@dataclass(frozen=True)
class Turn:
    """A question with all that was said before it, and what came of it."""

    ask: Ask
    before: int | None
    """The number of the turn that it follows; None: the first."""
    output: RequestOutput
    reused: int

    @property
    def name(self) -> str:
        return self.output.request_id

    @property
    def computed(self) -> int:
        return len(self.ask.token_ids) - self.reused


def show_chat(stage: Stage, rivals: Mapping[str, LLMEngine]) -> list[str]:
    """Each turn with what it reused and the tree after it, then the times. Returns what there is to see in it."""
    engine, settings, console = stage.engine, stage.settings, stage.console
    engine.flush_cache()
    stage.view.look()
    console.print()
    stage.headline(
        "2. A conversation",
        "The cache is empty again. One user asks question after question. The whole conversation is sent each time, "
        "because the model remembers nothing.",
    )
    turns = converse(stage)
    prompts = [turn.ask.token_ids for turn in turns]

    def one_by_one(rival: LLMEngine) -> list[RequestOutput]:
        return [
            output
            for prompt in prompts
            for output in run_together(rival, [prompt], [settings.params], settings.options)
        ]

    with console.status("measuring", refresh_per_second=2):
        measured = measure(rivals, one_by_one)
    rows = [
        Row(
            f"turn {number}",
            turn.ask.title,
            turn.reused,
            turn.computed,
            {name: each.seconds_to_first_token[number - 1] for name, each in measured.items()},
        )
        for number, turn in enumerate(turns, 1)
    ]
    console.print(reuse_table(rows, list(measured)))
    later = [number for number, turn in enumerate(turns) if turn.before is not None]
    said = [of_answers(turns, engine.config.cache.page_size), faster("In the later turns", measured, later)]
    return [fact for fact in said if fact is not None]


def converse(stage: Stage) -> list[Turn]:
    """Ask the questions in turn and show what each finds."""
    engine, settings, console = stage.engine, stage.settings, stage.console
    system, past, turns = stories.system_prompt(engine), list[tuple[str, str]](), list[Turn]()
    for question in (*stories.CHAT, stories.SECOND_THOUGHT):
        is_second_thought = question == stories.SECOND_THOUGHT
        said_before = past[:-1] if is_second_thought else past
        ask = stories.turn(engine, system, said_before, question)
        if len(ask.token_ids) > stories.most_prompt_tokens(engine):
            console.print(f"[dim]The conversation ends: {some(len(ask.token_ids), 'token')} are too many.[/dim]")
            break
        (output,) = checked(run_together(engine, [ask.token_ids], [settings.params], settings.options))
        before = len(said_before) - 1 if said_before else None
        _, admit = stage.notes.first_admits()[output.request_id]
        turns.append(Turn(ask, before, output, admit.prefix))
        past.append((question, output.text))
        if is_second_thought:
            console.print(f"The user takes turn {len(turns) - 1} back, and asks something else.\n", style="italic")
        console.print(Text.assemble((f"Turn {len(turns)}  ", "bold"), question))
        console.print(Text(output.text, style="green"))
        console.print(Text(_reuse(turns), style="dim"))
        stage.show_cache()
        console.print()
    if not turns:
        raise EngineError("no turn of the conversation fits into this engine")
    return turns


def _reuse(turns: Sequence[Turn]) -> str:
    """What the last of these turns found, and of whom."""
    turn = turns[-1]
    said = f"{some(len(turn.ask.token_ids), 'prompt token')}: {turn.reused:,} reused, {turn.computed:,} computed"
    if turn.before is None:
        return f"{said}."
    answer = answer_tokens(turns[turn.before], turn)
    return f"{said}." + (f" The last {answer:,} reused are of the answer to turn {turn.before + 1}." if answer else "")


def answer_tokens(before: Turn, turn: Turn) -> int:
    """How many tokens of the answer to the turn before were reused: those behind its prompt."""
    told, answer = len(before.ask.token_ids), before.output.token_ids
    said_again = turn.ask.token_ids[told : told + len(answer)]
    same = 0
    while same < len(said_again) and said_again[same] == answer[same]:
        same += 1
    return max(0, min(turn.reused - told, same))


def of_answers(turns: Sequence[Turn], page_size: int) -> str | None:
    """What all turns but the first reused together."""
    later = [turn for turn in turns if turn.before is not None]
    if not later or not sum(turn.reused for turn in later):
        return None
    total, reused = sum(len(turn.ask.token_ids) for turn in later), sum(turn.reused for turn in later)
    answers = sum(answer_tokens(turns[turn.before], turn) for turn in later if turn.before is not None)
    most = max(turn.computed for turn in later)
    kept = f" Of those reused, {answers:,} are of the answer just before: what the model says is kept, too."
    rest = f", and what did not fill a page of {page_size} before it" if page_size > 1 else ""
    return (
        f"After its first turn the conversation reused {reused:,} of {some(total, 'prompt token')}, and computed at "
        f"most {most:,} for a turn: the new question{rest}."
        f"{kept if answers else ''}"
    )
