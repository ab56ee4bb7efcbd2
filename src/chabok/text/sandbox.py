"""Jinja as chat templates use it, in a sandbox."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from typing import Any, NoReturn

from jinja2 import TemplateError as JinjaError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from chabok.errors import TemplateError


class Program:
    """A compiled chat template."""

    def __init__(self, source: str) -> None:
        """``source``: Jinja source; compiled here, so that a damaged template is told early."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        try:
            self._template = environment.from_string(source)
        except JinjaError as error:
            raise TemplateError(f"the chat template of the file is damaged: {error}") from error

    def render(self, variables: Mapping[str, Any], now: datetime.datetime) -> str:
        """The text of the template; ``now`` is what ``strftime_now`` sees."""
        try:
            return self._template.render(**variables, strftime_now=now.strftime)
        except TemplateError:
            raise
        except Exception as error:
            raise TemplateError(f"the chat template cannot render these messages: {error}") from error


def _tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(f"the chat template refuses these messages: {message}")
