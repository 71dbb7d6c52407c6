"""OpenAI's API without its HTTP: request models, sampling parameters, response bodies, chunks of a stream.

Every endpoint is a function of an `AsyncLLM` and a request that returns a dict, or yields one for each chunk. New in
this milestone. vLLM: `entrypoints/openai`; SGLang: `entrypoints/openai`.
"""
