"""transformers' own tensor parallelism, under torchrun: `python -m tests.m8_parallel.oracle MODEL OUTPUT`.

Rank 0 writes the log-probability of each token of the prompts of `program.py`, behind the tokens before it.
"""

import json
import os
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from tests.m8_parallel.program import PROMPTS


def main(model: str, output: Path) -> None:
    """Load a part of the model on each rank; compute the prompts one by one."""
    torch.set_num_threads(1)
    loaded = AutoModelForCausalLM.from_pretrained(model, tp_plan="auto", dtype=torch.float32).eval()
    found = []
    with torch.inference_mode():
        for prompt in PROMPTS:
            logits = loaded(torch.tensor([prompt])).logits[0, :-1].float()
            rows = torch.log_softmax(logits, -1)
            found.append([float(row[token]) for row, token in zip(rows, prompt[1:], strict=True)])
    if int(os.environ["RANK"]) == 0:
        output.write_text(json.dumps(found), encoding="utf-8")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
