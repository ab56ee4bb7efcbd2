"""From the name of a model to an engine that runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cached_property
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, cast

from chabok.engine.engine import Engine, Tokenizer
from chabok.engine.kv import pages_for
from chabok.engine.pagefiles import PageFiles
from chabok.engine.request import check_names
from chabok.errors import CheckpointError, RequestError, TemplateError
from chabok.models.batch import Model

if TYPE_CHECKING:
    from chabok.checkpoints.gguf import GGUF
    from chabok.checkpoints.progress import Progress
    from chabok.text.grammar import Grammars
    from chabok.text.tokenizer import Tokenizer as GGUFTokenizer

DEFAULT_CONTEXT = 8192
"""Longest context taken where none is asked for: more costs memory that few use."""

MAX_THREADS = 1024
"""More than the cores of any machine; each has memory of its own."""

DEFAULT_CONTEXTS = 4
"""Room in the key-value cache by default, in whole contexts; a quarter of the free memory at most."""


class TextSide(Tokenizer, Protocol):
    """What callers need of a tokenizer beside what the engine needs."""

    def encode(
        self, text: str, *, special: bool = False, add_bos: bool | None = None, limit: int | None = None
    ) -> list[int]:
        """Token ids of a text; of one that has more than ``limit``, any list that is longer will do."""

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of token ids."""

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token, possibly part of a character."""


class Template(Protocol):
    """A chat template."""

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        token_limit: int | None = None,
        **variables: Any,
    ) -> list[int]:
        """Token ids of a conversation up to where the answer begins; token_limit: see ``TextSide``."""


@dataclass(frozen=True)
class Options:
    """How to load and run a model.

    threads: None for the physical cores this process may use. context: tokens of a sequence at most, prompt
    and answer; None for the model's own, 8192 at most. max_batch: sequences that are worked on at a time.
    kv_memory: bytes of key-value cache; None for four contexts, but a quarter of the free memory at most.
    pack: keep the kernels' layout of the weights on disk.
    budget_s: how long a step may take while something is being generated.
    max_queue: requests that may wait for their turn; more are refused (BusyError).
    prefix_disk: keep keys and values of prompts on disk, so that the next start finds them; off by default,
    since they tell what was asked. prefix_disk_bytes: most that those of all models may take; None for
    ``$CHABOK_PREFIX_LIMIT``, or 4 GB but a quarter of the free disk at most.
    """

    threads: int | None = None
    context: int | None = None
    max_batch: int = 64
    kv_memory: int | None = None
    pack: bool = True
    budget_s: float = 0.03
    max_queue: int = 256
    prefix_disk: bool = False
    prefix_disk_bytes: int | None = None

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Options:
        """Build from names and values; an unknown name is an error that suggests the nearest one."""
        check_names("option", values, [item.name for item in fields(cls)])
        return cls(**values)

    def __post_init__(self) -> None:
        for name in ("threads", "context", "max_batch", "kv_memory", "max_queue", "prefix_disk_bytes"):
            value = getattr(self, name)
            if value is not None and (
                isinstance(value, bool) or not hasattr(value, "__index__") or value < 1
            ):
                raise RequestError(f"{name} must be an integer of at least 1, not {value!r}")
        if self.threads is not None and self.threads > MAX_THREADS:
            raise RequestError(f"threads must be at most {MAX_THREADS}, not {self.threads}")
        if not isinstance(self.budget_s, int | float) or not self.budget_s > 0:
            raise RequestError(f"budget_s must be a number of seconds above 0, not {self.budget_s!r}")


class OptionValues(TypedDict, total=False):
    """The fields of ``Options`` as keyword arguments."""

    threads: int | None
    context: int | None
    max_batch: int
    kv_memory: int | None
    pack: bool
    budget_s: float
    max_queue: int
    prefix_disk: bool
    prefix_disk_bytes: int | None


class Loaded:
    """A model that is ready to run, with what turns text into its tokens and back."""

    def __init__(
        self, model: Model, tokenizer: TextSide, make_template: Callable[[], Template], options: Options
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self._make_template = make_template
        context = context_for(model.n_ctx_train, options.context)
        self.engine = Engine(
            model,
            tokenizer,
            context=context,
            n_pages=cache_pages(model.page_bytes, context, options),
            max_batch=options.max_batch,
            budget_s=options.budget_s,
            max_queue=options.max_queue,
            prefix_files=prefix_files(model, options),
        )

    @cached_property
    def template(self) -> Template:
        """The chat template, made when it is first needed: its library takes long to import."""
        return self._make_template()

    @cached_property
    def grammars(self) -> Grammars:
        """What makes constraints in the model's tokens; its library is imported when it is first used."""
        from chabok.text.grammar import Grammars

        return Grammars(cast("GGUFTokenizer", self.tokenizer))


