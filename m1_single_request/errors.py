"""What can go wrong, as types: every error a user can cause or meet is an `EngineError`.

An error is raised before any state changes, and its message says what was wrong, with which value, and what to do.
A request that fails after it was accepted raises nothing: it ends with `finish_reason="error"` and carries the error in
its output, so that no other request is disturbed. vLLM has `EngineDeadError` and plain `ValueError`s for the same.
"""

import reprlib

LONGEST_SHOWN = 80
LONGEST_REASON = 300
NESTED = reprlib.Repr()
NESTED.maxlevel, NESTED.maxlist, NESTED.maxtuple, NESTED.maxset, NESTED.maxdict = 4, 20, 20, 20, 20
NESTED.maxstring = NESTED.maxlong = NESTED.maxother = LONGEST_REASON
LONGEST_PATH = 240


def shown(value: object, longest: int = LONGEST_SHOWN) -> str:
    """`value` as a message shows it: one line of at most `longest` characters. Arrays: dtype and shape."""
    try:
        text = _text_of(value, longest).replace("\n", " ")
    except RecursionError:
        text = f"a {type(value).__name__} of thousands of levels"
    except ValueError:  # Python writes no number of more than some thousand digits
        text = "a number of thousands of digits"
    except Exception:  # a class of the user's own
        text = f"a {type(value).__name__}"
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def _text_of(value: object, longest: int) -> str:
    shape, dtype = getattr(value, "shape", ()), getattr(value, "dtype", None)
    if dtype is not None and len(shape):
        return f"{type(value).__name__} of {dtype} and shape {tuple(shape)}"
    if isinstance(value, str | bytes | bytearray) and len(value) > longest:
        value = value[:longest]  # the rest would be cut off
    if isinstance(value, list | tuple | dict | set | frozenset):  # lists of lists that share lists grow without end
        return NESTED.repr(value)
    return repr(value)


def shown_path(path: object) -> str:
    """A path as a message shows it: at most its last 240 characters, because its end is what tells it from others."""
    text = repr(str(path))
    return text if len(text) <= LONGEST_PATH else f"'...{text[3 - LONGEST_PATH :]}"


def is_unicode(text: str) -> bool:
    """Whether UTF-8 can encode `text`: it contains no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class EngineError(Exception):
    """The root of all errors of this engine."""


class ConfigError(EngineError, ValueError):
    """A configuration value, keyword or part that the engine cannot use."""


class ModelLoadError(EngineError):
    """The model directory or hub id cannot be loaded: missing, incomplete, unsafe or of an unsupported architecture."""


class InvalidRequestError(EngineError, ValueError):
    """A request that can never run. Nothing was queued."""


class InvalidParamsError(InvalidRequestError):
    """A sampling parameter out of its range, of the wrong type, or one that this milestone cannot honour."""


class InvalidPromptError(InvalidRequestError):
    """An empty prompt, a token id outside the vocabulary, or messages that the chat template refuses."""


class PromptTooLongError(InvalidRequestError):
    """The prompt leaves no room for a single output token within `max_model_len`."""


class DuplicateRequestError(InvalidRequestError):
    """The request id belongs to a request that has not finished yet."""


class ForwardError(EngineError, RuntimeError):
    """The model ran but what it computed is unusable. The requests of that step fail with it."""


class PartError(EngineError, RuntimeError):
    """A part broke its contract, and the message names it. The requests that this concerns end with the error."""


class EngineUsageError(EngineError, RuntimeError):
    """The engine was used in an unsupported way: from a second thread, in a forked process, or from inside a step."""


class EngineClosedError(EngineUsageError):
    """The engine was closed."""


class EngineDeadError(EngineError, RuntimeError):
    """The device failed beyond recovery, or an interrupt stopped a step in the middle. Only `close()` can be called."""
