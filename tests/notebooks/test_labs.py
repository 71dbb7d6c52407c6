"""What lessons show beside their exercises is true: traced requests, the recorded day, the effects of planted bugs."""

import ast
import asyncio
import re
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import RESULTS
from benchmarks.m1.trace import traced_steps
from benchmarks.m2 import trace as m2_trace
from benchmarks.m3 import trace as m3_trace
from benchmarks.m4 import trace as m4_trace
from benchmarks.m4.caches import Server
from benchmarks.m4.eviction import prepared, replay as careful_replay
from benchmarks.m4.traffic import FILE, as_csv, generate, recorded
from benchmarks.m4_tiers.states import WAYS, changes
from benchmarks.m5 import trace as m5_trace
from m1_single_request.events import Batch
from m1_single_request.scheduler import Scheduler
from m1_single_request.trace_readers import Records
from m3_paged_attention.models.qwen3_moe import SparseMLP
from m4_radix_cache.mem_cache.block_hash_cache import BlockHashCache
from m4_radix_cache.mem_cache.radix_cache import RadixCache
from m6_multimodal_pd import SamplingParams
from m6_multimodal_pd.disaggregation.staging import StagedSource
from m6_multimodal_pd.errors import TransferError
from m6_multimodal_pd.graph_runner import StepInputs
from m7_serving.mailbox import Mailbox
from notebooks import checks_m3, checks_m4_tiers, checks_m6, checks_m6_overlap, checks_m6_pd, checks_m7
from notebooks.checks import listing
from notebooks.checks_m4 import HOUR, recorded_hour, replay
from notebooks.journey import Backend
from notebooks.shapes import Shape, picture
from tests.notebooks.exercises import M1, M2, M3, M4, M4_TIERS, M5, M6, M6_OVERLAP, M6_PD, M7, Exercises
from tests.notebooks.lessons import NOTEBOOKS, source
from tests.notebooks.wrong_m6_pd import Keeps

# --- listings and traces ----------------------------------------------------------------------------------------------


def test_a_listing_is_the_source_of_the_package_in_text_and_colours() -> None:
    shown = listing(Scheduler.schedule)
    assert repr(shown).startswith("m1_single_request/scheduler.py: Scheduler.schedule\ndef schedule(self)")
    assert "<span" in shown._repr_html_() and "monokai" not in shown._repr_html_()


def test_the_trace_on_the_page_of_m1_is_what_the_engine_says_today() -> None:
    def words(text: str) -> str:  # without line breaks, and without probabilities: machines differ in the last digit
        return re.sub(r"The model's favourites for \S+: .*?%\. For", "For", " ".join(text.split()))

    stored = (RESULTS / "m1_single_request_trace.txt").read_text(encoding="utf-8")
    assert words(stored) == words(traced_steps())


def test_the_notebooks_of_m2_and_m3_trace_the_requests_of_their_pages() -> None:
    assert all(f'"{rid}": "{prompt}"' in M2.lesson.code() for rid, (prompt, _) in m2_trace.REQUESTS.items())
    assert all(prompt in M3.lesson.code() for prompt, _ in m3_trace.REQUESTS.values())


@pytest.mark.parametrize(
    ("taught", "traced", "first", "names"),
    [
        (M4, m4_trace, "TURNS = (", "SYSTEM TURNS MODEL MEMORY LIMITS"),
        (M5, m5_trace, "ARRIVALS = {", "MODEL MEMORY LIMITS GUESSES ARRIVALS"),
    ],
    ids=["m4", "m5"],
)
def test_a_notebook_traces_with_the_settings_of_its_page(
    taught: Exercises, traced: Any, first: str, names: str
) -> None:
    (cell,) = [source(cell) for cell in taught.lesson.cells("code") if first in source(cell)]
    assignments = [node for node in ast.parse(cell).body if isinstance(node, ast.Assign)][:4]
    defined = dict(vars(taught.package))
    exec(compile(ast.Module(assignments, type_ignores=[]), "cell", "exec"), defined)
    for name in names.split():
        assert defined[name] == getattr(traced, name), name
    assert f"SamplingParams(max_tokens={traced.PARAMS.max_tokens}" in cell
    assert ("ignore_eos=True" in cell) == traced.PARAMS.ignore_eos


# --- a request alone --------------------------------------------------------------------------------------------------


