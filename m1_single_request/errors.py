"""Error types: every error that a call raises is an `EngineError`.

A rejected call changes nothing. The message names the problem, the value and the remedy. A request that fails after it
was accepted does not raise: it ends with `finish_reason="error"` and its output contains the error, also of another
type (`torch.OutOfMemoryError`, for example), so that other requests continue. vLLM has `EngineDeadError` and plain
`ValueError`s for the same.
"""

import reprlib

LONGEST_SHOWN = 80
LONGEST_REASON = 300
LONGEST_PATH = 240
NESTED = reprlib.Repr()
NESTED.maxlevel, NESTED.maxlist, NESTED.maxtuple, NESTED.maxstring = 4, 20, 20, LONGEST_REASON


def shown(value: object, longest: int = LONGEST_SHOWN) -> str:
    """Return `value` as text for a message: one line of at most `longest` characters. Arrays: dtype and shape."""
    if isinstance(value, str | bytes | bytearray):
        value = value[:longest]  # the rest would be cut off
    try:
        shape, dtype = getattr(value, "shape", ()), getattr(value, "dtype", None)
        if dtype is not None and len(shape):
            text = f"{type(value).__name__} of {dtype} and shape {tuple(shape)}"
        else:  # `repr` of nested shared lists can be huge
            nested = isinstance(value, list | tuple | dict | set | frozenset)
            text = (NESTED.repr(value) if nested else repr(value)).replace("\n", " ")
    except Exception:  # of a user's `__repr__`, or a number is too long (sys.set_int_max_str_digits)
        is_number = isinstance(value, int | list | tuple | dict | set | frozenset)  # `NESTED` survives any other
        text = "a number of thousands of digits" if is_number else f"a {type(value).__name__}"
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def shown_path(path: object) -> str:
    """Return `path` as text for a message: at most its last 240 characters, because paths differ at the end."""
    text = repr(str(path))
    return text if len(text) <= LONGEST_PATH else f"'...{text[3 - LONGEST_PATH :]}"


def is_unicode(text: str) -> bool:
    """Return whether UTF-8 can encode `text`: it contains no lone surrogate."""
    return text == text.encode(errors="ignore").decode()


class EngineError(Exception):
    """Base class of all errors of this engine."""


class ConfigError(EngineError, ValueError):
    """A configuration value, keyword or part that the engine cannot use."""


class ModelLoadError(EngineError):
    """The model directory or hub id cannot be loaded: missing, incomplete, unsafe or of an unsupported architecture."""


class InvalidRequestError(EngineError, ValueError):
    """A request that can never run. It was not queued."""


class InvalidParamsError(InvalidRequestError):
    """A sampling parameter out of range, of the wrong type, or not supported by this milestone."""


class InvalidPromptError(InvalidRequestError):
    """An empty prompt, a token id outside the vocabulary, or messages that the chat template rejects."""


class PromptTooLongError(InvalidRequestError):
    """The prompt does not fit into `max_model_len` with one output token, or into a step (`max_num_batched_tokens`)."""


class DuplicateRequestError(InvalidRequestError):
    """The request id belongs to a request that has not finished yet."""


class ForwardError(EngineError, RuntimeError):
    """The model ran, but its logits for a request are unusable. The request ends with this error."""


class PartError(EngineError, RuntimeError):
    """A part broke its contract, and the message names it. The requests that this concerns end with the error."""


class EngineUsageError(EngineError, RuntimeError):
    """The engine was used in an unsupported way: from a second thread, a forked process, or inside another call."""


class EngineClosedError(EngineUsageError):
    """The engine was closed."""


class EngineDeadError(EngineError, RuntimeError):
    """The device failed permanently, or an interrupt stopped a step. Only `close()` and calls for numbers work."""
