"""m7: many clients, one engine, and no client waits for another.

Since m6: requests come over HTTP, in OpenAI's form, or from any number of asyncio tasks; a client that goes away ends
its request. The engine is m6's, in a process of its own; this process has the clients, the tokenizer and the texts.

    from m7_serving import AsyncLLM, SamplingParams

    llm = await AsyncLLM.start()
    async for output in llm.generate("Once upon a time", SamplingParams(max_tokens=32)): ...

`python -m m7_serving` starts the server. Read the way of a request: `server/app.py`, `openai/chat.py`, `async_llm.py`,
`core_thread.py`, then m6's `disaggregation/router.py`. Needs `pip install "stepwise-llm[serve]"`.
"""

import m6_multimodal_pd as m6
from m6_multimodal_pd import *
from m7_serving.async_llm import AsyncLLM
from m7_serving.errors import EngineUnavailableError, ServerBusyError

__all__ = [*m6.__all__, "AsyncLLM", "EngineUnavailableError", "ServerBusyError"]
