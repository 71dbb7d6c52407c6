"""Attention over a paged KV cache: its metadata, and the backends that compute it."""
