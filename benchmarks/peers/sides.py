"""One engine in a process, as a peer's environment can run it: it imports this repository for `stepwise` only.

It reads its specification, then requests, one line of JSON each, and answers each line with the seconds and the tokens.
A line with `stream` has one request: its tokens come one by one, and the answer has the seconds after the first token.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

Prompts = list[list[int]]
Outputs = list[int]
Put = Callable[[int], object]
"""Called with each token of a stream when it is there."""


class Stepwise:
    """The engine of the last milestone, or of another.

    On a CPU its steps have 128 tokens by default, for short gaps of streams; here 512, and the others 256 to 2,048.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        import importlib

        import torch

        torch.set_num_threads(spec["threads"])
        package = importlib.import_module(spec.get("package", "m6_multimodal_pd"))
        model = {"model": spec["model"], "dtype": spec["dtype"], "device": "cpu", "max_model_len": spec["max_len"]}
        if "quantization" in spec:
            model["quantization"] = spec["quantization"]
        cache = {"kv_cache_dtype": spec["kv_cache_dtype"]} if "kv_cache_dtype" in spec else {}
        self.params = partial(package.SamplingParams, temperature=0, ignore_eos=True)
        self.engine = package.LLMEngine(
            model_config=package.ModelConfig(**model),
            cache_config=package.CacheConfig(max_total_tokens=spec["kv_tokens"], **cache),
            scheduler_config=package.SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=512),
        )

    def answer(self, prompts: Prompts, outputs: Outputs) -> Prompts:
        params = [self.params(max_tokens=length) for length in outputs]
        return [
            list(each.outputs[0].token_ids)
            for each in self.engine.generate_batch(prompts, params, progress=False).values()
        ]

    def stream(self, prompt: list[int], length: int, put: Put) -> None:
        for output in self.engine.stream(prompt, self.params(max_tokens=length)):
            put(output.outputs[0].token_ids[-1])


class Transformers:
    """`generate` of transformers, all prompts padded to one length."""

    def __init__(self, spec: dict[str, Any]) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(spec["threads"])
        self.torch, dtype = torch, getattr(torch, spec["dtype"])
        self.model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=dtype).eval()

    def answer(self, prompts: Prompts, outputs: Outputs, streamer: Any = None) -> Prompts:
        longest = max(map(len, prompts))
        ids = self.torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = self.torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        length = max(outputs)
        found = self.model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=length,
            min_new_tokens=length,
            do_sample=False,
            pad_token_id=0,
            streamer=streamer,
        )
        return [row[longest : longest + length].tolist() for row, length in zip(found, outputs, strict=True)]

    def stream(self, prompt: list[int], length: int, put: Put) -> None:
        def put_new(tokens: Any) -> None:
            if tokens.ndim == 1:  # the prompt, which comes first, has two dimensions
                put(tokens.item())

        self.answer([prompt], [length], SimpleNamespace(put=put_new, end=lambda: None))


class LlamaCpp:
    """llama.cpp through its C interface: all sequences in one batch, each with its own number."""

    def __init__(self, spec: dict[str, Any]) -> None:
        import llama_cpp
        import numpy as np

        self.c, self.np, self.prefix = llama_cpp, np, spec["shared"]
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(
            spec["model"].encode(), llama_cpp.llama_model_default_params()
        )
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_seq_max, params.kv_unified = spec["kv_tokens"], 2048, 64, True
        params.n_threads = params.n_threads_batch = spec["threads"]
        params.type_k = params.type_v = {"float32": 0, "bfloat16": 30}[spec["dtype"]]  # GGML_TYPE_F32, _BF16
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch = llama_cpp.llama_batch_init(2048, 0, 1)

    def answer(self, prompts: Prompts, outputs: Outputs, put: Put = lambda token: None) -> Prompts:
        memory = self.c.llama_get_memory(self.context)
        self.c.llama_memory_clear(memory, False)
        shared = self.prefix
        if shared:
            self._run([(0, token, place, False) for place, token in enumerate(prompts[0][:shared])])
            for number in range(1, len(prompts)):
                self.c.llama_memory_seq_cp(memory, 0, number, 0, shared)
        tokens = [
            (number, token, place, place == len(prompt) - 1)
            for number, prompt in enumerate(prompts)
            for place, token in enumerate(prompt)
            if place >= shared
        ]
        newest, answers = self._run(tokens), [[] for _ in prompts]
        while newest:
            for number, token in newest.items():
                answers[number].append(token)
                put(token)
            newest = self._run(
                [
                    (number, token, len(prompts[number]) + len(answers[number]) - 1, True)
                    for number, token in newest.items()
                    if len(answers[number]) < outputs[number]
                ]
            )
        return answers

    def stream(self, prompt: list[int], length: int, put: Put) -> None:
        self.answer([prompt], [length], put)

    def _run(self, tokens: list[tuple[int, int, int, bool]]) -> dict[int, int]:
        """Compute (sequence, token, place, is it the last one); return the next token of each whose last one it is."""
        found = {}
        for first in range(0, len(tokens), 2048):
            part, batch = tokens[first : first + 2048], self.batch
            batch.n_tokens = len(part)
            for i, (number, token, place, is_last) in enumerate(part):
                batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, place, 1, is_last
                batch.seq_id[i][0] = number
            if self.c.llama_decode(self.context, batch):
                raise RuntimeError("llama_decode failed")
            for i, (number, _, _, is_last) in enumerate(part):
                if is_last:
                    logits = self.c.llama_get_logits_ith(self.context, i)
                    found[number] = int(self.np.ctypeslib.as_array(logits, (self.vocab_size,)).argmax())
        return found


