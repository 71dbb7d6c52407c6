"""Speculative decoding: proposing drafts, limiting their number, verifying them."""
