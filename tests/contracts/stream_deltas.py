"""Contract of m7's deltas: what a chunk of a stream has, made of outputs that have everything so far."""

import asyncio
from collections import defaultdict
from random import Random
from typing import Any, NamedTuple

from msgspec.structs import replace

from m1_single_request.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from m7_serving import SamplingParams
from m7_serving.openai import deltas
from m7_serving.openai.requests import CompletionRequest
from tests.contracts.part import Broken, Part, same
from tests.m6_multimodal_pd.shipped import PROMPTS, text_engine
from tests.m7_serving.parsed import parsed
from tests.m7_serving.scripted import Watched, collected, endpoint_call, joined_text
from tests.m7_serving.shipped import text_llm

PART = Part(
    name="stream_deltas",
    target="m7_serving.openai.deltas:Deltas",
    lesson="docs/m7_serving.md#deltas-chunks-and-the-whole",
    starter="MyDeltas",
)

PROMPT = (1, 2, 3)
METRICS = RequestMetrics(0.0, None, None, len(PROMPT), 0, 0)


class Said(NamedTuple):
    """What a choice has so far. Tokens are 100, 101, ..."""

    text: str
    num_tokens: int
    end: str | None = None
    stop_reason: int | str | None = None

    def __str__(self) -> str:
        tokens = f"{self.num_tokens} token{'s' * (self.num_tokens != 1)}"
        return f"{self.text!r} of {tokens}{f', {self.end}' if self.end else ''}"

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(range(100, 100 + self.num_tokens))

    def completion(self, index: int, has_logprobs: bool) -> CompletionOutput:
        """The same as the engine has it."""
        rows = tuple({token: Logprob(-0.5, 1, f"<{token}>")} for token in self.token_ids)
        logprobs = rows if has_logprobs else None
        return CompletionOutput(index, self.text, self.token_ids, None, logprobs, self.end, self.stop_reason)


class Stream:
    """The deltas of one call, and the outputs that they were made of."""

    def __init__(self, part: Any, **params: Any) -> None:
        self.params = SamplingParams(**params)
        self.deltas = part(self.params)
        listed = ", ".join(f"{name}={value}" for name, value in params.items())
        self.done = [f"MyDeltas(SamplingParams({listed}))"]

    @property
    def on(self) -> str:
        """What was done, as a learner would write it; the last of it."""
        if len(self.done) <= 6:
            return "; ".join(self.done)
        return f"{self.done[0]}; ...; {'; '.join(self.done[-5:])}"

    def output(self, said: tuple[Said, ...], num_rows: int = len(PROMPT)) -> RequestOutput:
        """An output of the engine. `num_rows`: of the prompt's log-probabilities that are there."""
        completions = tuple(each.completion(index, self.params.logprobs is not None) for index, each in enumerate(said))
        rows = None if self.params.prompt_logprobs is None else (None,) * num_rows
        is_over = all(each.end for each in said)
        return RequestOutput("r", None, PROMPT, rows, completions, is_over, METRICS)

    def of(self, prompt: int, *said: Said, num_rows: int = len(PROMPT)) -> list[Any]:
        """The deltas of an output."""
        self.done.append(f"of({prompt}: {'; '.join(map(str, said))})")
        return list(self.deltas.of(prompt, self.output(said, num_rows)))

    def check(self, prompt: int, *said: Said, deltas: list[dict[str, Any]], hint: str, num_rows: int = 3) -> None:
        """Compare fields of the deltas of an output, as many of each as are given."""
        found = self.of(prompt, *said, num_rows=num_rows)
        names = list(deltas[0]) if deltas else ["choice", "text"]
        shown = [{name: getattr(delta, name) for name in names} for delta in found]
        same(shown, deltas, on=self.on, hint=hint)


def test_the_first_output_is_new_as_a_whole(part: Any) -> None:
    """The delta of the first output has its whole text and all of its tokens."""
    stream = Stream(part)
    delta = {"choice": 0, "prompt": 0, "text": "ab", "token_ids": (100, 101), "finish_reason": None}
    stream.check(0, Said("ab", 2), deltas=[delta], hint="Nothing was sent before, so everything is new.")
    whole = Stream(part)
    delta = {"text": "abc", "token_ids": (100, 101, 102), "finish_reason": "length"}
    hint = (
        "This is another call: nothing of it was sent. A whole answer is the first delta of a request that has ended."
    )
    whole.check(0, Said("abc", 3, "length"), deltas=[delta], hint=hint)


