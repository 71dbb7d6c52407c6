"""Qwen3-VL: m3's decoder with positions on three axes and DeepStack, and transformers' vision tower."""
