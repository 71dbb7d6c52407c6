"""How the checkpoints that ship with Stepwise are made: data, tokenizer, training loop, evaluation.

Importable from a checkout, not part of the wheel. Run `python -m training.tiny_qwen3` to train,
`python -m training.evaluate` to measure what is committed.
"""
