"""Qwen3-VL: m3's decoder with positions of three axes and DeepStack, and transformers' vision tower."""
