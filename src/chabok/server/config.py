"""The configuration file, and how command line and file become settings.

The file is TOML: the server's settings at the top; ``[defaults]`` for all models; a table ``[models.NAME]``
for each, its sampling parameters in ``[models.NAME.sampling]``. What the command line says goes first.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chabok.checkpoints.catalog import DEFAULT_MODEL
from chabok.server.settings import (
    ModelSettings,
    Settings,
    SettingsError,
    check_sampling,
    model_name,
    options,
    read,
    unknown,
)

_NAMED = re.compile(r"([A-Za-z0-9][\w.-]*)=(?!=)(.+)")
_HEADER = re.compile(r"\s*\[\s*([^\[\]]+?)\s*\]\s*(#.*)?")
_MODEL_NAME = re.compile(r"[\w.:/@+ -]{1,200}")


@dataclass
class File:
    """A configuration file that was parsed, with the text to find lines in."""

    path: Path
    tables: dict[str, Any]
    lines: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> File:
        """Parse; SettingsError if that is not possible, with the line."""
        try:
            text = path.read_text(encoding="utf-8")
            return cls(path, tomllib.loads(text), text.splitlines())
        except OSError as error:
            raise SettingsError(f"{path}: {error.strerror or error}") from None
        except UnicodeDecodeError:
            raise SettingsError(f"{path}: not a text file in UTF-8") from None
        except tomllib.TOMLDecodeError as error:
            raise SettingsError(f"{path}: not TOML: {error}") from None

    def where(self, *keys: str) -> str:
        """Where a key stands: file, line where it can be found, table."""
        line = self._line(keys)
        table = f", table [{'.'.join(map(_quoted, keys[:-1]))}]" if len(keys) > 1 else ""
        return f"{self.path}{f', line {line}' if line else ''}{table}:"

    def _line(self, keys: Sequence[str]) -> int | None:
        """The line of a key that stands in the plain form ``key = value`` under its ``[table]``."""
        table: tuple[str, ...] = ()
        for number, line in enumerate(self.lines, 1):
            header = _HEADER.fullmatch(line)
            if header:
                table = _split(header[1])
                if table[: len(keys)] == tuple(keys):
                    return number
                continue
            name, equals, _ = line.partition("=")
            if equals and (*table, *_split(name)) == tuple(keys):
                return number
        return None


def _split(dotted: str) -> tuple[str, ...]:
    """The parts of a TOML key: ``models."a.b".x``."""
    parts = re.findall(r'"([^"]*)"|\'([^\']*)\'|([^\s."\']+)', dotted)
    return tuple(next(filter(None, part), "") for part in parts)


def _quoted(key: str) -> str:
    return key if re.fullmatch(r"[\w-]+", key) else f'"{key}"'


def settings(
    names: Sequence[str] = (),
    *,
    server: Mapping[str, Any] | None = None,
    models: Mapping[str, Any] | None = None,
    config: Path | None = None,
) -> Settings:
    """The settings that a command line and a file make.

    names: models of the command line, ``SOURCE`` or ``NAME=SOURCE``; or a name the file has. server, models:
    what the command line says of the server and of all models, by name of the setting, as text or value.
    Raises SettingsError.
    """
    file = File.read(config) if config is not None else File(Path("-"), {})
    said = {
        name: read(Settings, name, value, f"--{name.replace('_', '-')}")
        for name, value in (server or {}).items()
    }
    each = {
        name: read(ModelSettings, name, value, f"--{name.replace('_', '-')}")
        for name, value in (models or {}).items()
    }
    found = _server(file) | said
    defaults = _model(file, ("defaults",), file.tables.get("defaults", {}), plain=True)
    tables = _tables(file)
    listed = {name: _named(file, name, table, defaults) | each for name, table in tables.items()}
    for name, source in map(_parse, names):
        known = listed.pop(name, None) or {"source": source, **defaults, **each}
        aliases = () if source in (name, known["source"]) and name in tables else (source,) * (source != name)
        known["aliases"] = tuple(dict.fromkeys((*known.get("aliases", ()), *aliases)))
        listed[name] = {"preload": True} | known
    if names:  # those of the command line first: the first is the default
        first = [name for name, _ in map(_parse, names)]
        listed = {name: listed[name] for name in (*first, *(other for other in listed if other not in first))}
    if not listed:
        listed = {DEFAULT_MODEL: {"source": DEFAULT_MODEL, "preload": True, **defaults, **each}}
    made = Settings(
        models=tuple(ModelSettings(name, **values) for name, values in listed.items()),
        others=ModelSettings("", **{**defaults, **each}),
        **found,
    )
    made.check()
    return made


def _parse(word: str) -> tuple[str, str]:
    """Name and source of a model of the command line."""
    named = _NAMED.fullmatch(word)
    if named:
        return named[1], named[2]
    if not word.strip():
        raise SettingsError("the name of a model is empty; `chabok list --all` shows the names Chabok knows")
    return model_name(word), word


def _server(file: File) -> dict[str, Any]:
    known = options(Settings)
    found: dict[str, Any] = {}
    for name, value in file.tables.items():
        if name in ("defaults", "models"):
            if not isinstance(value, dict):
                raise SettingsError(f"{file.where(name)} {name} must be a table, not {value!r:.80}", name)
        elif name in known:
            found[name] = read(Settings, name, value, f"{file.where(name)} {name}")
        elif name in options(ModelSettings) and name not in ("source", "aliases"):
            raise SettingsError(
                f"{file.where(name)} {name} is a setting of models; put it in [defaults] or [models.NAME]",
                name,
            )
        else:
            raise unknown(name, [*known, "defaults", "models"], file.where(name))
    for name in ("api_keys", "socket", "tls_certificate", "tls_key"):
        if name in found and not found[name].is_absolute():  # in a file, relative to it
            found[name] = file.path.parent / found[name]
    return found


def _tables(file: File) -> dict[str, dict[str, Any]]:
    tables = file.tables.get("models", {})
    for name, table in tables.items():
        where = file.where("models", name)
        if not isinstance(table, dict):
            raise SettingsError(f"{where} a model is a table: [models.{_quoted(name)}]", name)
        if not _MODEL_NAME.fullmatch(name) or not name.strip():
            raise SettingsError(f"{where} {name!r} cannot be the name of a model", name)
    return dict(tables)


def _named(file: File, name: str, table: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of one model's table over the defaults."""
    own = _model(file, ("models", name), table, plain=False)
    sampling = {**defaults.get("sampling", {}), **own.get("sampling", {})}
    check_sampling(sampling, f"{file.where('models', name, 'sampling')} sampling")
    source = own.get("source", name)
    is_relative = source.lower().endswith(".gguf") and not Path(source).is_absolute() and ":" not in source
    if is_relative and not source.startswith("~"):
        source = str(file.path.parent / source)
    return {**defaults, **own, "source": source, "sampling": sampling}


def _model(file: File, at: tuple[str, ...], table: Mapping[str, Any], *, plain: bool) -> dict[str, Any]:
    known = options(ModelSettings)
    if plain:  # what holds for all models cannot say which one
        known = {name: known[name] for name in known if name not in ("source", "aliases", "preload")}
    found: dict[str, Any] = {}
    for name, value in table.items():
        where = file.where(*at, name)
        if name == "sampling":
            if not isinstance(value, dict):
                raise SettingsError(f"{where} sampling must be a table, not {value!r:.80}", name)
            for parameter in value:
                check_sampling({parameter: value[parameter]}, file.where(*at, name, parameter).rstrip(":"))
            check_sampling(value, where.rstrip(":"))
            found[name] = value
        elif name in known:
            found[name] = read(ModelSettings, name, value, f"{where} {name}")
        elif name in options(Settings):
            raise SettingsError(f"{where} {name} is a setting of the server; put it above all [tables]", name)
        else:
            raise unknown(name, [*known, "sampling"], where)
    return found
