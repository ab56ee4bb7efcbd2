"""A model's weights: which matrices, in which block formats, and how much of them a token touches."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from chabok.errors import RequestError

FINE = ("attn_q", "attn_k", "attn_v", "output")
"""Products whose activations are two lines a row when prompts are read (docs/internals.md)."""
K_FALLBACK = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""What llama.cpp's quantizer takes for rows that are not multiples of 256."""
MIXTURES = {"Q4_K_M": ("Q4_K", "Q6_K"), "Q5_K_M": ("Q5_K", "Q6_K")}
"""File types that mix two: the usual one, and that of matrices which matter more."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix [rows, k], ``copies`` of it (experts), ``used`` of which one token goes through."""

    role: str
    rows: int
    k: int
    format: str
    copies: int = 1
    used: int = 1

    @property
    def n_bytes(self) -> int:
        """Bytes of one copy, as the kernels read it (packed in strips)."""
        from chabok.compute.blocks import FORMATS

        return FORMATS[self.format].packed_bytes(self.rows, self.k)

    @property
    def file_bytes(self) -> int:
        """Bytes of all copies in a file."""
        from chabok.compute.blocks import FORMATS

        return FORMATS[self.format].row_bytes(self.k) * self.rows * self.copies

    def touched(self, rows: int) -> float:
        """Bytes that a step of so many rows reads: each expert once that any of them goes through."""
        if self.copies == 1:
            return float(self.n_bytes)
        missed = (1 - self.used / self.copies) ** rows
        return self.n_bytes * self.copies * (1 - missed)


@dataclass(frozen=True)
class Shape:
    """A model's sizes. matrices: all that a token is multiplied with; the table of embeddings is not among
    them unless it is the head, too. table: that table, where it lies apart. derived: whether types of tensors
    were derived rather than read from a file. ff: of all experts that a token uses."""

    name: str
    architecture: str
    layers: int
    dim: int
    ff: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    matrices: tuple[Matrix, ...]
    table: Matrix | None = None
    window: int = 0
    window_period: int = 0
    experts: int = 0
    experts_used: int = 0
    derived: bool = True
    source: str = ""

    @property
    def file_bytes(self) -> int:
        """Bytes of all matrices in a file."""
        return sum(m.file_bytes for m in self.matrices) + (self.table.file_bytes if self.table else 0)

    @property
    def multiply_adds(self) -> float:
        """Of one prompt token with all matrices but the head, which only the last token goes through; what is
        computed twice as finely counts twice."""
        return float(
            sum(m.rows * m.k * m.used * (1 + (m.role in FINE)) for m in self.matrices if m.role != "output")
        )

    @property
    def elements(self) -> float:
        """Numbers of one token that are normed, turned, quantized or added, beside products."""
        kv = 2 * self.kv_heads * self.head_dim
        spread = self.experts_used * self.dim if self.experts else 0
        return float(self.layers * (2 * self.dim + self.ff + self.heads * self.head_dim + kv + spread))

    def seen(self, context: float) -> float:
        """Keys that a token at the end of a context looks at, summed over layers."""
        local = self.layers - self.layers // self.window_period if self.window and self.window_period else 0
        return (self.layers - local) * context + local * min(context, self.window)

    def kv_bytes(self, context: float) -> float:
        """Bytes of cached keys and values that a token at the end of a context reads (16 bits each)."""
        return self.seen(context) * self.kv_heads * self.head_dim * 2 * 2

    def attention_multiply_adds(self, prompt: int) -> float:
        """Of a whole prompt: each token with the keys and values before it, floats."""
        if self.window and self.window_period and prompt > self.window:
            full = self.layers // self.window_period
            near = (self.layers - full) * (prompt - self.window / 2) * self.window
            keys = full * prompt**2 / 2 + near
        else:
            keys = self.layers * prompt**2 / 2
        return keys * self.heads * self.head_dim * 2

    def quantized(self, kind: str) -> Shape:
        """The same model in another quantization, such as q8_0 or q4_k_m; RequestError if it is not known."""
        choose = types(kind)
        matrices = tuple(
            replace(m, format=choose(m.role, _layer(m.role, n, self), self.layers, m.k))
            if m.k and m.format != "F32"
            else m
            for n, m in enumerate(self.matrices)
        )
        table = self.table and replace(self.table, format=choose("token_embd", 0, self.layers, self.table.k))
        return replace(self, matrices=matrices, table=table, derived=True)

    def dense(self) -> Shape:
        """A model of as many weights without experts: every token goes through all of them."""
        matrices = tuple(replace(m, used=m.copies) for m in self.matrices)
        ff = self.ff * self.experts // max(self.experts_used, 1) if self.experts else self.ff
        return replace(self, matrices=matrices, ff=ff, experts=0, experts_used=0)


