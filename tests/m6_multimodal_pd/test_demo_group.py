"""The last part of the demo's tour: the same batch through engines that share the work, watched, followed and told.

The engines are in this process, where nothing else is said: then all of it happens in the same order every time.
"""

import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from m5_chunked_prefill_spec.config import SpeculativeConfig
from m5_chunked_prefill_spec.events import Batch
from m6_multimodal_pd import DisaggregationConfig, EngineLostError, demo
from m6_multimodal_pd.demo_parts import batch, engines_view, two_engines
from m6_multimodal_pd.demo_parts.post import Board, Post, Transfer, Word
from m6_multimodal_pd.demo_parts.stage import Ask
from m6_multimodal_pd.disaggregation.events import EngineJoined, Reported, RequestRouted
from m6_multimodal_pd.disaggregation.runtime.messages import Heartbeat

CPU = ["--device", "cpu", "--max-tokens", "3", "--threads", "1"]


def words(text: str) -> str:
    """A text without its line breaks."""
    return " ".join(text.split())


@pytest.fixture(autouse=True)
def without_waiting(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What is slowed down for people is not for tests; the demo's number of threads stays in its test."""
    monkeypatch.setattr(batch, "PACE", 0)
    monkeypatch.setattr(engines_view, "PAUSE_S", 0.0)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def tour_of(directory: Path, *flags: str, console: Console | None = None) -> str:
    """What a tour with these flags prints, without line breaks."""
    file = io.StringIO()
    console = console or Console(file=file, width=100, highlight=False)
    demo.run(demo.make_parser().parse_args(["--model", str(directory), *CPU, *flags]), console)
    return file.getvalue()


@pytest.fixture(scope="module")
def tour(seeing_directory: Path) -> str:
    """A tour with a group."""
    return tour_of(seeing_directory, "--transport", "in_process")


# --- the part ---------------------------------------------------------------------------------------------------------


def test_the_same_batch_goes_through_a_group(tour: str) -> None:
    out = words(tour)
    assert "4. Prefill here, decode there" in out and "5. What there is to see" in out
    assert out.count("prefill-0 decode-0") == 7
    assert "Through 1 + 1 engines 7 of 7 requests got the same answer as through one, token for token." in out
    assert "2 engines in this process share one model" in out and "start, each a process" not in out


def test_both_charts_have_one_scale_and_end_the_part(tour: str) -> None:
    part = tour[tour.index("4. Prefill here") : tour.index("5. What there is to see")]
    order = ("prefill-0  decode-0", "How the KV of", "one engine (aggregated)", "share the work (disaggregated)")
    places = [part.index(what) for what in order]
    assert places == sorted(places)
    one, several = part[places[2] : places[3]], part[places[3] :]
    assert len(re.findall("^req-", one, re.M)) == len(re.findall("^req-", several, re.M)) == 7
    scales = re.findall(r"^ +0 +(\d+) ms", part, re.M)
    assert len(scales) == 2 and scales[0] == scales[1]
    assert max(line.count("█") + line.count("░") for line in part.splitlines()) <= 57


def test_the_way_of_a_request_is_told_causes_before_effects(tour: str) -> None:
    out = words(tour[tour.index("How the KV of") : tour.index("one engine (aggregated)")])
    told = [
        "decode-0, step",
        "There is room for the",
        "prefill side: bootstrapping -> waiting for input",
        "is cut: tokens 0 to",
        "from page 0 on, lie ready for decode-0",
        "more will come",
        "came from prefill-0",
        "decode side: transferring -> success",
        "prefill side: transferring -> success",
    ]
    places = [out.index(words) for words in told]
    assert places == sorted(places)


def test_its_numbers_are_those_of_the_table(tour: str) -> None:
    rows = re.findall(r"^(req-\d) +prefill-0 +decode-0 +([\d,]+) +(\d+) ", tour, re.M)
    chunks = {rid: int(count) for rid, _, count in rows}
    most = max(chunks, key=lambda rid: chunks[rid])
    out = words(tour)
    assert f"How the KV of {most} moved," in out and chunks[most] > 1
    assert f"The KV of 7 prompts moved in {sum(chunks.values())} chunks:" in out
    assert f"That of {most} left prefill-0 in {chunks[most]} chunks, the first in its step" in out
    first, last = map(int, re.findall(r"the first in its step (\d+), the last in its step (\d+)", out)[0])
    assert first < last


def test_a_chunk_leaves_before_its_prompt_is_computed(tour: str) -> None:
    out = words(tour[tour.index("How the KV of") : tour.index("one engine (aggregated)")])
    assert out.index("from page 0 on, lie ready for decode-0") < out.rindex("is cut: tokens")


def test_a_group_that_cannot_be_started_is_one_line_of_the_tour(
    seeing_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr("subprocess.Popen", refuse)
    out = words(tour_of(seeing_directory, "--pd"))
    assert "2 engines start, each a process that loads the model" in out
    assert "The group did not work: a process cannot be started: no more processes" in out
    assert "5. What there is to see" in out and "Traceback" not in out and "moved in" not in out


def test_a_group_that_is_lost_on_the_way_is_one_line_of_the_tour(
    seeing_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(*_: object, **__: object) -> None:
        raise EngineLostError("engine 'decode-0' is lost: its process was killed by signal 9")

    monkeypatch.setattr(two_engines, "warm_up", lose)
    out = words(tour_of(seeing_directory, "--transport", "in_process"))
    assert "The group did not work: engine 'decode-0' is lost: its process was killed by signal 9" in out
    assert "5. What there is to see" in out and "Through 1 + 1 engines" not in out


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", DisaggregationConfig()),
        ("--model somewhere", None),
        ("--prompt hello", None),
        ("--chat", None),
        ("--pd", DisaggregationConfig()),
        ("--model somewhere --pd", DisaggregationConfig()),
        ("--prompt hello --pd", DisaggregationConfig()),
        ("--prefill 2", DisaggregationConfig(prefill=2)),
        ("--decode 3 --transport in_process", DisaggregationConfig(decode=3, transport="in_process")),
    ],
)
def test_the_flags_of_engines_that_share_the_work(flags: str, expected: DisaggregationConfig | None) -> None:
    assert demo.disaggregation_config(demo.make_parser().parse_args(flags.split())) == expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", "ngram"),
        ("--model somewhere", "ngram"),
        ("--speculative none", None),
        ("--speculative draft_model", "draft_model"),
        ("--prompt hello", None),
        ("--chat", None),
        ("--chat --speculative ngram", "ngram"),
    ],
)
def test_who_guesses(flags: str, expected: str | None) -> None:
    assert demo.speculative_config(demo.make_parser().parse_args(flags.split())).method == expected


