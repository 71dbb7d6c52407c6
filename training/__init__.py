"""How the checkpoints that ship with Stepwise are made: data, tokenizer, training loop, evaluation.

Importable from a checkout, not part of the wheel. Run `python -m training.tiny_qwen3` to train the model,
`python -m training.evaluate` to measure what is committed; `training.tiny_qwen3_draft` and `training.evaluate_draft` do
the same for the draft model of speculative decoding.
"""
