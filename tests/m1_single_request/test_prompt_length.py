"""A text that is too long by its characters alone is refused untokenized, and never one that would have fitted."""

import random
import time
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from m1_single_request import DEFAULT_MODEL, PromptTooLongError
from m1_single_request.wiring import PARTS


def intake(tokenizer: Any, max_model_len: int) -> Any:
    """m1's, for a model of this length."""
    return PARTS["input_processor"](
        request_class=PARTS["request"],
        detokenizer_class=PARTS["detokenizer"],
        loaded_model=SimpleNamespace(tokenizer=tokenizer, vocab_size=len(tokenizer), max_model_len=max_model_len),
        seed=0,
    )


def of_bytes(
    normalizer: Any = None, splits: tuple[Any, ...] = (), *added: AddedToken, more: tuple[str, ...] = ()
) -> PreTrainedTokenizerFast:
    """A token for each byte, and no merges."""
    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *more]
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(alphabet)}, merges=[]))
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_of])
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_special_tokens(list(added))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


REMOVED = pre_tokenizers.Split(" ", "removed")
TOKENIZERS: dict[str, Any] = {
    "as it ships": lambda: AutoTokenizer.from_pretrained(DEFAULT_MODEL),
    "bytes": of_bytes,
    "composing": lambda: of_bytes(normalizers.NFC()),
    "stripping": lambda: of_bytes(normalizers.Strip()),
    "without spaces": lambda: of_bytes(None, (REMOVED,)),
    "with a greedy token": lambda: of_bytes(None, (), AddedToken("<x>", lstrip=True, special=True)),
    "with a long token": lambda: of_bytes(None, (), AddedToken("<" + "é" * 50 + ">", special=True)),
}
PIECES = [
    "a",
    " ",
    "\n",
    "é",
    "\u03b1\u0313\u0300\u0345",
    "\u1112\u1161\u11ab",
    "<x>",
    "<" + "é" * 50 + ">",
    "の",
    "!" * 9,
]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_text_that_fits_is_never_refused(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    longest = max(tokenizer.get_vocab(), key=len)
    rng = random.Random(7)
    texts = ["".join(rng.choices(PIECES, k=rng.randrange(200))) for _ in range(100)]
    texts += [piece * 100 for piece in [*PIECES, longest, tokenizer.decode([tokenizer.get_vocab()[longest]])]]
    for text in texts:
        ids = tokenizer.encode(text)
        assert intake(tokenizer, len(ids) + 1).encode(text) == ids


@pytest.mark.parametrize("name", ["as it ships", "bytes", "composing"])
@pytest.mark.parametrize("text", ["What is a KV cache? ", "Où est-il? "], ids=["ASCII", "not ASCII"])
def test_one_that_is_far_too_long_is_refused_without_tokenizing_it(
    name: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = TOKENIZERS[name]()
    processor = intake(tokenizer, 512)
    encode = type(tokenizer).encode
    monkeypatch.setattr(
        type(tokenizer),
        "encode",
        lambda self, text, **kwargs: encode(self, text, **kwargs) if len(text) < 10_000 else pytest.fail("tokenized"),
    )
    began = time.thread_time()
    with pytest.raises(PromptTooLongError, match=r"10,000,0\d\d characters, .*max_model_len is 512"):
        processor.encode(text * (10_000_000 // len(text) + 1))
    assert time.thread_time() - began < 1