def test_the_labs_scheduler_breaks_an_answer_visibly_and_its_milder_form_does_not() -> None:
    broken = M1.lesson.defined("OffByOne", {"Scheduler": Scheduler})
    parts = [Scheduler, broken, M1.lesson.defined("MilderForm", {"OffByOne": broken})]
    texts, starts = [], []
    for part in parts:
        records = Records()
        with M1.package.LLMEngine(parts={"scheduler": part}) as engine:
            asked = [{"role": "user", "content": "What is a KV cache?"}]
            texts.append(engine.chat(asked, M1.package.SamplingParams(max_tokens=48)).text)
            engine.tracer.attach(records)
            engine.generate([300] * 9, M1.package.SamplingParams(max_tokens=4, ignore_eos=True))
        starts.append([batch.prefix_lens[0] for _, batch in records.of(Batch)])
    assert starts == [[0, 9, 10, 11], [0, 10, 12, 14], [0, 10, 11, 12]]
    assert texts[0] == texts[2] and texts[1].split()[:4] == texts[0].split()[:4]
    assert len(set(texts[1].split()) - set(texts[0].split())) > 8


def test_the_broken_answer_on_the_page_is_the_stored_one() -> None:
    outputs = [output for cell in M1.lesson.cells("code") for output in cell["outputs"]]
    printed = "".join(line for output in outputs for line in output.get("text", []))
    page = (NOTEBOOKS.parent / "docs" / "m1_single_request.md").read_text(encoding="utf-8")
    for name in ("m1", "off by one"):
        (answer,) = re.findall(rf"^{name} +(A KV cache .*)$", printed, re.MULTILINE)
        assert f"| {name} | {answer} |" in page


# --- tiers ------------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_the_labs_router_is_right_in_float32_and_wrong_in_a_third_of_the_weights_of_bfloat16() -> None:
    hasty = M3.lesson.defined("HastyMLP", {"SparseMLP": SparseMLP, "torch": torch})
    torch.manual_seed(0)
    logits, wrong = torch.randn(1000, 8), {}
    for dtype in (torch.float32, torch.bfloat16):
        (wanted, right), (chosen, weights) = (checks_m3.routed(each, logits.to(dtype)) for each in (SparseMLP, hasty))
        assert torch.equal(wanted, chosen)
        wrong[dtype] = float((weights != right).float().mean())
    assert wrong[torch.float32] == 0 and 0.3 < wrong[torch.bfloat16] < 0.35


@pytest.mark.parametrize(("width", "wrong"), [(48, []), (32, ["gate_up"]), (64, ["down"])])
def test_the_labs_loader_is_wrong_where_a_shape_is_the_same_transposed(width: int, wrong: list[str]) -> None:
    hasty = M3.lesson.defined("hasty_experts", {})
    stored = {"gate_up": torch.randn(4, 2 * width, 64), "down": torch.randn(4, 64, width)}
    found = dict(zip(stored, hasty(*stored.values(), 64, width), strict=True))
    assert [name for name, tensor in stored.items() if not torch.equal(tensor, found[name])] == wrong


def test_the_picture_of_a_nodes_states_has_the_changes_that_happen_today() -> None:
    assert {(before, after) for before, after, _ in changes()} == set(WAYS)


def test_a_reader_that_skips_the_wait_for_slow_copies_garbles_answers() -> None:
    right, garbled = checks_m4_tiers.answers_of(None), checks_m4_tiers.answers_of(M4_TIERS.lesson.defined("Skips", {}))
    assert garbled != right
    assert garbled[:2] == right[:2]  # nothing is loaded for these


# --- the recorded day of m4 -------------------------------------------------------------------------------------------


def test_the_recorded_day_is_the_one_that_the_generator_draws() -> None:
    assert FILE.read_text(encoding="utf-8") == as_csv(generate())


@pytest.mark.parametrize(("policy", "capacity"), [("slru", 16 * 1024), ("lru", 64 * 1024)])
def test_the_hour_of_the_notebook_is_an_hour_of_the_recorded_day(policy: str, capacity: int) -> None:
    hour = prepared(recorded()[HOUR])
    wanted = careful_replay(Server(RadixCache, num_tokens=capacity, page_size=16, policy=policy), hour).all
    assert replay(recorded_hour(), capacity, policy) == wanted


