"""HTTP server: what stands between a socket and `openai/`.

In the order in which a request passes: `http_protocol.py` (connection), `limits.py` and `auth.py` (ASGI middleware),
`app.py` (routes), `responses.py`, `error_shape.py` (errors), `metrics.py`, `status.py` (a page); beside them
`operators.py`, on a socket of its own; `run.py` starts and stops all.
"""
