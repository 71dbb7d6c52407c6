"""Runtime of a group of engines: processes, sockets, credentials, messages, shared memory, watchdog.

The idea of prefill and decode stands one folder up; this folder makes it run in processes of one host, or in this
process (`links.py`, `in_process.py`).
"""