class OpenVino:
    """`ContinuousBatchingPipeline` of OpenVINO GenAI."""

    def __init__(self, spec: dict[str, Any]) -> None:
        import numpy as np
        import openvino
        import openvino_genai

        self.config = partial(openvino_genai.GenerationConfig, ignore_eos=True, do_sample=False)
        self.tensor = lambda prompt: openvino.Tensor(np.array([prompt], dtype=np.int64))
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.num_kv_blocks, scheduler.max_num_seqs = -(-spec["kv_tokens"] // 32), 64
        scheduler.enable_prefix_caching = self.shares = bool(spec["shared"])
        precision = {"float32": "f32", "bfloat16": "bf16"}[spec["dtype"]]
        properties = {"INFERENCE_NUM_THREADS": spec["threads"], "INFERENCE_PRECISION_HINT": precision}
        properties["KV_CACHE_PRECISION"] = spec.get("kv", precision)
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(spec["model"], scheduler, "CPU", properties)

    def answer(self, prompts: Prompts, outputs: Outputs) -> Prompts:
        configs = [self.config(max_new_tokens=length) for length in outputs]
        tensors = [self.tensor(prompt) for prompt in prompts]
        if self.shares:  # a request finds only what was in the cache when it came
            self.pipeline.generate(tensors[:1], [self.config(max_new_tokens=1)])
        return [list(each.m_generation_ids[0]) for each in self.pipeline.generate(tensors, configs)]

    def stream(self, prompt: list[int], length: int, put: Put) -> None:
        handle = self.pipeline.add_request(0, self.tensor(prompt), self.config(max_new_tokens=length))
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
            while handle.can_read():
                for output in handle.read().values():
                    put(output.generated_ids[-1])


class VLLM:
    """vLLM's build for CPUs, with its prefix cache."""

    def __init__(self, spec: dict[str, Any]) -> None:
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = "4"  # GiB, the upper bound of `num_gpu_blocks_override`
        os.environ["OMP_NUM_THREADS"] = str(spec["threads"])
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import LLM, SamplingParams

        self.params = partial(SamplingParams, temperature=0, ignore_eos=True)
        self.engine = LLM(
            spec["model"],
            dtype=spec["dtype"],
            max_model_len=spec["max_len"],
            max_num_seqs=64,
            seed=1,
            num_gpu_blocks_override=spec["kv_tokens"] // 64,  # of 128 tokens: twice as many, some are filled in part
        )

    def answer(self, prompts: Prompts, outputs: Outputs) -> Prompts:
        params = [self.params(max_tokens=length) for length in outputs]
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [list(each.outputs[0].token_ids) for each in self.engine.generate(given, params, use_tqdm=False)]

    def stream(self, prompt: list[int], length: int, put: Put) -> None:
        engine = self.engine.llm_engine
        engine.add_request("0", {"prompt_token_ids": prompt}, self.params(max_tokens=length))
        while engine.has_unfinished_requests():
            for output in engine.step():
                put(output.outputs[0].token_ids[-1])


SIDES = {
    "stepwise": Stepwise,
    "transformers": Transformers,
    "llama-cpp": LlamaCpp,
    "openvino": OpenVino,
    "vllm": VLLM,
}


def streamed(engine: Any, prompt: list[int], length: int) -> dict[str, Any]:
    """Stream an answer; return its tokens, and the seconds between the first and the last of them."""
    tokens: list[int] = []
    times: list[float] = []

    def put(token: int) -> None:
        times.append(time.perf_counter())
        tokens.append(token)

    engine.stream(prompt, length, put)
    return {"tokens": [tokens], "after_first": times[-1] - times[0]}


def peak_mib() -> float:
    """Return the largest resident memory since the process began. `getrusage` would count its parent's, too."""
    line = next(each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def main() -> None:
    """Build the engine that the first line names, then answer the others."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # some engines write to the standard output
    spec = json.loads(sys.stdin.readline())
    engine = SIDES[spec["engine"]](spec)
    for line in sys.stdin:
        request = json.loads(line)
        began = time.perf_counter()
        if request["stream"]:
            [prompt], [length] = request["prompts"], request["outputs"]
            found = streamed(engine, prompt, length)
        else:
            found = {"tokens": engine.answer(request["prompts"], request["outputs"])}
        found |= {"seconds": time.perf_counter() - began, "peak_mib": peak_mib()}
        answers.write(json.dumps(found) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
