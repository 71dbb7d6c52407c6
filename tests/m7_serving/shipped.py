"""An `AsyncLLM` of one engine in this process with the model that ships, which is loaded once."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from unittest.mock import patch

from m1_single_request import DEFAULT_MODEL as TEXT_MODEL
from m6_multimodal_pd import CacheConfig, ModelConfig
from m6_multimodal_pd.wiring import PARTS
from m7_serving import AsyncLLM
from tests.m6_multimodal_pd.shipped import load_once
from tests.m7_serving.conftest import IN_PROCESS


@asynccontextmanager
async def text_llm() -> AsyncIterator[AsyncLLM]:
    """The engine, until the end of the block."""
    with patch.dict(PARTS, model_loader=load_once):
        llm = await AsyncLLM.start(
            model_config=ModelConfig(model=TEXT_MODEL, device="cpu"),
            cache_config=CacheConfig(max_total_tokens=256),
            disaggregation_config=IN_PROCESS,
        )
    async with llm:
        yield llm