def test_a_delta_has_what_is_new(part: Any) -> None:
    """The delta of a later output has the characters and the tokens that the outputs before did not have."""
    stream = Stream(part)
    stream.of(0, Said("ab", 2))
    hint = "An output has everything so far: what was sent before is cut off."
    stream.check(0, Said("abcd", 4), deltas=[{"text": "cd", "token_ids": (102, 103)}], hint=hint)
    stream.check(0, Said("abcde", 5), deltas=[{"text": "e", "token_ids": (104,)}], hint=hint)
    newest = stream.output((Said("abcdef", 6),))
    are_newest = [delta.output is newest for delta in stream.deltas.of(0, newest)]
    on = "is the delta's `output` the last one?"
    same(
        are_newest,
        [True],
        on=f"{stream.on}; of(0: 'abcdef' of 6 tokens); {on}",
        hint="It is the output that the delta was made of.",
    )


def test_a_slow_reader_misses_nothing(part: Any) -> None:
    """If outputs between two others were never seen, the delta has what all of them would have had."""
    stream = Stream(part)
    stream.of(0, Said("a", 1))
    hint = "An output that was replaced on its way is not missed: count what was sent, not the outputs."
    stream.check(0, Said("abcdefgh", 8), deltas=[{"text": "bcdefgh", "token_ids": tuple(range(101, 108))}], hint=hint)


def test_characters_and_tokens_are_counted_apart(part: Any) -> None:
    """Tokens may come without text, and text without tokens: then the other part of the delta is empty."""
    stream = Stream(part)
    hint = "A character of several tokens comes with its last one, and text may be held back: there are two counts."
    stream.check(0, Said("", 2), deltas=[{"text": "", "token_ids": (100, 101)}], hint=hint)
    stream.check(0, Said("日本", 3), deltas=[{"text": "日本", "token_ids": (102,)}], hint=hint)
    hint = "A text may also have more characters than tokens, and the end may bring text alone."
    stream.check(0, Said("日本 is", 3), deltas=[{"text": " is", "token_ids": ()}], hint=hint)
    hint = "It is a delta even if nothing is new."
    stream.check(0, Said("日本 is", 3), deltas=[{"text": "", "token_ids": ()}], hint=hint)


def test_only_one_delta_of_a_choice_is_the_first(part: Any) -> None:
    """`is_first` is true in the first delta of a choice and in no other one, also if the first one is empty."""
    stream = Stream(part)
    stream.check(
        0, Said("", 0), deltas=[{"is_first": True, "text": ""}], hint="The first one, although nothing is in it."
    )
    hint = "A chunk with the role goes before the text, once: it was sent with the delta before."
    stream.check(0, Said("", 1), deltas=[{"is_first": False, "text": ""}], hint=hint)
    stream.check(0, Said("a", 2), deltas=[{"is_first": False, "text": "a"}], hint=hint)


def test_choices_have_numbers_of_their_own(part: Any) -> None:
    """The choice of output `i` of a prompt is the prompt's index times `n`, plus `i`; each has its own counts."""
    stream = Stream(part, n=2)
    hint = "Prompt 1 has the choices 2 and 3 if n is 2."
    fields = [{"choice": 0, "prompt": 0, "text": "ab"}, {"choice": 1, "prompt": 0, "text": "u"}]
    stream.check(0, Said("ab", 2), Said("u", 1), deltas=fields, hint=hint)
    fields = [{"choice": 2, "prompt": 1, "text": "xyz"}, {"choice": 3, "prompt": 1, "text": "k"}]
    stream.check(1, Said("xyz", 3), Said("k", 1), deltas=fields, hint=hint)
    hint = "What was sent of one choice says nothing about another one."
    fields = [{"choice": 0, "prompt": 0, "text": "c"}, {"choice": 1, "prompt": 0, "text": "v"}]
    stream.check(0, Said("abc", 3), Said("uv", 2), deltas=fields, hint=hint)
    check_other_order(part)


def check_other_order(part: Any) -> None:
    """The choices of an output may come in any order."""
    stream = Stream(part, n=2)
    said = Said("ab", 2), Said("u", 1)
    output = stream.output(said)
    output = replace(output, outputs=output.outputs[::-1])
    got = [(delta.choice, delta.text) for delta in stream.deltas.of(0, output)]
    on = f"{stream.on}; of(0: index 1 {said[1]}; index 0 {said[0]}): choice and text"
    hint = "The number of a choice is made of the `index` of its output, not its place in the output."
    same(got, [(1, "u"), (0, "ab")], on=on, hint=hint)


