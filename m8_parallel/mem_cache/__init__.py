"""The tiers of KV on ranks."""
