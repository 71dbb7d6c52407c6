"""The player with a long trace: time to the first picture, time of a jump, frames while the lanes scroll.

The trace is a run of m6 with as many requests as make 100,000 events. Its page is opened in Chromium, without a screen
and without a GPU, several times.
"""

import tempfile
from functools import partial
from pathlib import Path
from random import Random
from shutil import which
from statistics import median

from benchmarks import BenchmarkError
from benchmarks.lesson import SEED, Lesson, Row, Size
from m1_single_request.player import main as write_page
from m6_multimodal_pd import CacheConfig, LLMEngine, ModelConfig, SamplingParams, SchedulerConfig, TraceConfig

EVENTS, JUMPS, FRAMES = 100_000, 60, 120
FLAGS = "--no-sandbox --disable-gpu --disable-background-networking --disable-component-update"
FIRST = """() => new Promise(resolve => {
    const wait = () => {
        if (document.querySelector(".sentences li")) requestAnimationFrame(() => resolve(performance.now()));
        else setTimeout(wait, 5);
    };
    wait();
})"""
JUMP = """place => new Promise(resolve => {
    const slider = document.querySelector(".controls input"), began = performance.now();
    slider.value = Math.floor(place * slider.max);
    slider.dispatchEvent(new Event("input"));
    requestAnimationFrame(() => setTimeout(() => resolve(performance.now() - began)));
})"""
SCROLL = """frames => new Promise(resolve => {
    const lanes = document.querySelector(".lanes"), times = [];
    const next = now => {
        times.push(now);
        lanes.scrollLeft += 97; lanes.scrollTop += 41;
        if (times.length <= frames) requestAnimationFrame(next);
        else resolve(times.slice(1).map((time, i) => time - times[i]));
    };
    requestAnimationFrame(next);
})"""


def write_trace(path: Path, events: int) -> int:
    """Run requests of many lengths until the trace has so many events; return their number."""
    random, lines = Random(SEED), 0
    config = SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=256)
    cache = CacheConfig(max_total_tokens=16_384, page_size=16)
    configs = {"model_config": ModelConfig(device="cpu"), "scheduler_config": config, "cache_config": cache}
    with LLMEngine(**configs, trace_config=TraceConfig(jsonl=path)) as engine, path.open(encoding="utf-8") as written:
        while lines < events:
            while engine.stats().num_waiting < 8:
                prompt = [*range(300, 340), *(random.randrange(300, 4000) for _ in range(random.randint(10, 200)))]
                engine.add_request(prompt, SamplingParams(max_tokens=random.randint(20, 120), ignore_eos=True))
            engine.step()
            lines += sum(1 for _ in written)
    return lines


def shown(size: Size) -> Row:
    """Return milliseconds, and the sizes of the trace and of the page."""
    from playwright.sync_api import sync_playwright

    chromium = which("chromium") or which("google-chrome")
    if chromium is None:
        raise BenchmarkError("this needs Chromium or Chrome")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        trace, page_file = Path(folder, "long.jsonl"), Path(folder, "long.html")
        events = write_trace(trace, EVENTS // 50 if size.quick else EVENTS)
        write_page([str(trace), "-o", str(page_file)])
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS.split())
        firsts, jumps, frames = list[float](), list[float](), list[float]()
        for _ in range(size.rounds):
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            page.goto(page_file.as_uri())
            firsts.append(page.evaluate(FIRST))
            random = Random(SEED)
            jumps += [page.evaluate(JUMP, random.random()) for _ in range(JUMPS)]
            frames += page.evaluate(SCROLL, FRAMES)
            page.close()
        version = browser.version
        browser.close()
        return {
            "browser": version,
            "events": events,
            "trace_bytes": trace.stat().st_size,
            "page_bytes": page_file.stat().st_size,
            "first_picture_ms": median(firsts),
            "jump_ms": {"median": median(jumps), "p95": p95(jumps)},
            "frame_ms": {"median": median(frames), "p95": p95(frames)},
        }


def p95(values: list[float]) -> float:
    """Return the value that 95 % of all do not exceed."""
    return sorted(values)[int(0.95 * (len(values) - 1))]


LESSON = Lesson("player", lambda size: {"long_trace": partial(shown, size)}, rounds=5)
