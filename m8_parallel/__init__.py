"""m8: the same decisions on every rank.

Since m6: a model that is too large for one device is computed by several processes, its *ranks*, on any number of
hosts. Every rank runs a whole engine core with a part of each layer. All receive the same requests and run the same
scheduler, so no decision is sent. torchrun starts the ranks:

    torchrun --nproc-per-node 2 -m m8_parallel.demo --tp 2

Without it this is m6. Read `notes.py`, `ranks.py` and `job.py`, `models/plan.py`, `shards.py` and
`parallel_decoder.py`, then `scheduler.py`, `model_runner.py`, `graphs.py`, `overlap.py` and `engine_core.py`.
"""

import m6_multimodal_pd as m6
from m6_multimodal_pd import *
from m8_parallel.config import EngineConfig, ParallelConfig
from m8_parallel.errors import RankLostError, RanksDifferError
from m8_parallel.llm_engine import LLMEngine
from m8_parallel.outputs import EngineStats

__all__ = [
    *m6.__all__,
    "EngineConfig",
    "EngineStats",
    "LLMEngine",
    "ParallelConfig",
    "RankLostError",
    "RanksDifferError",
]
