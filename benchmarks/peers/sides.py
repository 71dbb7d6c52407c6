"""One engine in a process, as a peer's environment can run it: it imports this repository for `stepwise` only.

It reads its specification, then requests, one line of JSON each, and answers each line with the seconds and the tokens.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

Prompts = list[list[int]]
Outputs = list[int]


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
        self.params = package.SamplingParams
        self.engine = package.LLMEngine(
            model_config=package.ModelConfig(**model),
            cache_config=package.CacheConfig(max_total_tokens=spec["kv_tokens"], **cache),
            scheduler_config=package.SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=512),
        )

    def answer(self, prompts: Prompts, outputs: Outputs) -> Prompts:
        params = [self.params(temperature=0, max_tokens=length, ignore_eos=True) for length in outputs]
        return [
            list(each.outputs[0].token_ids)
            for each in self.engine.generate_batch(prompts, params, progress=False).values()
        ]


class Transformers:
    """`generate` of transformers, all prompts padded to one length."""

    def __init__(self, spec: dict[str, Any]) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(spec["threads"])
        self.torch, dtype = torch, getattr(torch, spec["dtype"])
        self.model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=dtype).eval()

    def answer(self, prompts: Prompts, outputs: Outputs) -> Prompts:
        longest = max(map(len, prompts))
        ids = self.torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = self.torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        length = max(outputs)
        found = self.model.generate(
            ids, attention_mask=mask, max_new_tokens=length, min_new_tokens=length, do_sample=False, pad_token_id=0
        )
        return [row[longest : longest + length].tolist() for row, length in zip(found, outputs, strict=True)]


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

    def answer(self, prompts: Prompts, outputs: Outputs) -> Prompts:
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
            newest = self._run(
                [
                    (number, token, len(prompts[number]) + len(answers[number]) - 1, True)
                    for number, token in newest.items()
                    if len(answers[number]) < outputs[number]
                ]
            )
        return answers

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

        self.genai, self.tensor, self.np = openvino_genai, openvino.Tensor, np
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.num_kv_blocks, scheduler.max_num_seqs = -(-spec["kv_tokens"] // 32), 64
        scheduler.enable_prefix_caching = self.shares = bool(spec["shared"])
        precision = {"float32": "f32", "bfloat16": "bf16"}[spec["dtype"]]
        properties = {"INFERENCE_NUM_THREADS": spec["threads"], "INFERENCE_PRECISION_HINT": precision}
        properties["KV_CACHE_PRECISION"] = spec.get("kv", precision)
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(spec["model"], scheduler, "CPU", properties)

    def answer(self, prompts: Prompts, outputs: Outputs) -> Prompts:
        configs = [
            self.genai.GenerationConfig(max_new_tokens=length, ignore_eos=True, do_sample=False) for length in outputs
        ]
        tensors = [self.tensor(self.np.array([prompt], dtype=self.np.int64)) for prompt in prompts]
        if self.shares:  # a request finds only what was in the cache when it came
            self.pipeline.generate(tensors[:1], [self.genai.GenerationConfig(max_new_tokens=1, do_sample=False)])
        return [list(each.m_generation_ids[0]) for each in self.pipeline.generate(tensors, configs)]


class VLLM:
    """vLLM's build for CPUs, with its prefix cache."""

    def __init__(self, spec: dict[str, Any]) -> None:
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = "4"  # GiB, the upper bound of `num_gpu_blocks_override`
        os.environ["OMP_NUM_THREADS"] = str(spec["threads"])
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import LLM, SamplingParams

        self.params = SamplingParams
        self.engine = LLM(
            spec["model"],
            dtype=spec["dtype"],
            max_model_len=spec["max_len"],
            max_num_seqs=64,
            seed=1,
            num_gpu_blocks_override=spec["kv_tokens"] // 64,  # of 128 tokens: twice as many, some are filled in part
        )

    def answer(self, prompts: Prompts, outputs: Outputs) -> Prompts:
        params = [self.params(temperature=0, max_tokens=length, ignore_eos=True) for length in outputs]
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [list(each.outputs[0].token_ids) for each in self.engine.generate(given, params, use_tqdm=False)]


SIDES = {
    "stepwise": Stepwise,
    "transformers": Transformers,
    "llama-cpp": LlamaCpp,
    "openvino": OpenVino,
    "vllm": VLLM,
}


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
        tokens = engine.answer(request["prompts"], request["outputs"])
        seconds = time.perf_counter() - began
        answers.write(json.dumps({"seconds": seconds, "tokens": tokens, "peak_mib": peak_mib()}) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
