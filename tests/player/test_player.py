"""The page that replays a trace, in a real browser: steps, selection, two runs, bad files, and what it loads."""

import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from m1_single_request.player import main
from m1_single_request.trace_file import read_trace
from m4_radix_cache.views.radix_tree import TIERS, RadixTreeView
from stepwise_player.page import STATIC, bundle

pytestmark = pytest.mark.browser
MORE = pytest.mark.exhaustive
TESTS = Path(__file__).parents[1]
TRACES = TESTS.parent / "docs" / "assets" / "traces"
GOLDEN = {path.parts[-3][:2]: path for path in sorted(TESTS.glob("m*/golden/*.jsonl"))}
WIDE, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


class Shown:
    """The page of some traces, in a browser."""

    def __init__(self, page: Any, folder: Path, *traces: Path) -> None:
        self.page, path = page, folder / "run.html"
        self.requests, self.errors = list[str](), list[str]()
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        main([*map(str, traces), "-o", str(path)])
        page.goto(path.as_uri())
        page.wait_for_selector("#player > *")

    def texts(self, selector: str) -> list[str]:
        return [" ".join(text.split()) for text in self.page.locator(selector).all_inner_texts()]

    def text(self, selector: str) -> str:
        return " ".join(self.page.locator(selector).first.inner_text().split())

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)

    def walk(self) -> list[dict[str, Any]]:
        """Go to each place in turn; return what is shown there."""
        return self.page.evaluate(WALK)