def test_both_designs_replay_the_same_hour() -> None:
    hour = recorded_hour()[:100]
    room = sum(len(key) for key, _, _ in hour)
    assert replay(hour, room // 16 * 16) == replay(hour, room // 16 * 16, cache_class=BlockHashCache)


# --- pictures ---------------------------------------------------------------------------------------------------------


def test_two_pictures_of_the_same_squares_have_the_same_numbers_and_other_grids() -> None:
    wide = checks_m6.two_wide()
    tall = checks_m6.another_shape(wide)
    assert wide.shape == (96, 128, 3) and tall.shape == (128, 96, 3)
    with checks_m6.new_engine() as engine:
        prompts = [
            engine.chat_prompt([{"role": "user", "content": [{"type": "image", "image": shown}]}])
            for shown in (wide, tall)
        ]
    first, second = (prompt.multimodal_inputs.mm_items[0] for prompt in prompts)
    assert np.array_equal(first.feature, second.feature)
    assert (first.grid_thw, second.grid_thw) == ((1, 6, 8), (1, 8, 6))
    assert np.array_equal(checks_m6.another_shape(tall), wide)


def test_the_counts_of_swapped_positions_in_the_text_are_those_of_the_stored_output() -> None:
    outputs = [output for cell in M6.lesson.cells("code") for output in cell["outputs"]]
    printed = "".join(line for output in outputs for line in output.get("text", []))
    assert "swapped positions, wrong answers: describe 6 of 24, where 0 of 24\n" in printed
    (text,) = [text for text in map(source, M6.lesson.cells("markdown")) if "Look at what it does *not* do" in text]
    assert "six of 24 descriptions" in text and "of the 24 questions where a thing is, none" in text


# --- prefill and decode -----------------------------------------------------------------------------------------------


def test_the_labs_delta_changes_answers_about_pictures_and_none_about_texts() -> None:
    shown = picture(Shape("small", "red", "star", "top"), Shape("big", "blue", "circle", "right"))
    asked = [{"type": "image", "image": shown}, {"type": "text", "text": "How many shapes are there?"}]
    params = SamplingParams(max_tokens=24)
    delta = M6_PD.lesson.defined("delta", {})
    with checks_m6_pd.new_engine() as alone, checks_m6_pd.new_group(delta=delta) as group:
        for content, same in (("What is prefill?", True), (asked, False)):
            messages = [{"role": "user", "content": content}]
            assert (alone.chat(messages, params).token_ids == group.chat(messages, params).token_ids) is same


def test_a_request_whose_frames_never_come_back_is_given_up_and_not_waited_for() -> None:
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    with checks_m6_pd.new_group(source=Keeps) as group:
        short, long = checks_m6_pd.outputs_of(group, [[300] * 10, [301] * 90], params)
        assert short.finished and long is None


def test_the_labs_source_changes_answers_without_an_error_and_with_checksums_there_is_one() -> None:
    hasty = M6_PD.lesson.defined("Hasty", {"StagedSource": StagedSource})
    # 22 whole pages: what lies behind the end of a page that is not full may be anything, NaN included
    prompt, params = [300 + 7 * i for i in range(88)], SamplingParams(max_tokens=6, ignore_eos=True)
    with checks_m6_pd.new_engine() as alone:
        right = alone.generate(prompt, params).token_ids
    with checks_m6_pd.new_group(source=hasty) as group:
        output = group.generate(prompt, params)
        assert output.error is None and output.token_ids != right
    with checks_m6_pd.new_group(source=hasty, debug=True) as group:
        error = group.generate(prompt, params).error
        assert isinstance(error, TransferError) and "is not what was sent" in str(error)


# --- overlapped and captured steps ------------------------------------------------------------------------------------

ANSWERS = {"ann": ["I", ".", "."], "bob": ["b"] * 6, "cid": ["c"] * 4, "dan": ["d"] * 3}


def test_the_labs_booking_gives_a_token_after_the_end_and_two_requests_the_same_row() -> None:
    hasty = M6_OVERLAP.lesson.defined("FreesAtOnce", {})
    calls = checks_m6_overlap.late_calls(hasty, ANSWERS)
    assert [call.delivered["ann"] for call in calls if "ann" in call.delivered] == ["I", ".", "."]
    assert sum(call.freed.count("ann") for call in calls) == 2
    wrong = [each for call in calls for each in call.wrong]
    assert wrong[0] == "step 3 runs ann in row 0, which is cid's now" and any("runs cid" in each for each in wrong)
    right = checks_m6_overlap.late_calls(checks_m6_overlap.ReferenceBooking, ANSWERS)
    assert not [each for call in right for each in call.wrong]
    assert [(number, call.freed) for number, call in enumerate(right) if "ann" in call.freed] == [(3, ["ann"])]


def test_the_labs_sizes_have_no_bucket_for_the_largest_steps_of_real_engines() -> None:
    scope = {"sizes_up_to": M6_OVERLAP.lesson.defined("sizes_up_to", {})}
    bucket_of = M6_OVERLAP.lesson.defined("bucket_of", {})
    for most, lost in ((12, 9), (100, 97), (200, 193)):
        assert bucket_of(lost - 1, scope["sizes_up_to"](most)) == lost - 1
        for num_tokens in (lost, most):
            with pytest.raises(StopIteration):
                bucket_of(num_tokens, scope["sizes_up_to"](most))
    assert bucket_of(512, scope["sizes_up_to"](512)) == 512


def test_a_captured_step_goes_on_reading_the_labs_old_buffers_without_an_error() -> None:
    moves = M6_OVERLAP.lesson.defined("Moves", {"StepInputs": StepInputs, "torch": torch})
    replayed = {}
    for kind in (StepInputs, moves):
        inputs = kind(checks_m6_overlap.LIMITS, checks_m6_overlap.PAGE_SIZE, torch.device("cpu"))
        kv = torch.zeros(checks_m6_overlap.NUM_SLOTS, dtype=torch.int64)
        captured = {bucket: checks_m6_overlap.CapturedStep(kv, inputs, bucket) for bucket in inputs.limits.buckets()}
        replayed[kind] = []
        for step in checks_m6_overlap.decode_steps([3, 3, 4]):
            inputs.pad_batch(*step)
            replayed[kind].append(captured[step.bucket].replay().tolist())
    assert replayed[moves] == [[0] * 4] * 3 and all(0 not in rows[:3] for rows in replayed[StepInputs])


def test_the_labs_ring_is_overrun_by_pieces_of_a_prompt_only_if_there_are_many() -> None:
    scope: dict[str, Any] = {}
    (cell,) = [source(cell) for cell in M6_OVERLAP.lesson.cells("code") if "class Ring" in source(cell)]
    exec(cell.partition("\n\n\nfor num_pieces")[0], scope)
    assert [scope["try_futures"](scope["Ring"], pieces) for pieces in (1, 5, 6)] == [1000, 1000, 2005]
    rows = M6_OVERLAP.lesson.solutions()["Ring"]
    assert [scope["try_futures"](rows, pieces) for pieces in (1, 5, 6, 99)] == [1000] * 4


# --- a server ---------------------------------------------------------------------------------------------------------


def test_the_ratios_on_the_page_are_those_of_the_stored_output() -> None:
    outputs = [output for cell in M7.lesson.cells("code") for output in cell["outputs"]]
    printed = "".join(line for output in outputs for line in output.get("text", []))
    (ratio,) = re.findall(r"steps in the event loop is (\d+) times", printed)
    ((on_thread, apart),) = re.findall(r"an engine on a thread (\d+%) of its tokens, one in a process (\d+%)", printed)
    page = " ".join((NOTEBOOKS.parent / "docs" / "m7_serving.md").read_text(encoding="utf-8").split())
    assert f"**{ratio} times** that with an engine in a process" in page
    assert f"**{on_thread}** of the tokens" in page and f"an engine in a process **{apart}**" in page


@pytest.mark.parametrize(("is_repaired", "least", "most"), [(False, 120, 120), (True, 2, 60)])
def test_the_labs_front_leaves_zombies_to_a_real_engine(is_repaired: bool, least: int, most: int) -> None:
    front_class: Any = M7.lesson.defined("Front", {"Mailbox": Mailbox})
    if is_repaired:
        front_class = M7.lesson.solutions()["Front"]

    async def tokens_for_readers_that_leave() -> int:
        backend = await Backend.start(max_num_seqs=4)
        front = front_class(backend)
        backend.deliver = front.deliver
        for rid in "ab":
            outputs = front.stream(rid, "red", SamplingParams(max_tokens=60, ignore_eos=True))
            await anext(outputs)
            await outputs.aclose()
        while (stats := await backend.stats()).num_running:
            await asyncio.sleep(0.005)
        await backend.close()
        return stats.num_output_tokens

    assert least <= asyncio.run(tokens_for_readers_that_leave()) <= most


def test_the_labs_chunks_are_right_for_tokens_that_are_whole_characters() -> None:
    chunks_class: Any = M7.lesson.defined("Chunks", {})
    for text, is_right in (("The KV cache has keys.", True), ("Grüße", False)):
        chunks, outputs = chunks_class(checks_m7.tokenizer()), checks_m7.outputs_of_text(text)
        assert ("".join(map(chunks.next, outputs)) == outputs[-1].text) is is_right
