"""What can go wrong, as types: every error a user can cause or meet is an `EngineError`.

An error is raised before any state changes, and its message says what was wrong, with which value, and what to do.
A request that fails after it was accepted raises nothing: it ends with `finish_reason="error"` and carries the error in
its output, so that no other request is disturbed. vLLM has `EngineDeadError` and plain `ValueError`s for the same.
"""


def shown(value: object) -> str:
    """`value` as a message shows it: one line of at most 80 characters, whatever it is."""
    try:
        text = repr(value).replace("\n", " ")
    except ValueError:  # Python writes no number of more than some thousand digits
        text = "a number of thousands of digits"
    except RecursionError:
        text = f"a {type(value).__name__} of thousands of levels"
    return text if len(text) <= 80 else f"{text[:77]}..."


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


class EngineUsageError(EngineError, RuntimeError):
    """The engine was used in a way that it does not support: from a second thread, or from inside a step."""


class EngineClosedError(EngineUsageError):
    """The engine was closed."""


class EngineDeadError(EngineError, RuntimeError):
    """The device failed beyond recovery. All requests have failed; only `close()` is left to call."""