WALK = """() => {
    const slider = document.querySelector(".controls input"), found = [];
    const words = text => text.replace(/\\s+/g, " ").trim();
    const all = (selector, text) => [...document.querySelectorAll(selector)].map(text);
    for (let x = 0; x <= Number(slider.max); x++) {
        slider.value = x;
        slider.dispatchEvent(new Event("input"));
        found.push({
            label: document.querySelector("output").textContent,
            sentences: all(".sentences li", item => words(item.firstChild.textContent)),
            texts: all(".texts p", item => words(item.textContent)),
            pages: Number(document.querySelector(".pages canvas").getAttribute("aria-label")?.split(" ")[0]),
            memory: all(".memory .key", item => item.textContent),
            step: document.querySelector(".budget").textContent,
        });
    }
    return found;
}"""


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Iterator[Any]:
    page = browser.new_page(viewport=WIDE)
    shown: list[Shown] = []

    def show(*traces: Path) -> Shown:
        shown.append(Shown(page, tmp_path, *traces))
        return shown[-1]

    yield show
    page.close()
    for each in shown:
        assert each.errors == []
        assert [url for url in each.requests if not url.startswith(("file:", "data:"))] == []


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def places_of(lines: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The events of each step; those after its end are of the next one."""
    places: list[list[dict[str, Any]]] = [[]]
    for line in lines:
        places[-1].append(line)
        if line["event"] == "step_done":
            places.append([])
    return places if places[-1] else places[:-1]


def with_sentences(folder: Path, name: str) -> tuple[Path, list[dict[str, Any]]]:
    """A golden trace with sentences, which it lacks to stay stable, and with times."""
    lines = [line | {"time": i / 100, "sentence": f"line {i}"} for i, line in enumerate(lines_of(GOLDEN[name]))]
    path = folder / f"{name}.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return path, lines


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", GOLDEN)
def test_each_step_has_its_sentences_and_the_texts_so_far(show: Any, tmp_path: Path, name: str) -> None:
    path, lines = with_sentences(tmp_path, name)
    places, texts = places_of(lines), dict[str, str]()
    for number, (shown, place) in enumerate(zip(show(path).walk(), places, strict=True), 1):
        for line in place:
            if line["event"] == "result":
                texts[line["rid"]] = texts.get(line["rid"], "") + line["new_text"]
        assert shown["label"] == f"step {number} of {len(places)}"
        assert shown["sentences"] == [line["sentence"] for line in place]
        assert shown["texts"] == [" ".join(f"{rid} {text}".split()) for rid, text in texts.items()]


USES = {
    "protected": "cached, in use",
    "owned": "of requests",
    "evictable": "cached, may be evicted",
    "available": "free",
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["m2", "m3", "m4", "m5"])
def test_the_memory_is_used_as_the_engine_counts_it(show: Any, name: str) -> None:
    """The page derives it from allocations, batches, insertions, splits and evictions; the engine counts its pool."""
    lines, compared = lines_of(GOLDEN[name]), 0
    size = next((line["block_size"] for line in lines if line["event"] == "kv_sized"), None)
    for shown, place in zip(show(GOLDEN[name]).walk(), places_of(lines), strict=True):
        for line in place:
            if line["event"] == "audit":
                assert shown["pages"] * size == line["total"] - line["available"], f"step {line['step']}"
                assert shown["memory"] == [f"{line[key]} {words}" for key, words in USES.items() if line[key]]
            elif line["event"] == "blocks_used":
                assert shown["pages"] == line["num_used"], f"step {line['step']}"
            elif line["event"] == "step_done" and name == "m2":
                assert shown["pages"] == line["num_running"], f"step {line['step']}: a slot for each"
            compared += line["event"] in ("audit", "blocks_used", "step_done")
    assert compared >= len(places_of(lines)) - 1


@pytest.mark.sample(1)
def test_the_memory_without_pages_is_what_requests_hold_and_what_is_reserved(show: Any) -> None:
    """The events count the KV memory in bytes, and a step's padding in places of the forward."""
    lines = lines_of(GOLDEN["m2"])
    size = lines[0]["kv_bytes_per_token"]
    for shown, place in zip(show(GOLDEN["m2"]).walk(), places_of(lines), strict=True):
        for line in (line for line in place if line["event"] == "kv_usage"):
            freed = sum(line["tokens"] for line in place if line["event"] == "free")
            used, reserved = line["kv_bytes_used"] // size - freed, line["kv_bytes_reserved"] // size
            assert shown["memory"] == [f"{used:,} in use"] * (used > 0) + [f"{reserved - used:,} reserved and empty"]
            padded = line["padded_tokens"]
            assert shown["step"].endswith(f"and {padded} place{'s' * (padded > 1)} of padding") == (padded > 0)


def recorded(folder: Path, *, group: Any = None, cache: Any = "radix", urgent: bool = False) -> Path:
    """Three requests in little memory, audited after each step; one leaves before its end. `group`: of engines.
    `urgent`: another one takes the places of two.

    Ids are longer than the words in a report of another engine.
    """
    import m6_multimodal_pd as face

    path, prompt = folder / "run.jsonl", list(range(5, 29))
    memory = face.CacheConfig(max_total_tokens=96, page_size=4, prefix_cache=cache, debug=True)
    trace = face.TraceConfig(jsonl=path)
    limits = face.SchedulerConfig(schedule_policy="priority", priority_preemption=True) if urgent else None
    configs = {"cache_config": memory, "disaggregation_config": group, "scheduler_config": limits}
    with face.LLMEngine(**{k: v for k, v in configs.items() if v is not None}, trace_config=trace) as engine:
        for number in range(3):
            params = face.SamplingParams(max_tokens=12, ignore_eos=True)
            engine.add_request([*prompt[: 12 + 6 * number], 40 + number], params, request_id=f"{number:0100}")
            engine.step()
        for number in range(40):
            engine.step()
            if number == 2 and urgent:
                engine.add_request([90, *prompt, *prompt], face.SamplingParams(max_tokens=4), priority=20)
            if number == 4:
                engine.abort_request(f"{2:0100}")
        engine.generate([70, *prompt], face.SamplingParams(max_tokens=40, ignore_eos=True))
    return path


ORACLE = """text => {
    const states = {}, found = {};
    const uses = {
        available: "free", evictable: "evictable", protected: "protected", owned: "owned",
    };
    for (const event of in_trace.parse(text)) {
        const state = states[event.engine] ??= new in_state.State();
        state.apply(event);
        if (event.event !== "audit") continue;
        const memory = state.memoryByUse();
        const missing = event.total - Object.keys(uses).reduce((sum, use) => sum + event[use], 0);
        const wrong = Object.entries(uses).filter(([use, name]) => memory[name] !== event[use]).map(([, name]) => name);
        (found[event.engine] ??= []).push(missing ? [`${missing} missing`, ...wrong] : wrong);
    }
    return found;
}"""


@MORE
@pytest.mark.parametrize("cache", ["radix", "hash", "chunk", "two engines", "preemption"])
def test_the_memory_of_any_cache_and_of_two_engines_is_used_as_they_count_it(
    browser: Any, tmp_path: Path, cache: str
) -> None:
    """Also while KV is on its way: one engine holds the pages of a prompt, the other has taken room for it."""
    from m6_multimodal_pd.disaggregation.config import DisaggregationConfig

    group = DisaggregationConfig(prefill=1, decode=1, transport="in_process")
    ways: dict[str, dict[str, Any]] = {"two engines": {"group": group}, "preemption": {"urgent": True}}
    path = recorded(tmp_path, **ways.get(cache, {"cache": cache}))
    assert ('"event": "preempt"' in path.read_text(encoding="utf-8")) == (cache == "preemption")
    page = browser.new_page()
    page.add_script_tag(content=bundle())
    found = page.evaluate(ORACLE, path.read_text(encoding="utf-8"))
    page.close()
    assert sum(map(len, found.values())) > 25 and len(found) == 1 + (cache == "two engines")
    assert [(engine, i, wrong) for engine, each in found.items() for i, wrong in enumerate(each) if wrong] == []


def tiered(folder: Path) -> list[Path]:
    """Random requests in little memory of both kinds, whose copies are late or fail, over a disk with KV of before."""
    import m4_radix_cache as face
    from tests.m4_radix_cache.engines import setting
    from tests.m4_radix_cache.tiers import Tiers

    random, paths = Random(3), list[Path]()
    for seed, policy in enumerate(("write_back", "write_through")):
        paths.append(folder / f"{policy}.jsonl")
        tiers = Tiers(64, policy, 1, seed, 0.2, folder / "disk", "wait_complete")
        configs = setting(3, tokens=88, conservativeness=0.0, **tiers.settings)
        trace = face.TraceConfig(jsonl=paths[-1])
        with face.LLMEngine(parts=tiers.parts(4), trace_config=trace, **configs) as engine:
            for _ in range(16):
                prompt = [*range(5, 14), *range(first := random.choice((14, 40, 60)), first + random.choice((4, 20)))]
                engine.add_request(prompt, face.SamplingParams(max_tokens=12, ignore_eos=True))
                for _ in range(random.randrange(6)):
                    engine.step()
            while engine.has_unfinished_requests():
                engine.step()
            engine.flush_cache("host")
            engine.generate(range(5, 25), face.SamplingParams(max_tokens=12, ignore_eos=True))
    return paths


NODES = """text => {
    const state = new in_state.State(), found = [];
    for (const event of in_trace.parse(text)) {
        state.apply(event);
        if (event.event !== "step_done") continue;
        found.push([...state.nodes].map(([id, {parent, tokens, pages, locked, tier}]) =>
            [id, parent, tokens, pages, locked, tier]));
    }
    return found;
}"""


def nodes_after_steps(path: Path) -> Iterator[list[Any]]:
    """The same as the console's view has them."""
    view = RadixTreeView()
    for record in read_trace(path, "m4_radix_cache"):
        view.read(record)
        if record.event.kind == "step_done":
            yield sorted(
                [node.number, node.parent.number, len(node.token_ids), [*node.pages], node.lock_ref, node.tier]
                for node in view.nodes.values()
                if node.parent is not None
            )


@MORE
def test_the_tiers_of_the_tree_are_those_of_the_view_in_the_console(show: Any, browser: Any, tmp_path: Path) -> None:
    """And so a screen reader and the memory's key have them."""
    page, seen = browser.new_page(), set[str]()
    page.add_script_tag(content=bundle())
    for path in tiered(tmp_path):
        expected, text = [*nodes_after_steps(path)], path.read_text(encoding="utf-8")
        assert [sorted(nodes) for nodes in page.evaluate(NODES, text)] == expected
        assert not any(wrong for wrong in page.evaluate(ORACLE, text)[""])
        seen |= {tier for nodes in expected for *_, tier in nodes}
    page.close()
    assert seen == set(TIERS)
    shown = show(path)
    places = [place["memory"] for place in shown.walk()]
    for nodes, memory in zip(expected, places, strict=False):
        on_host = sum(node[2] for node in nodes if node[5] != "device")
        assert (f"{on_host:,} in host memory" in memory) == (on_host > 0)
    titles = shown.page.locator(".tree .node[tabindex] title").all_text_contents()
    words = {
        number: f"{number}: {size} tokens, may be evicted{TIERS[tier]}" for number, _, size, *_, tier in expected[-1]
    }
    assert [title.partition(", pages")[0] for title in titles] == [
        f"node {words[int(title.split(':')[0][5:])]}" for title in titles
    ]
    assert any("also in host memory" in title for title in titles)


@MORE
def test_two_players_in_one_element_are_one(browser: Any) -> None:
    """The first one is closed: it no longer plays, and hears no keys."""
    page = browser.new_page()
    page.add_script_tag(content=bundle())
    found = page.evaluate(
        """async text => {
            const runs = [{name: "run", text}], first = mount(document.body, runs);
            first.toggle();
            const second = mount(document.body, runs), control = document.querySelector(".controls input");
            control.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowRight", bubbles: true}));
            await new Promise(resolve => setTimeout(resolve, 1000));
            return [first.x, second.x];
        }""",
        GOLDEN["m2"].read_text(encoding="utf-8"),
    )
    page.close()
    assert found == [0, 1]


@MORE
def test_odd_names_and_sizes_do_no_harm(show: Any, tmp_path: Path) -> None:
    """Names that every object of JavaScript has, an id as long as it may be, and the memory of a large GPU."""
    path, rid = tmp_path / "odd.jsonl", "x" * 4096
    lines = [
        {"step": 0, "event": "kv_sized", "num_blocks": 4_000_000, "block_size": 1},
        {"step": 0, "event": "request_added", "rid": rid, "len": 200_000},
        {"step": 0, "event": "request_added", "rid": "__proto__", "len": 1},
        {"step": 1, "event": "constructor", "rid": "constructor"},
        {"step": 1, "event": "blocks_allocated", "owner": rid, "block_ids": list(range(200_000))},
        {"step": 1, "event": "batch", "rids": [rid, "__proto__"], "mode": "decode"},
        {"step": 1, "event": "result", "rid": "__proto__", "new_text": "hello"},
        {"step": 1, "event": "step_done"},
    ]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    shown = show(path)
    assert shown.text(".texts") == "__proto__ hello"
    canvas = shown.page.locator(".pages canvas")
    assert canvas.get_attribute("aria-label") == "200000 of 4000000 pages are in use"
    assert canvas.evaluate("canvas => canvas.height") < 1000, "only what is in sight is drawn"
    shown.page.locator(".pages").evaluate("box => box.scrollTo(0, box.scrollHeight)")
    box = canvas.bounding_box()
    canvas.click(position={"x": 2, "y": box["height"] - 2})
    last = int(shown.text(".right h4").rsplit(" ", 1)[1])
    assert 3_999_000 < last <= 4_000_000


@MORE
def test_a_long_prompt_in_a_table_of_hashes_is_shown(show: Any, tmp_path: Path) -> None:
    """Each of its pages is a node, below the one before it."""
    path, pages = tmp_path / "long.jsonl", list(range(1, 8001))
    inserted = {"rid": "a", "node": 8000, "parent": 0, "insert_len": 8000, "existing": 0, "pages": pages}
    lines = [
        {"step": 0, "event": "kv_sized", "num_blocks": 9000, "block_size": 1},
        {"step": 1, "event": "inserted", **inserted, "last_access_time": None},
        {"step": 1, "event": "locked", "rid": "a", "node": 8000, "delta": 1},
        {"step": 1, "event": "step_done"},
    ]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    shown = show(path)
    assert shown.texts(".memory .key") == ["8,000 cached, in use", "1,000 free"]
    assert 50 < shown.page.locator(".tree .node").count() < 100


@MORE
def test_a_gzipped_file_that_is_cut_says_so(show: Any, tmp_path: Path) -> None:
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes(gzip.compress(GOLDEN["m2"].read_bytes())[:-9])
    assert show(path).text("#player") == "The trace cannot be shown: The gzipped file is damaged, or not whole."


@MORE
def test_a_page_replaces_no_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(GOLDEN["m2"].read_bytes())
    with pytest.raises(SystemExit):
        main([str(path), "-o", str(path)])
    assert "is a trace, which the page would replace" in capsys.readouterr().err
    assert path.read_bytes() == GOLDEN["m2"].read_bytes()


@MORE
def test_the_name_of_a_file_need_not_be_text(show: Any, tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"\xff.jsonl")
    path.write_bytes(GOLDEN["m2"].read_bytes())
    assert show(path).text("output") == "step 1 of 10"


@MORE
def test_keys_go_forward_and_back(show: Any) -> None:
    shown = show(GOLDEN["m2"])
    shown.page.locator(".controls input").focus()
    found = []
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "End", "Shift+ArrowLeft", "Home"):
        shown.press(key)
        found.append(shown.text("output").split()[1])
    assert found == ["2", "3", "2", "10", "1", "1"]


