"""What holds for every test: one torch thread per worker, no network, the same numbers on every run."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: its thread pools read this once
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import torch
from hypothesis import settings

torch.set_num_threads(1)

# The same examples on every run, and a slow machine is no failure.
settings.register_profile("stepwise", derandomize=True, deadline=None)
settings.load_profile("stepwise")
