"""Prefill and decode in engines of their own: one computes a prompt, the other one goes on from its KV.

The KV's way: `transport.py` is the interface and what travels; `page_store.py` reads and writes an engine's KV memory
by the page; `frames.py`, `staging.py` bring pages across through memory that both engines see, which is the own memory
of one process (`in_process.py`) or shared by two of one host (`shared_memory.py`).
"""