@MORE
def test_a_request_that_is_selected_has_its_whole_history_and_all_else_is_dimmed(show: Any, tmp_path: Path) -> None:
    path, lines = with_sentences(tmp_path, "m4")
    shown = show(path)
    shown.page.locator(".lanes").focus()
    shown.press("ArrowDown", "ArrowDown")
    second = [line["rid"] for line in lines if line["event"] == "request_added"][1]
    own = [line for line in lines if second in line.get("rids", [line.get("rid")])]
    assert shown.text(".right h4") == f"All that happens to request {second}"
    assert [text.split(" ", 1)[1].split(" m")[0] for text in shown.texts(".sentences > li")] == [
        line["sentence"] for line in own
    ]
    both = next(
        n
        for n, place in enumerate(places_of(lines))
        for line in place
        if line.get("rids") and len(line["rids"]) == 2 and line["event"] == "batch"
    )
    shown.page.locator(".controls input").fill(str(both))
    assert (
        shown.page.locator(".budget .part.dim").count() == 1
        and shown.page.locator(".budget .part:not(.dim)").count() == 1
    )
    shown.press("Escape")
    assert shown.page.locator(".dim").count() == 0


@MORE
def test_a_node_and_a_page_can_be_selected_and_lead_to_each_other(show: Any) -> None:
    shown, lines = show(GOLDEN["m4"]), lines_of(GOLDEN["m4"])
    shown.page.locator(".controls input").fill("2")
    node = shown.page.locator(".tree .node[tabindex]").first
    number = node.locator("text").text_content().split()[0]
    node.focus()
    shown.press("Enter")
    assert shown.text(".right h4") == f"All that happens to node {number}"
    about = [
        line
        for line in lines
        if int(number) in (line.get("node"), line.get("upper"), line.get("parent"), *line.get("nodes", ()))
    ]
    assert shown.text(".selected").startswith(f"{len(about)} events") and len(about) > 2
    assert 0 < shown.page.locator(".tree .node.dim").count() < shown.page.locator(".tree .node[tabindex]").count()
    shown.press("Escape")
    shown.page.locator(".pages canvas").click(position={"x": 30, "y": 5})
    assert shown.text(".right h4") == "All that happens to page 1"
    assert shown.page.locator(".tree .node[tabindex]:not(.dim)").count() == 1, "the node that has the page"


