"""Milestone 1: one request at a time, complete and traced.

The loop of every LLM engine, at its smallest: schedule, prepare inputs, execute, sample, update, make outputs, release.
One request runs at a time on transformers' own model; the others wait in order. All of the public face is here already,
and later milestones keep it: this same line imports the engine of any of them.

    from m1_single_request import LLMEngine, SamplingParams

Read `llm_engine.py`, then `engine_core.py`, `scheduler.py`, `model_runner.py`, `sampler.py`; `wiring.py` is the table
of contents.
"""

from m1_single_request import _imports as _imports, face
from m1_single_request.config import DEFAULT_MODEL, EngineConfig, ModelConfig
from m1_single_request.face import *
from m1_single_request.llm_engine import LLMEngine
from m1_single_request.outputs import EngineStats
from m1_single_request.wiring import PARTS, build_engine_core

__all__ = [
    *face.__all__,
    "DEFAULT_MODEL",
    "PARTS",
    "EngineConfig",
    "EngineStats",
    "LLMEngine",
    "ModelConfig",
    "build_engine_core",
]