def prefix_files(model: Model, options: Options) -> PageFiles | None:
    """Where the prefixes of a model are kept on disk; None if they are not to be."""
    if not options.prefix_disk:
        return None
    return PageFiles(
        model.fingerprint, model.page_layout, model.page_bytes, limit_bytes=options.prefix_disk_bytes
    )


def load(name: str | PathLike[str], options: Options, progress: Progress | None = None) -> Loaded:
    """Find, map and prepare a model. name: a path, a short name, or a source such as hf:owner/repo."""
    from chabok.checkpoints.gguf import GGUF
    from chabok.checkpoints.packed import PackedStore
    from chabok.checkpoints.progress import Silent
    from chabok.checkpoints.sources import resolve

    progress = progress or Silent()
    import chabok.models

    try:
        place = fspath(name)
    except TypeError:
        raise RequestError(f"a model must be a name or a path, not {type(name).__name__}") from None
    if not isinstance(place, str):
        raise RequestError("a model must be a name or a path in text, not in bytes")
    gguf = GGUF.open(resolve(place, progress))
    chabok.models.check_supported(gguf)
    _check_memory(gguf, options)
    tokenizer = _tokenizer(gguf)
    model = chabok.models.load(
        gguf, threads=options.threads, pack=PackedStore() if options.pack else None, progress=progress
    )

    def make_template() -> Template:
        from chabok.text.chat import ChatTemplate

        with _naming(gguf):
            return ChatTemplate.from_gguf(gguf.metadata, tokenizer)

    return Loaded(model, tokenizer, make_template, options)


def _tokenizer(gguf: GGUF) -> GGUFTokenizer:
    from chabok.text.tokenizer import Tokenizer

    with _naming(gguf):
        tokenizer = Tokenizer.from_gguf(gguf.metadata)
    table = gguf.tensors.get("token_embd.weight")
    # The model may choose any row of the table, and text may hold any token.
    if table is not None and table.shape[0] != tokenizer.vocab_size:
        raise gguf.error(
            "tokenizer.ggml.tokens",
            f"has {tokenizer.vocab_size} tokens, but tensor 'token_embd.weight' has {table.shape[0]} rows",
        )
    return tokenizer


@contextmanager
def _naming(gguf: GGUF) -> Iterator[None]:
    """Put the file before what its text side is said to have wrong, which knows fields only."""
    try:
        yield
    except (CheckpointError, TemplateError) as error:
        raise type(error)(f"{gguf.path}: {error}") from None


def context_for(n_ctx_train: int, asked: int | None) -> int:
    """The context to use, in tokens; more than the model was trained for is an error."""
    if asked is None:
        return min(n_ctx_train, DEFAULT_CONTEXT)
    if asked > n_ctx_train:
        raise RequestError(f"context is {asked} tokens, but this model was made for {n_ctx_train} at most")
    return asked


def cache_pages(page_bytes: int, context: int, options: Options) -> int:
    """Pages of the key-value cache: what was asked for, or the default; one context at least."""
    least = pages_for(context)
    if options.kv_memory is not None:
        n_pages = options.kv_memory // page_bytes
        if n_pages < least:
            from chabok.checkpoints.storage import format_bytes

            raise RequestError(
                f"kv_memory is {format_bytes(options.kv_memory)}, but a context of {context} tokens takes "
                f"{format_bytes(least * page_bytes)}; give it more or choose a smaller context"
            )
        return n_pages
    from chabok.checkpoints.memory import available_memory

    return max(least, min(DEFAULT_CONTEXTS * least, available_memory() // 4 // page_bytes))


def _check_memory(gguf: GGUF, options: Options) -> None:
    """Raise ResourceError, before anything is loaded, if weights and one context cannot fit."""
    from chabok.checkpoints.memory import require

    arch = gguf.architecture
    n_ctx_train = gguf.get(f"{arch}.context_length", int, at_least=1)
    context = context_for(n_ctx_train, options.context)
    kv_bytes = options.kv_memory or context * _token_bytes(gguf)
    weights = sum(tensor.n_bytes for tensor in gguf.tensors.values())
    require(weights + kv_bytes, f"{gguf.path.name} with a context of {context} tokens")


def _token_bytes(gguf: GGUF) -> int:
    """Bytes of keys and values of one token, 16 bits each, in all layers."""
    from chabok.models.config import MAX_LAYERS

    arch = gguf.architecture
    n_layers = gguf.get(f"{arch}.block_count", int, at_least=1, at_most=MAX_LAYERS)
    heads = gguf.per_layer(f"{arch}.attention.head_count", n_layers, 1, at_least=1)
    size = gguf.get(f"{arch}.embedding_length", int, at_least=1) // heads[0]
    kv_heads = gguf.per_layer(f"{arch}.attention.head_count_kv", n_layers, heads[0])
    keys = gguf.get(f"{arch}.attention.key_length", int, size, at_least=1)
    values = gguf.get(f"{arch}.attention.value_length", int, size, at_least=1)
    return sum(kv_heads) * (keys + values) * 2