def test_two_runs_go_side_by_side_by_step_and_by_time(show: Any, tmp_path: Path) -> None:
    (first, lines), (second, others) = with_sentences(tmp_path, "m4"), with_sentences(tmp_path, "m2")
    shown = show(first, second)
    assert shown.texts("h3.run") == ["m4", "m2"]
    shown.press("End")
    shown.page.locator(".controls input").focus()
    shown.press("End")
    for own, text in zip((lines, others), shown.texts(".totals"), strict=True):
        finished = [line for line in own if line["event"] == "finish" and line["reason"] not in ("abort", "error")]
        assert f"{len(finished)} requests finished" in text
    shown.page.locator("select[aria-label=scale]").select_option("time")
    shown.page.locator(".controls input").fill("100")
    seconds = 0.1 * (len(lines) - 1) / 100
    for own, text in zip((lines, others), shown.texts(".totals"), strict=True):
        ends = [line["time"] for line in own if line["event"] == "step_done"]
        assert f"{max([end for end in ends if end <= seconds], default=ends[0]):.3f} s" in text


@MORE
def test_it_plays_and_stops_at_the_end(show: Any) -> None:
    shown = show(GOLDEN["m2"])
    shown.page.locator("select[aria-label=speed]").select_option(index=4)
    shown.page.get_by_role("button", name="play (space)").click()
    shown.page.wait_for_function("document.querySelector('output').textContent === 'step 10 of 10'")
    assert shown.page.get_by_role("button", name="play (space)").inner_text() == "▶"
    shown.page.get_by_role("button", name="first step (Home)").click()
    assert shown.text("output") == "step 1 of 10"