def _layer(role: str, place: int, shape: Shape) -> int:
    per = max(sum(1 for m in shape.matrices if m.role != "output") // shape.layers, 1)
    return place // per


def types(kind: str) -> Callable[[str, int, int, int], str]:
    """(role, layer, layers, k) -> block format, by the rules of llama.cpp's quantizer (llama-quant.cpp)."""
    from chabok.compute.blocks import FORMATS

    name = kind.upper()
    usual, better = MIXTURES.get(name, (name, name))
    if usual not in FORMATS:
        known = ", ".join(each.lower() for each in [*MIXTURES, *FORMATS])
        raise RequestError(f"{kind!r} is no quantization that is known here; there are {known}")

    def choose(role: str, layer: int, layers: int, k: int) -> str:
        eighth = layers // 8
        more = layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
        fine = role == "output" or (role in ("attn_v", "ffn_down") and more)
        chosen = better if fine else usual
        if chosen in K_FALLBACK and k % 256:
            return K_FALLBACK[chosen]
        return chosen

    return choose


def of_file(path: str | os.PathLike[str], name: str = "") -> Shape:
    """The shape of a model file; CheckpointError if it is none."""
    from chabok.checkpoints.gguf import GGUF
    from chabok.models.config import read

    gguf = GGUF.open(Path(path))
    config = read(gguf)
    tensors = gguf.tensors
    matrices = []
    table = None
    local = gguf.get(f"{config.architecture}.attention.sliding_window", int, 0)
    for full, tensor in tensors.items():
        if len(tensor.shape) < 2:
            continue
        role = re.sub(r"^blk\.\d+\.", "", full.removesuffix(".weight"))
        stacked = len(tensor.shape) == 3
        copies = int(tensor.shape[0]) if stacked else 1
        rows, k = (int(n) for n in tensor.shape[-2:])
        matrix = Matrix(role.removesuffix("_exps"), rows, k, str(tensor.type), copies,
                        config.n_experts_used if stacked else 1)  # fmt: skip
        if role == "token_embd":
            if "output.weight" in tensors:
                table = matrix
                continue
            matrix = replace(matrix, role="output")
        matrices.append(matrix)
    # The head last, layers in the order of the file.
    matrices.sort(key=lambda m: m.role == "output")
    return Shape(
        name or config.name,
        config.architecture,
        config.n_layers,
        config.dim,
        config.expert_ff * config.n_experts_used if config.n_experts else config.ff,
        config.n_heads,
        config.n_kv_heads,
        config.head_dim,
        config.vocab,
        tuple(matrices),
        table,
        local,
        6 if local and config.architecture.startswith("gemma3") else 0,
        config.n_experts,
        config.n_experts_used,
        False,
        os.fspath(path),
    )


@cache
def _published() -> dict[str, dict[str, Any]]:
    text = Path(__file__).with_name("shapes.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def published() -> list[str]:
    """Names of the catalogue whose shape is known."""
    return list(_published())


def of_catalogue(name: str) -> Shape | None:
    """The shape of a model of the catalogue from its publisher's configuration; None if it is not known."""
    known = _published().get(name)
    if known is None:
        return None
    layers, dim, ff, heads, kv = (known[key] for key in ("layers", "dim", "ff", "heads", "kv_heads"))
    head_dim, vocab, experts = known["head_dim"], known["vocab"], known.get("experts", 0)
    used = known.get("experts_used", 0)
    sizes = [
        ("attn_q", heads * head_dim, dim), ("attn_k", kv * head_dim, dim), ("attn_v", kv * head_dim, dim),
        ("attn_output", dim, heads * head_dim),
        ("ffn_gate", ff, dim), ("ffn_up", ff, dim), ("ffn_down", dim, ff),
    ]  # fmt: skip
    choose = types(known["file"])
    matrices = []
    for layer in range(layers):
        for role, rows, k in sizes:
            many = experts if experts and role.startswith("ffn_") else 1
            kind = choose(role, layer, layers, k)
            matrices.append(Matrix(role, rows, k, kind, many, used if many > 1 else 1))
        if experts:
            matrices.append(Matrix("ffn_gate_inp", experts, dim, "F32"))
    head = choose("output", 0, layers, dim)
    table = None
    if known["file"] == "Q4_1":
        head = "Q8_0"  # this publisher's choice for the shared table
    if known["tied"] != "yes":
        table = Matrix("token_embd", vocab, dim, choose("token_embd", 0, layers, dim))
    matrices.append(Matrix("output", vocab, dim, head))
    return Shape(
        name, known["architecture"], layers, dim, ff * used if experts else ff, heads, kv, head_dim, vocab,
        tuple(matrices), table, known.get("window", 0), known.get("window_period", 0), experts, used,
        True, f"config.json of {known['config']}",
    )  # fmt: skip


def of(model: str) -> tuple[Shape, Path | None]:
    """The shape of a model by path or name, and its file if it is here; SourceError if it is not known."""
    from chabok.checkpoints import catalog, sources

    path = sources.find(model)
    if path is not None:
        return of_file(path, Path(model).stem if os.sep in model else model), path
    entry = catalog.find(model)
    shape = of_catalogue(entry.name) if entry is not None else None
    if shape is None:
        raise sources.unknown(model)
    return shape, None
