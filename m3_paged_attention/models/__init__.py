"""The engine's own model: one decoder for Qwen3, Qwen2 and Llama, its layers, its rotary tables, its weights."""