@MORE
def test_a_screen_reader_gets_each_step_in_words(show: Any, tmp_path: Path) -> None:
    path, lines = with_sentences(tmp_path, "m5")
    shown = show(path)
    shown.page.locator(".controls input").fill("3")
    batch = next(line for line in lines if line["event"] == "batch" and line["step"] == 4)
    assert shown.page.locator(".spoken").text_content() == f"step 4, 4 of 42. {batch['sentence']}"


@MORE
def test_each_event_leads_to_the_line_that_emits_it(show: Any) -> None:
    shown = show(GOLDEN["m4"])
    shown.page.locator(".controls input").fill("1")
    item = shown.page.locator(".sentences li", has_text="split").first
    where = item.locator("summary").inner_text()
    path, _, line = where.partition(":")
    item.locator("summary").click()
    code = (TESTS.parent / path).read_text(encoding="utf-8").splitlines()[int(line) - 1]
    assert path.startswith("m4_") and "Split" in code and code.strip() in item.locator("pre").inner_text()


@MORE
def test_a_place_in_the_code_is_that_of_the_engine_of_the_event(show: Any, tmp_path: Path) -> None:
    """An engine alone does not run the code of a group, and a prefill engine not that of a decode engine."""
    assert places_by_event(show(GOLDEN["m6"])) >= {
        ("", "matched", "m5_chunked_prefill_spec/batch_composer.py"),
        ("", "request added", "m4_radix_cache/scheduler.py"),
    }
    path, packed = tmp_path / "pd.jsonl", (TRACES / "m6_pd.jsonl.gz").read_bytes()
    lines = [json.loads(line) for line in gzip.decompress(packed).decode().splitlines()]
    kinds = [{"sentence": line["event"], "text": line.get("what")} for line in lines]
    path.write_text("\n".join(json.dumps(line | kind) for line, kind in zip(lines, kinds, strict=True)))
    assert places_by_event(show(path)) >= {
        ("router", "request_added", "m6_multimodal_pd/disaggregation/router.py"),
        ("prefill", "request_added", "m4_radix_cache/scheduler.py"),
        ("prefill", "matched", "m5_chunked_prefill_spec/batch_composer.py"),
        ("decode", "matched", "m6_multimodal_pd/disaggregation/decode_scheduler.py"),
    }


