"""What a server is told: for itself, and for each model. Options, TOML keys and help are made from it.

Every field is a key of the configuration file and, with dashes, an option of ``chabok serve``.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from chabok.errors import RequestError
from chabok.server.kinds import (
    FLAG,
    Kind,
    above_zero,
    addresses,
    choice,
    duration,
    origins,
    path,
    setting,
    size,
    text,
    texts,
    whole,
)

if TYPE_CHECKING:
    from chabok.engine.request import SamplingParams

DEFAULT_PORT = 11435
"""Not Ollama's (11434), llama.cpp's (8080), LM Studio's (1234) or vLLM's (8000)."""

MINUTE = 60.0

T = TypeVar("T", "ModelSettings", "Settings")


class SettingsError(RequestError):
    """A setting that cannot be; names the key, where it stands, and what it may be."""


@dataclass(frozen=True)
class ModelSettings:
    """How one model is served. Durations in seconds, sizes in bytes."""

    name: str
    """What clients call it."""
    source: str = setting("", text("SOURCE"), "where it comes from: a file, a name, hf:owner/repo ...")
    aliases: tuple[str, ...] = setting((), texts("NAME"), "other names clients may use for it")
    threads: int | None = setting(None, whole(1, 1024), "threads to compute with (default: one a core)")
    context: int | None = setting(
        None, whole(1), "most tokens of prompt and answer together (default: the model's own, 8192 at most)"
    )
    max_batch: int = setting(64, whole(1, 4096), "sequences worked on at a time; others wait")
    max_queue: int = setting(256, whole(1), "requests that may wait; more are answered 429")
    kv_memory: int | None = setting(
        None, size(1), "memory for keys and values (default: four contexts, a quarter of free memory at most)"
    )
    itl_budget_ms: float = setting(
        30.0, above_zero("milliseconds"), "how long a step may take while answers are being written"
    )
    pack: bool = setting(True, FLAG, "keep the kernels' layout of the weights on disk for the next start")
    keep_alive: float = setting(
        30 * MINUTE, duration(forever=True), "how long a model stays loaded after its last use"
    )
    preload: bool = setting(False, FLAG, "load at start, keep loaded; /ready waits for it")
    priority: int = setting(0, whole(-100, 100), "added to the priority of each of its requests")
    system: str | None = setting(None, text(), "system text of conversations that have none")
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters where a request does not say, by name."""

    def defaults(self) -> SamplingParams:
        """The sampling parameters of a request that says nothing."""
        from chabok.engine.request import SamplingParams

        return SamplingParams.of(self.sampling)

    @property
    def names(self) -> tuple[str, ...]:
        """The name and its aliases."""
        return (self.name, *self.aliases)


