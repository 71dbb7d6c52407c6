"""m7: many clients, one engine, and no slow client delays another.

Since m6: requests come over HTTP, in OpenAI's form, or from any number of asyncio tasks; a client that goes away ends
its request. The engine is m6's, in a process of its own; this process has the connections, the
tokenizer and the texts.

    from m7_serving import AsyncLLM, SamplingParams

    async with await AsyncLLM.start() as llm:
        async for output in llm.generate("Once upon a time", SamplingParams(max_tokens=32)): ...

`python -m m7_serving` starts the server, which needs `pip install "stepwise-llm[serve]"`. Read the way of a request:
`server/app.py` and `responses.py`, `openai/requests.py`, `chat.py` and `deltas.py`, `async_llm.py`, `mailbox.py`,
`core_thread.py`; then m6's `disaggregation/router_core.py` and `router.py`, and in the engine's process `engine.py`
(`tick`) and `room_side.py`.
"""

import m6_multimodal_pd as m6
from m6_multimodal_pd import *
from m7_serving.async_llm import AsyncLLM
from m7_serving.errors import EngineUnavailableError, ServerBusyError

__all__ = [*m6.__all__, "AsyncLLM", "EngineUnavailableError", "ServerBusyError"]