def places_by_event(shown: Shown) -> set[tuple[str, str, str]]:
    """Return role of the engine, sentence and file of all events."""
    found = {
        (label.partition("-")[0].split(" ")[0], text.strip(), file) for label, text, file in shown.page.evaluate(PLACES)
    }
    assert len({(role, text) for role, text, _ in found}) == len(found), "each has one place"
    return found


PLACES = """() => {
    const slider = document.querySelector(".controls input"), found = [];
    for (let x = 0; x <= Number(slider.max); x++) {
        slider.value = x;
        slider.dispatchEvent(new Event("input"));
        for (const item of document.querySelectorAll(".sentences > li")) {
            const label = item.querySelector(":scope > b")?.textContent ?? "";
            const text = [...item.childNodes].find(node => node.nodeType === Node.TEXT_NODE).textContent;
            found.push([label, text, item.querySelector("summary").textContent.split(":")[0]]);
        }
    }
    return found;
}"""


@MORE
def test_texts_of_a_trace_never_become_markup(show: Any, tmp_path: Path) -> None:
    path, evil = tmp_path / "evil.jsonl", "<img src=x onerror=alert(1)></script><!--"
    lines = [
        {"step": 0, "event": "request_added", "rid": evil, "sentence": evil},
        {"step": 1, "event": "batch", "rids": [evil], "mode": "prefill", "sentence": evil},
        {"step": 1, "event": "result", "rid": evil, "new_text": evil, "tokens": [1], "sentence": evil},
        {"step": 1, "event": "step_done", "sentence": evil},
    ]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    shown = show(path)
    assert shown.page.locator("main img").count() == 0
    assert shown.text(".texts p") == f"{evil} {evil}"