# --- how it is watched ------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_on_a_terminal_engines_and_transfers_are_watched_and_shown_again(seeing_directory: Path) -> None:
    file = io.StringIO()
    given: dict[str, Any] = {"width": 80, "height": 60, "color_system": None, "force_terminal": True}
    tour_of(seeing_directory, "--transport", "in_process", console=Console(file=file, legacy_windows=False, **given))
    out = file.getvalue()
    now, again = out.index("as it happens"), out.index("times slower")
    assert now < again < out.index("How the KV of")
    frames = out[again:].split("its last step")
    assert len(frames) >= engines_view.FRAMES
    last = frames[-1][: frames[-1].index("times slower")]
    assert last.count("success            success") == 7 and "prefill-0" in last and "decode-0" in last
    assert "transferring" in out[now:again] or "transferring" in out[again:]


def said(engine: str, what: str, rid: str = "a", step: int = 1, **facts: Any) -> Word:
    """An engine's word."""
    return Word(
        0.0, engine, Reported(engine=engine, its_step=step, what=what, rids=(rid,), text="", facts=(*facts.items(),))
    )


def routed(rid: str, room: int) -> Word:
    given: dict[str, Any] = {"attempt": 1, "num_output_tokens": 0}
    return Word(0.0, "", RequestRouted(rid=rid, room=room, prefill="prefill-0", decode="decode-0", **given))


