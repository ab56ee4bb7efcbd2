"""Errors meant for people: what is wrong, in which file or field, and what to do."""

from __future__ import annotations


class ChabokError(Exception):
    """Base of every error a user can cause or meet; its text needs no traceback."""


class CheckpointError(ChabokError):
    """A model file is damaged, hostile, or of a kind that is not supported; names file and field."""


class SourceError(ChabokError):
    """A model could not be found or fetched; says from where and what to try."""


class RequestError(ChabokError):
    """A request cannot be served as asked: an invalid parameter or too long a prompt.

    field: the parameter that is wrong, where it is one.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class UnknownModelError(ChabokError):
    """No model of this name is served; names the nearest."""


class BusyError(ChabokError):
    """The queue is full; retry_after_s: seconds after which there should be room."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class StoppingError(ChabokError):
    """The engine is being stopped and takes no more requests, or gave this one back."""


class ResourceError(ChabokError):
    """Not enough memory, disk, or permission for what was asked."""


class TemplateError(ChabokError):
    """A chat template failed, or refused the messages it was given."""