@dataclass(frozen=True)
class Settings:
    """How the server runs. Durations in seconds, sizes in bytes."""

    models: tuple[ModelSettings, ...] = ()
    others: ModelSettings = field(default_factory=lambda: ModelSettings(""))
    """How installed models that are not named are served."""
    host: str = setting("127.0.0.1", text("HOST"), "address to listen at")
    port: int = setting(DEFAULT_PORT, whole(0, 65535), "port to listen at; 0: any free one")
    socket: Path | None = setting(None, path(), "listen at a Unix socket instead")
    tls_certificate: Path | None = setting(None, path(), "certificate chain (PEM), to speak HTTPS")
    tls_key: Path | None = setting(None, path(), "private key (PEM) of the certificate")
    api_keys: Path | None = setting(None, path(), "file of API keys; without it nobody needs one")
    allow_remote_without_key: bool = setting(False, FLAG, "listen to other machines without asking for keys")
    allowed_hosts: tuple[str, ...] = setting(
        (), texts("NAME"), "further names this server may be called by where no key is needed"
    )
    cors_origins: tuple[str, ...] = setting(
        (), origins(), "web pages that may use the server, such as https://app.example.com; * for all"
    )
    trusted_proxies: tuple[str, ...] = setting((), addresses(), "proxies whose X-Forwarded-For is believed")
    installed: bool | None = setting(
        None, FLAG, "serve every installed model on demand (default: if only this machine can connect)"
    )
    memory_budget: int | None = setting(
        None, size(1), "memory for all loaded models (default: 80 % of what is free at start)"
    )
    prefix_disk: bool = setting(True, FLAG, "keep the prefix cache on disk across restarts")
    prefix_disk_size: int | None = setting(None, size(1), "most the prefix cache may take on disk")
    request_timeout: float = setting(600.0, duration(), "longest a request may take in all")
    header_timeout: float = setting(20.0, duration(), "longest a client may take to send a request's headers")
    body_timeout: float = setting(60.0, duration(), "longest a client may take to send a request's body")
    idle_timeout: float = setting(120.0, duration(), "how long a connection may be open without a request")
    write_timeout: float = setting(30.0, duration(), "how long a client may take nothing of its answer")
    shutdown_timeout: float = setting(30.0, duration(), "time for running requests to end when stopping")
    max_body: int = setting(32 * 2**20, size(1024), "largest body of a request")
    max_headers: int = setting(32 * 2**10, size(1024), "largest headers of a request")
    max_connections: int = setting(2048, whole(1), "connections at a time; more are answered 503")
    backlog: int = setting(2048, whole(1, 65535), "connections that may wait to be accepted")
    log_format: str = setting("text", choice("text", "json"), "how requests are logged")
    log_requests: bool = setting(True, FLAG, "log one line for each request")
    metrics: bool = setting(True, FLAG, "serve /metrics")
    page: bool = setting(True, FLAG, "serve the page at /")
    pull: bool | None = setting(
        None, FLAG, "let clients have models fetched (default: if only this machine can connect)"
    )

    @property
    def is_local(self) -> bool:
        """Whether only this machine can connect."""
        return self.socket is not None or is_loopback(self.host)

    @property
    def serves_installed(self) -> bool:
        """Whether installed models that are not named may be loaded on demand."""
        return self.is_local if self.installed is None else self.installed

    @property
    def allows_pull(self) -> bool:
        """Whether clients may have models fetched."""
        return self.is_local if self.pull is None else self.pull

    def check(self) -> None:
        """Raise SettingsError if settings contradict each other."""
        seen: dict[str, str] = {}
        for model in self.models:
            for name in model.names:
                other = seen.setdefault(name.lower(), model.name)
                if other != model.name or model.names.count(name) > 1:
                    raise SettingsError(
                        f"two models are called {name!r} ({other} and {model.name}); "
                        "rename one: NAME=SOURCE, or another table in the configuration"
                    )
                if name.lower() == "default":
                    raise SettingsError("'default' means the first model; call the model something else")
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise SettingsError("tls_certificate and tls_key go together; give both or neither")


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to an address."""
    import ipaddress

    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return False


def options(kind: type[Settings] | type[ModelSettings]) -> dict[str, tuple[Kind, Any, str]]:
    """What can be set, by name: how it is read, its default, what it means."""
    return {
        item.name: (item.metadata["kind"], item.default, item.metadata["help"])
        for item in fields(kind)
        if "kind" in item.metadata
    }


def read(kind: type[Settings] | type[ModelSettings], name: str, value: Any, label: str) -> Any:
    """The value of one setting as it was written; ``label`` is what an error calls it."""
    how = options(kind)[name][0]
    try:
        return how.read(value)
    except ValueError as error:
        raise SettingsError(f"{label} must be {error}, not {value!r:.80}", name) from None


def check_sampling(values: Mapping[str, Any], label: str) -> None:
    """Raise SettingsError if these are not sampling parameters. label: the table they stand in."""
    from chabok.engine.request import SamplingParams

    try:
        SamplingParams.of(values)
    except RequestError as error:
        raise SettingsError(f"{label}: {error}") from None


def unknown(name: str, known: Iterable[str], where: str) -> SettingsError:
    """What to say of a key that means nothing."""
    known = list(known)
    near = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
    return SettingsError(f"{where} there is no setting {name!r}; {hint}", name)


def model_name(source: str) -> str:
    """What clients call the model of a source if nothing else is said: a short name or a file's stem."""
    from chabok.checkpoints import catalog

    entry = catalog.find(source) or catalog.by_source(source)
    if entry is not None:
        return entry.name if catalog.find(source) is None else source
    prefix, colon, rest = source.partition(":")
    if colon and prefix in ("hf", "pypi", "lmstudio"):
        last = rest.partition("==")[0] if "/" not in rest else rest.rsplit("/", 1)[-1]
        return last.removesuffix(".gguf")
    if colon and prefix == "ollama":
        return rest
    if source.lower().endswith(".gguf") or "/" in source or "\\" in source:
        return Path(source).name.removesuffix(".gguf") or source
    return source


def seconds(value: float) -> str:
    """A duration for people."""
    if value == math.inf:
        return "forever"
    for unit, length in (("h", 3600), ("m", 60)):
        if value >= length and value % length == 0:
            return f"{value / length:g}{unit}"
    return f"{value:g}s"
