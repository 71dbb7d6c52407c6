"""Attention over a paged KV cache: what it must be told, and the backends that compute it."""