def test_log_probabilities_are_those_of_the_new_tokens(part: Any) -> None:
    """`logprobs` has the rows of the new tokens, and is None if the choice has None, and only then."""
    stream = Stream(part, logprobs=0)
    stream.of(0, Said("ab", 2))
    wanted = Said("abcd", 4).completion(0, True).logprobs
    assert wanted is not None
    hint = "There is a row for each token, so they are cut where the tokens are."
    stream.check(0, Said("abcd", 4), deltas=[{"token_ids": (102, 103), "logprobs": wanted[2:]}], hint=hint)
    hint = "An empty tuple means that no token is new, and None that nobody asked for rows."
    stream.check(0, Said("abcd ef", 4), deltas=[{"text": " ef", "token_ids": (), "logprobs": ()}], hint=hint)
    hint = "None means that nobody asked for rows; an empty tuple would mean that no token is new."
    Stream(part).check(0, Said("ab", 2), deltas=[{"token_ids": (100, 101), "logprobs": None}], hint=hint)


def test_the_last_delta_says_why_it_ends(part: Any) -> None:
    """The last delta of a choice has its `finish_reason` and its `stop_reason`, which are None before."""
    stream = Stream(part)
    stream.check(0, Said("a", 1), deltas=[{"finish_reason": None, "stop_reason": None}], hint="It goes on.")
    delta = {"text": "b", "finish_reason": "stop", "stop_reason": "."}
    hint = "Both come from the output; the new text goes with them."
    stream.check(0, Said("ab", 3, "stop", "."), deltas=[delta], hint=hint)


def test_a_choice_that_has_ended_has_no_delta(part: Any) -> None:
    """After the delta with its end a choice has no delta, although the outputs of its request still contain it."""
    stream = Stream(part, n=2)
    stream.of(0, Said("a", 1, "stop"), Said("u", 1))
    hint = "Choice 0 has ended, and choice 1 goes on: a client that gets an end twice takes it for an error."
    stream.check(0, Said("a", 1, "stop"), Said("uv", 2), deltas=[{"choice": 1, "text": "v"}], hint=hint)
    end = [{"choice": 1, "text": "", "finish_reason": "length"}]
    stream.check(0, Said("a", 1, "stop"), Said("uv", 2, "length"), deltas=end, hint=hint)
    stream.check(0, Said("a", 1, "stop"), Said("uv", 2, "length"), deltas=[], hint="Both have ended.")


def test_a_failure_is_no_delta(part: Any) -> None:
    """A choice that ends with `abort` or `error` has no delta for its end: it is reported in another way."""
    hint = "The names are in `FAILED`: an error is raised for them, and no chunk may look like a good end."
    for reason in ("abort", "error"):
        stream = Stream(part, n=2)
        stream.of(0, Said("a", 1), Said("u", 1))
        deltas = [{"choice": 1, "text": "v", "finish_reason": None}]
        stream.check(0, Said("ab", 2, reason), Said("uv", 2), deltas=deltas, hint=hint)


def test_deltas_wait_for_the_rows_of_the_prompt(part: Any) -> None:
    """If log-probabilities of the prompt are requested, there is no delta before all of them are there."""
    stream = Stream(part, prompt_logprobs=0)
    hint = "The output has 1 of 3 rows of the prompt. They belong to the first delta, so it has to wait."
    stream.check(0, Said("a", 1), deltas=[], num_rows=1, hint=hint)
    stream.check(0, Said("ab", 2), deltas=[], num_rows=0, hint="It has none of them.")
    first = [{"text": "abc", "token_ids": (100, 101, 102), "is_first": True}]
    stream.check(0, Said("abc", 3), deltas=first, hint="What has waited is not lost: nothing of it was sent.")


