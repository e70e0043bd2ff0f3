"""Errors that a user can cause or must be told about.

Every message names the field (or file and tensor), the value found, and the remedy.
"""

from __future__ import annotations


class NeoServeError(Exception):
    """Base of all errors raised on purpose; its text is fit to show to a user as one line."""


class CheckpointError(NeoServeError):
    """A model file is missing, damaged, inconsistent or of an unsupported kind."""


class UnsupportedModelError(CheckpointError):
    """The checkpoint is sound but asks for something that is not built; the text lists what is."""


class ModelNotFoundError(NeoServeError):
    """A model reference leads nowhere; the text says what to do (token, spelling, network)."""


class ConfigurationError(NeoServeError):
    """A command-line flag or option is unknown, out of range or cannot be met by this machine."""


class InvalidRequestError(NeoServeError):
    """A request cannot be served as asked.

    ``param`` is the request field at fault (dotted path) and ``code`` a machine-readable reason,
    as in OpenAI's error object; both may be None.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ContextLengthError(InvalidRequestError):
    """Prompt and requested output do not fit the context (code ``context_length_exceeded``)."""

    def __init__(self, message: str, param: str | None = "messages") -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class QueueFullError(NeoServeError):
    """The waiting queue is at its bound; the client should retry later (HTTP 503)."""


class EngineDeadError(NeoServeError):
    """The engine stopped on an internal fault; requests in flight are failed with its text."""
