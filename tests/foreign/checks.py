"""What others' tools find: each check runs one of them, and returns a line about it."""

import json
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

from tests.foreign.environment import ROOT, Environment
from tests.m7_serving.servers import serving
from training.explain import questions

CHECKPOINT = ROOT / "m1_single_request/checkpoints/tiny-qwen3"
SERVED = ("--model", str(CHECKPOINT), "--served-model-name", "tiny-qwen3")
NUM_ROWS = 100
NUM_CHOICES = 8
SAME_SUM = 1e-3
"""Largest difference of two sums of log-probabilities: both are computed in float32, in other orders."""
NUM_CASES = 2000
CASES_PER_OPERATION = 225
FUZZ_CHECKS = "not_a_server_error status_code_conformance content_type_conformance response_schema_conformance"
NUM_LOAD_REQUESTS = 48


def scores(tools: Environment, folder: Path) -> str:
    """lm-eval through HTTP and lm-eval on transformers: the same scores, the same log-probabilities."""
    shutil.copy(Path(__file__).with_name("beginnings.yaml"), folder)
    (folder / "beginnings.jsonl").write_text("".join(json.dumps(row) + "\n" for row in _rows()))

    def evaluate(model: str, arguments: str) -> tuple[dict[str, float], list[Any]]:
        out = folder / model
        flags = ["--include_path", folder, "--tasks", "beginnings", "--batch_size", "1", "--device", "cpu"]
        flags += ["--model", model, "--model_args", arguments, "--output_path", out, "--log_samples"]
        tools.run("lm-eval", "run", *flags, cwd=folder)
        [found], [samples] = out.glob("*/results_*.json"), out.glob("*/samples_*.jsonl")
        rows = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda row: row["doc_id"])
        metrics = json.loads(found.read_text())["results"]["beginnings"]
        return {name: metrics[f"{name},none"] for name in ("acc", "acc_norm")}, [row["filtered_resps"] for row in rows]

    with serving(*SERVED) as server, ThreadPoolExecutor() as threads:
        url = f"{server.url}/completions"
        reference = threads.submit(evaluate, "hf", f"pretrained={CHECKPOINT},dtype=float32")
        options = f"model=tiny-qwen3,base_url={url},tokenizer={CHECKPOINT},num_concurrent=4"
        found, found_sums = evaluate("local-completions", options)
        expected, expected_sums = reference.result()
    assert found == expected, f"{found} through HTTP, {expected} with transformers"
    assert len(found_sums) == NUM_ROWS
    pairs = [pair for rows in zip(found_sums, expected_sums, strict=True) for pair in zip(*rows, strict=True)]
    assert all(one[1] == other[1] for one, other in pairs), "one of them takes a choice for the greedy answer"
    difference = max(abs(float(one[0]) - float(other[0])) for one, other in pairs)
    assert difference < SAME_SUM, difference
    return f"both have {found}; log-probabilities of {len(pairs)} choices differ by at most {difference:.0e}"


def load(tools: Environment, folder: Path) -> str:
    """guidellm: streams at a constant concurrency, to its report."""
    report = folder / "report.json"
    with serving(*SERVED) as server:
        flags = {
            "backend": f"openai_http,target={server.root},model=tiny-qwen3",
            "profile": "concurrent,streams=4",
            "constraint": f"max_requests,count={NUM_LOAD_REQUESTS}",
            "tokenizer": f"huggingface_auto,model={CHECKPOINT}",
            "data": "synthetic_text,prompt_tokens=64,output_tokens=16",
            "output": f"json,path={report}",
        }
        given = [each for name, value in flags.items() for each in (f"--{name}", f"kind={value}")]
        tools.run("guidellm", "run", *given, "--disable-console", cwd=folder)
        counted = server.metrics()
    [benchmark] = json.loads(report.read_text())["benchmarks"]
    metrics = benchmark["metrics"]
    totals = metrics["request_totals"]
    assert totals == dict(successful=NUM_LOAD_REQUESTS, errored=0, incomplete=0, total=NUM_LOAD_REQUESTS), totals
    tokens = metrics["output_token_count"]["successful"]
    assert tokens["min"] == tokens["max"] == 16, tokens
    assert counted["sglang:generation_tokens_total"] >= tokens["total_sum"]  # it tries the server first
    means = {name: metrics[name]["successful"]["mean"] for name in ("time_to_first_token_ms", "inter_token_latency_ms")}
    return f"{NUM_LOAD_REQUESTS} requests, mean " + ", ".join(f"{name} {mean:.1f}" for name, mean in means.items())


def fuzz(tools: Environment, folder: Path) -> str:
    """schemathesis: requests made of our OpenAPI description, valid and not, without a finding."""
    with serving(*SERVED) as server:
        checks = ["--checks", FUZZ_CHECKS.replace(" ", ","), "--phases", "examples,coverage,fuzzing"]
        amount = ["--max-examples", str(CASES_PER_OPERATION), "--seed", "0"]
        url = f"{server.root}/openapi.json"
        output = tools.run(
            "schemathesis", "run", url, *checks, *amount, cwd=folder, SCHEMATHESIS_HOOKS="tests.foreign.fuzz_hooks"
        )
        counts = re.search(r"(\d+) generated, (\d+) passed", output)
        assert counts is not None and counts[1] == counts[2], output
        assert int(counts[1]) >= NUM_CASES, counts[1]
        assert server.is_idle()
        answered = server.metrics()["sglang:num_requests_total"]
    assert answered >= NUM_CASES / 10, "nearly all bodies were invalid"
    return f"{counts[1]} cases without a finding, {answered:.0f} requests answered by the engine"


def replicas(tools: Environment, folder: Path) -> str:
    """The example for Ray Serve: more tokens are found in the cache with its routing than without."""
    output = tools.run("python", ROOT / "examples/ray_serve.py", cwd=folder)
    found = dict(re.findall(r"^([\w-]+): hit rate (\S+),", output, re.MULTILINE))
    assert float(found["prefix-aware"]) > float(found["power-of-two"]) + 0.1, output
    return f"hit rates {found}"


CHECKS: tuple[Callable[[Environment, Path], str], ...] = (scores, load, fuzz, replicas)


def _rows() -> list[dict[str, Any]]:
    """Questions in a wording that the model was not trained on, and beginnings of answers, of which one is right."""
    random = Random(0)
    rows = []
    for asked in random.sample(questions(), NUM_ROWS):
        others = random.sample([each for each in questions() if each is not asked], NUM_CHOICES - 1)
        answer = random.randrange(NUM_CHOICES)
        chosen = [*others[:answer], asked, *others[answer:]]
        choices = [" ".join(each.answer.split()[:2]) for each in chosen]
        rows.append({"question": asked.held_out, "choices": choices, "answer": answer})
    return rows