def test_the_newest_output_of_each_prompt_is_kept(part: Any) -> None:
    """`outputs` has the newest output of each prompt, by its index, also if it has given no delta."""
    stream = Stream(part, prompt_logprobs=0)
    given = {
        "the first of prompt 0": (0, stream.output((Said("a", 1),), num_rows=1)),
        "that of prompt 1": (1, stream.output((Said("u", 1),))),
        "the second of prompt 0": (0, stream.output((Said("ab", 2),), num_rows=1)),
    }
    for prompt, output in given.values():
        list(stream.deltas.of(prompt, output))
    names = {id(output): name for name, (_, output) in given.items()}
    got = {prompt: names.get(id(output), "another output") for prompt, output in stream.deltas.outputs.items()}
    on = "two outputs of prompt 0, without all rows of the prompt, and between them one of prompt 1; `outputs`"
    hint = "The usage is counted from them: set the entry before anything else."
    same(got, {0: "the second of prompt 0", 1: "that of prompt 1"}, on=on, hint=hint)
    usage = stream.deltas.usage()
    counts = usage["prompt_tokens"], usage["completion_tokens"]
    same(counts, (6, 3), on=f"{on}; the tokens of prompts and completions", hint=hint)


def test_it_is_right_for_any_outputs(part: Any) -> None:
    """Of any outputs of any prompts, the deltas of a choice joined are its newest output, and its end comes once."""
    rng = Random(1)
    for _ in range(40):
        n, num_prompts = rng.randrange(1, 4), rng.randrange(1, 4)
        stream = Stream(part, n=n, logprobs=0)
        said = [[Said("", 0)] * n for _ in range(num_prompts)]
        joined: dict[int, list[Any]] = defaultdict(list)
        for _ in range(12):
            prompt = rng.randrange(num_prompts)
            said[prompt] = [grown(rng, each) for each in said[prompt]]
            for delta in stream.of(prompt, *said[prompt]):
                joined[delta.choice].append(delta)
            for index, each in enumerate(said[prompt]):
                choice = prompt * n + index
                found = joined[choice]
                texts, ids = "".join(delta.text for delta in found), sum((delta.token_ids for delta in found), ())
                on = f"{stream.on}; the deltas of choice {choice}, joined"
                same((texts, ids), (each.text, each.token_ids), on=on)
                rows = [row for delta in found for row in delta.logprobs]
                same([list(row) for row in rows], [[token] for token in ids], on=f"{on}; tokens of the rows")
                firsts, ends = [delta.is_first for delta in found], [delta.finish_reason for delta in found]
                same(firsts, [True] + [False] * (len(found) - 1), on=f"{on}; is_first")
                same(ends, [None] * (len(found) - 1) + [each.end], on=f"{on}; finish_reason")


def grown(rng: Random, said: Said) -> Said:
    """The same choice some steps later."""
    if said.end is not None:
        return said
    text = said.text + "".join(rng.choices("abc 日", k=rng.randrange(4)))
    return Said(text, said.num_tokens + rng.randrange(3), rng.choice([None, None, None, "stop", "length"]))


def test_a_stream_joined_is_the_whole_answer(part: Any) -> None:
    """Of an engine, the chunks of a stream joined are the whole answer, and that of the engine alone."""
    Stream(part).of(0, Said("a", 1))  # an error here names its line
    asked = {"max_tokens": 8, "n": 2, "temperature": 2.0, "seed": 5, "logprobs": 0}

    async def ask() -> tuple[list[str], list[str]]:
        bodies = [parsed(CompletionRequest, {**asked, "prompt": list(PROMPTS), "stream": on}) for on in (False, True)]
        async with text_llm() as llm:
            calls = [
                endpoint_call(llm, body, model="tiny", request_id=str(number), watch=Watched())
                for number, body in enumerate(bodies)
            ]
            whole, streamed = await asyncio.gather(deltas.answer(calls[0]), collected(deltas.chunks(calls[1])))
        joined = joined_text(streamed)
        return [choice["text"] for choice in whole["choices"]], [joined[index].text for index in sorted(joined)]

    answer, stream = asyncio.run(ask())
    with text_engine() as engine:
        outputs = engine.generate_batch(PROMPTS, SamplingParams(**asked)).values()
        wanted = [completion.text for output in outputs for completion in output.outputs]
    on = f"completions of {len(PROMPTS)} prompts, n=2, drawn at temperature 2"
    if not len(answer) == len(stream) == len(wanted):
        raise Broken(on, f"{len(wanted)} choices", f"{len(answer)} of the answer, {len(stream)} of the stream")
    same(answer, wanted, on=f"{on}: the whole answer")
    same(stream, wanted, on=f"{on}: the stream, joined")
