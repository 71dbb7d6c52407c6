"""A program whose rank 1 dies in the first attempt: `python -m tests.m8_parallel.restarting MODEL OUTPUT`."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from m8_parallel import LLMEngine, ModelConfig
from m8_parallel.model_runner import ParallelModelRunner
from tests.m8_parallel.program import PARAMS, PROMPTS, RANK


class Dying(ParallelModelRunner):
    """Ends its process in the third step of rank 1, the first time that torchrun starts it."""

    calls = 0

    def forward(self, batch: Any) -> Any:
        """Die, or compute."""
        self.calls += 1
        if self.calls == 3 and RANK == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os._exit(1)
        return super().forward(batch)


if __name__ == "__main__":
    model, output = sys.argv[1:]
    config = ModelConfig(model=model, device="cpu", dtype="float32", attention_backend="torch")
    with LLMEngine(model_config=config, parts={"model_runner": Dying}) as engine:
        found = engine.generate(PROMPTS[0], PARAMS[0])
    if found.error is not None:
        raise found.error
    written = {"tokens": list(found.token_ids), "attempt": os.environ["TORCHELASTIC_RESTART_COUNT"]}
    Path(output).write_text(json.dumps(written), encoding="utf-8")