STORY = [
    routed("a", 7),
    said("decode-0", "kv_poll_changed", room=7, side="decode", old="BOOTSTRAPPING", new="WAITING_FOR_INPUT"),
    said("decode-0", "room_taken", room=7, num_pages=5),
    said("prefill-0", "kv_poll_changed", room=7, side="prefill", old="WAITING_FOR_INPUT", new="TRANSFERRING"),
    said("prefill-0", "chunk_sent", step=4, room=7, number=0, num_pages=2, num_bytes=2048),
    said("prefill-0", "chunk_sent", step=6, room=7, number=1, num_pages=3, num_bytes=3072),
    said("decode-0", "chunk_received", room=7, number=0, num_bytes=2048),
]


def board_of(*told: Word) -> Board:
    board = Board()
    board.hear(told)
    return board


def drawn(post: Post, board: Board, **size: int) -> str:
    """The view as text."""
    console = Console(file=io.StringIO(), **{"width": 80, "height": 40} | size)  # type: ignore[arg-type]
    console.print(engines_view.view(post, board, "now", console))
    file: Any = console.file
    return str(file.getvalue())


def test_a_transfer_s_line_has_both_states_and_what_has_come() -> None:
    own = board_of(*STORY).transfers[7]
    assert own.state == {"prefill": "transferring", "decode": "waiting for input"} and not own.is_over
    assert (len(own.sent), own.num_received, own.num_pages, own.all_pages, own.num_bytes) == (2, 1, 2, 5, 2048)
    assert re.search(
        r"^a +transferring +waiting for input +1/2 +2/5 +2\.0 KiB *$", drawn(Post(), board_of(*STORY)), re.M
    )


def test_the_next_attempt_of_a_request_begins_anew_and_late_words_of_the_first_change_nothing() -> None:
    board = board_of(
        *STORY, routed("a", 9), said("prefill-0", "chunk_sent", room=7, number=2, num_pages=1, num_bytes=9)
    )
    assert list(board.transfers) == [9] and board.transfers[9].sent == {}
    assert set(board.transfers[9].state.values()) == {"bootstrapping"}


def test_a_chunk_of_which_only_the_end_was_told_is_no_error() -> None:
    assert board_of(*STORY[:4], STORY[6]).transfers[7].num_received == 1


def test_an_engine_s_line_says_how_it_stands_and_what_it_did_in_what_is_left_of_the_screen() -> None:
    post = Post()
    for name in ("decode-0", "prefill-0"):
        post.engines[name] = EngineJoined(
            name=name, role=name[:-2], total_tokens=8192, page_size=16, max_model_len=4096
        )
    did = Reported(engine="prefill-0", its_step=12, what="batch", rids=(), text="Extend batch: " + "x" * 200, facts=())
    board = board_of(Word(0.0, "prefill-0", Heartbeat(12, 3, 4, 7000)), Word(0.0, "prefill-0", did))
    lines = drawn(post, board).splitlines()
    assert re.match(r"prefill-0 +12 +3 +4 +7,000 +Extend batch: x+…", lines[1]) and "free tokens" in lines[0]
    assert re.match(r"decode-0 +8,192 *$", lines[2]), "nothing is known yet but its memory"
    assert max(map(len, lines)) <= 80


def test_where_not_all_transfers_fit_those_that_are_over_are_left_out_first() -> None:
    over = [
        word
        for room in range(20)
        for word in (
            routed(f"r{room}", room),
            said("decode-0", "kv_poll_changed", room=room, side="decode", new="SUCCESS"),
        )
    ]
    text = drawn(Post(), board_of(*over, routed("last", 99)), height=16)
    assert len(text.splitlines()) <= 16 and re.search("^last ", text, re.M) and "15 transfers more" in words(text)