@MORE
@pytest.mark.parametrize(
    "text, message",
    [
        ("", "This file has no events."),
        ("hello\n", "Line 1 is no event of a trace: hello"),
        ('{"step": 1}\n{"step": 1, "event": "x"}\n', 'Line 1 is no event of a trace: {"step": 1}'),
        ('{"step": 1, "event": "x"}\n[]\n{"step": 1, "event": "x"}\n', "Line 2 is no event of a trace: []"),
    ],
)
def test_a_file_that_is_no_trace_is_named(show: Any, tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text, encoding="utf-8")
    assert show(path).text("#player") == f"The trace cannot be shown: {message}"


@MORE
def test_the_trace_of_a_killed_run_is_shown_up_to_its_last_whole_line(show: Any, tmp_path: Path) -> None:
    path = tmp_path / "killed.jsonl"
    path.write_text(GOLDEN["m3"].read_text(encoding="utf-8")[:9000], encoding="utf-8")
    assert len(show(path).walk()) > 3


@MORE
def test_on_a_phone_nothing_is_wider_than_the_screen(show: Any) -> None:
    shown = show(GOLDEN["m4"])
    shown.page.set_viewport_size(PHONE)
    shown.page.locator(".controls input").fill("20")
    assert shown.page.evaluate("document.scrollingElement.scrollWidth") <= PHONE["width"]


# --- the site, without its server ------------------------------------------------------------------------------------


@pytest.fixture
def site(browser: Any) -> Iterator[Any]:
    """A page of a site that has the player's modules, and a trace."""
    page = browser.new_page(viewport=WIDE)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))

    def answer(route: Any) -> None:
        name = route.request.url.rpartition("/")[2]
        if name == "links.js":
            route.fulfill(body="export const links = {};", content_type="text/javascript")
        elif name == "m4.jsonl.gz":
            route.fulfill(body=gzip.compress(GOLDEN["m4"].read_bytes()), content_type="application/gzip")
        elif (STATIC / name).is_file():
            route.fulfill(path=STATIC / name)
        elif name == "page.html":
            route.fulfill(body=SITE, content_type="text/html")
        else:
            route.fulfill(status=404)

    page.route("**/*", answer)
    page.goto("http://site.test/page.html")
    yield page
    page.close()
    assert errors == []


