"""Prefill and decode in separate engines: one computes a prompt, the other answers from its KV.

This folder is the idea: the states of a transfer (`poll.py`), the two sides (`prefill_side.py`, `decode_side.py`) with
their queues, pages on their way (`staging.py`, `page_store.py`), prebuilt batches, and the router.
`runtime/` makes it run: processes, sockets, credentials, messages, shared memory.
"""