def test_heartbeats_are_taken_down_when_they_are_new() -> None:
    class Member:
        heartbeat: Heartbeat | None = None

    post, member = Post(), Member()
    post.look({"decode-0": member})
    member.heartbeat = Heartbeat(1, 0, 0, 9)
    for _ in range(2):
        post.look({"decode-0": member})
    assert [word.said for word in post.words] == [member.heartbeat]
    post.clear()
    post.look({"decode-0": member})
    assert len(post.words) == 1, "how it stands is known after what was said is forgotten"


def test_what_took_long_enough_to_be_seen_is_not_shown_again() -> None:
    post, console = Post(), Console(file=io.StringIO(), force_terminal=True)
    post.words = [Word(0.0, "a", Heartbeat(1, 0, 0, 9)), Word(engines_view.REPLAY_S, "a", Heartbeat(2, 0, 0, 9))]
    engines_view.replay(post, console)
    assert "slower" not in str(console.file.getvalue())  # type: ignore[attr-defined]


# --- what there is to see ---------------------------------------------------------------------------------------------


def test_of_a_transfer_in_one_chunk_nothing_is_said_of_a_first_and_a_last() -> None:
    own = Transfer("a", 1, "prefill-0", "decode-0", sent={0: (2, 5)}, num_received=1, num_pages=2, num_bytes=64)
    board = Board()
    board.transfers[1] = own
    assert two_engines.moved(board) == ["The KV of 1 prompt moved in 1 chunk: 2 pages, 64 bytes."]


def step(number: int, rids: str, lengths: tuple[int, ...], num_prompts: int) -> tuple[int, Batch]:
    many = (0,) * len(rids)
    lists: dict[str, Any] = {"prefix_lens": many, "seq_lens": many, "draft_lens": many, "out_slots": (), "left": ()}
    given: dict[str, Any] = {"mode": "mixed", "chunked": None, "num_running": 0, "budget": 9, **lists}
    return number, Batch(rids=tuple(rids), extend_lens=lengths, num_prompts=num_prompts, **given)


def test_the_prompt_that_was_cut_most_is_told_with_its_pieces() -> None:
    steps = [step(1, "ab", (5, 4), 2), step(2, "ab", (9, 1), 1), step(4, "acb", (3, 2, 1), 2)]
    (fact,) = batch.pieces(steps)
    assert "prompt of a was cut: 5, 9 and 3 tokens" in fact and "in steps 1 to 4" in fact and "went on, twice" in fact
    assert batch.pieces(steps[:1]) == []


def test_of_guesses_is_told_how_many_were_right_and_where() -> None:
    class Stats:
        num_draft_tokens, num_accepted_tokens, num_verifications, accept_length = 20, 12, 4, 4.0

    class Output:
        def __init__(self, rid: str, accepted: int) -> None:
            self.request_id, self.metrics = rid, self
            self.num_accepted_tokens = accepted

    class Settings:
        def __init__(self, method: Any) -> None:
            self.speculative = SpeculativeConfig(method=method)

    def told(method: Any, stats: Any, *accepted: int) -> str:
        asks = [Ask(f"question {i}") for i in range(len(accepted))]
        outputs: Any = [Output(f"req-{i}", count) for i, count in enumerate(accepted)]
        settings: Any = Settings(method)
        return " ".join(batch.guesses(settings, stats, asks, outputs))

    fact = told("ngram", Stats(), 3, 9)
    assert "12 of 20 guessed tokens were right, in 4 verifications: each brought its request 4.0 tokens" in fact
    assert "9 of the right ones are in the answer of req-1, to 'question 1'." in fact and "stood further up" in fact
    assert "further up" not in told("draft_model", Stats(), 3, 9)
    assert "of the right ones" not in told("ngram", Stats(), 0, 0)
    nothing = Stats()
    nothing.num_draft_tokens = 0
    assert told("ngram", nothing, 0) == ""