SITE = """<!doctype html><meta charset="utf-8"><body data-md-color-scheme="slate">
<div class="stepwise-player" data-base="./" data-runs='[{"name": "m4", "url": "m4.jsonl.gz"}]'></div>
<div class="stepwise-player" data-base="./" data-runs='[{"name": "gone", "url": "gone.jsonl.gz"}]'></div>
<div class="stepwise-drop" data-base="./"></div><div class="own"></div>
<script type="module" src="site.js"></script>"""
DROP = """([name, text]) => {
    const data = new DataTransfer();
    data.items.add(new File([text], name));
    document.dispatchEvent(new DragEvent("drop", {dataTransfer: data, bubbles: true}));
}"""


@MORE
def test_a_page_of_the_site_loads_its_trace_and_follows_its_colours(site: Any) -> None:
    site.wait_for_selector(".stepwise-player .sentences li")
    first = site.locator(".stepwise-player").first
    assert first.locator("output").inner_text() == "step 1 of 55"
    assert first.get_attribute("data-scheme") == "dark"
    site.evaluate("document.body.dataset.mdColorScheme = 'default'")
    site.wait_for_selector(".stepwise-player[data-scheme=light]")
    assert "gone.jsonl.gz: 404" in site.get_by_role("alert").first.inner_text()


@MORE
def test_the_milestone_of_a_trace_is_found_by_its_events(site: Any) -> None:
    """Links to the code and to the pages of a step depend on it. A trace of m7 has the events of m6 alone."""
    recorded = {path: path.name[:2].replace("m7", "m6") for path in TRACES.glob("m*.jsonl.gz")}
    texts = {path: gzip.decompress(path.read_bytes()).decode() for path in recorded}
    texts |= {path: path.read_text(encoding="utf-8") for path in GOLDEN.values()}
    expected = recorded | {path: milestone for milestone, path in GOLDEN.items()}
    assert {path: site.evaluate(MILESTONE, text) for path, text in texts.items()} == expected


MILESTONE = """async text => {
    const {parse, Trace} = await import("./trace.js");
    return new Trace(parse(text)).milestone;
}"""


@MORE
def test_a_trace_of_the_reader_is_dropped_or_chosen(site: Any, tmp_path: Path) -> None:
    site.evaluate(DROP, ["mine.jsonl", GOLDEN["m2"].read_text(encoding="utf-8")])
    site.wait_for_selector(".own .sentences li")
    assert site.locator(".own output").inner_text() == "step 1 of 10"
    site.evaluate(DROP, ["no.jsonl", "hello\n"])
    site.wait_for_function("document.querySelector('.stepwise-drop [role=alert]').textContent !== ''")
    assert site.locator(".stepwise-drop [role=alert]").inner_text() == "Line 1 is no event of a trace: hello"
    packed = tmp_path / "two.jsonl.gz"
    packed.write_bytes(gzip.compress(GOLDEN["m5"].read_bytes()))
    site.locator(".stepwise-drop input").set_input_files([packed, GOLDEN["m3"]])
    site.wait_for_function("document.querySelectorAll('.own h3.run').length === 2")
    assert site.locator(".own h3.run").all_inner_texts() == ["two.jsonl.gz", "little_memory.jsonl"]


@MORE
def test_the_same_modules_are_a_widget_of_notebooks(browser: Any) -> None:
    """Without Jupyter: a browser calls `render` as Jupyter does, with the widget's values."""
    from stepwise_player.widget import Player

    widget = Player(GOLDEN["m4"], GOLDEN["m2"])
    page = browser.new_page(viewport=WIDE)
    page.set_content("<div id=cell></div>")
    page.evaluate(RENDER, [widget._esm, widget.runs, widget.links])
    assert page.locator("#cell h3.run").all_inner_texts() == ["shared_prefixes", "small_batch"]
    page.evaluate("close()")
    assert page.locator("#cell .panel").count() == 0
    page.close()


RENDER = """async ([script, runs, links]) => {
    const module = await import(URL.createObjectURL(new Blob([script], {type: "text/javascript"})));
    const values = {runs, links};
    const model = {get: name => values[name]};
    window.close = await module.default.render({model, el: document.getElementById("cell")});
}"""
