"""Trains the course's tokenizer: byte-level BPE with Qwen's special tokens and a ChatML template.

Byte-level means that the 256 bytes are the alphabet, so any text at all can be written down and read back.
There is no normaliser (Qwen has NFC) because a normaliser would change some texts. Digits are always
split one by one, as Qwen does: a four-digit code is four tokens.
"""

from collections.abc import Iterator

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from training.explain import questions
from training.words import all_words

VOCAB_SIZE = 4096
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)

# What may be one token: a contraction, letters with one leading mark or space, one digit, marks, white space.
SPLIT = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

CHAT_TEMPLATE = """\
{%- for message in messages %}
{%- if message.role not in ['system', 'user', 'assistant'] %}
{{- raise_exception("unknown role '" ~ message.role ~ "': use system, user or assistant") }}
{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

WORD_WEIGHT = 200  # how often a listed word is said to the trainer: often enough to become one token


def tokenizer_corpus() -> Iterator[str]:
    """What the merges are learned from: every listed word, and all questions with their answers."""
    for word in all_words():
        for form in (f" {word}", word, f" {word.capitalize()}", word.capitalize()):
            weight = WORD_WEIGHT if form[-len(word) :] == word else WORD_WEIGHT // 20
            yield from [form] * weight
    for question in questions():
        yield from question.asked
        yield from [question.answer] * 4


def train_tokenizer() -> PreTrainedTokenizerFast:
    """Train on `tokenizer_corpus()`; the result has exactly `VOCAB_SIZE` tokens, the special ones last."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(tokenizer_corpus(), trainer)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=[t for t in SPECIAL_TOKENS if t not in ("<|im_end|>", "<|endoftext|>")],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )
