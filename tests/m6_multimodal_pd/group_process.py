"""A user's program with a group of engines, to be interrupted or killed: it says who they are, and keeps them busy, or
not.

The first line that it prints is JSON: the engines' process ids, and how the names of their shared memory begin.
"""

import json
import signal
import sys

from m6_multimodal_pd import CacheConfig, LLMEngine, ModelConfig, SamplingParams
from m6_multimodal_pd.disaggregation.config import DisaggregationConfig


def main(model: str, work: str) -> None:
    with LLMEngine(
        model_config=ModelConfig(model=model, device="cpu", dtype="float32"),
        cache_config=CacheConfig(max_total_tokens=2048),
        disaggregation_config=DisaggregationConfig(),
    ) as engine:
        links = engine.engine_core.router.links
        pids = [child.process.pid for child in links.children.values()]
        engine.generate([5, 6, 7], SamplingParams(max_tokens=3))
        print(json.dumps({"pids": pids, "group": links._group}), flush=True)
        while work == "busy":
            engine.generate_batch([[5, 6, 7]] * 3, SamplingParams(max_tokens=200, ignore_eos=True), progress=False)
        signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
