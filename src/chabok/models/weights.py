"""A file's tensors as packed matrices and vectors, in the arrangement the programs read.

Matrices are packed into strips. On the way the rows of queries and keys are put in the kernel's rotary order,
gate and up are interleaved strip by strip where their types agree, and experts follow one another.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from chabok.checkpoints import packed
from chabok.checkpoints.gguf import GGUF, Tensor
from chabok.checkpoints.progress import Progress
from chabok.compute.blocks import FORMATS, PAIR, STRIP, Bytes, Format, pack, widen
from chabok.errors import CheckpointError
from chabok.models import rope
from chabok.models.config import Config

LAYOUT_VERSION = 1
"""Part of the name of packed weights: to be raised when their arrangement changes."""


@dataclass(frozen=True)
class Matrix:
    """A packed matrix [rows, k], or one per expert."""

    format: Format
    rows: int
    k: int
    data: Bytes
    experts: int = 1

    @property
    def pairs(self) -> int:
        """Pairs of strips, of one expert."""
        return -(-self.rows // PAIR)

    @property
    def strip_bytes(self) -> int:
        """Bytes of a strip."""
        return self.format.strip_bytes(self.k)

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert."""
        return self.format.packed_bytes(self.rows, self.k)

    @property
    def units(self) -> int:
        """Packed units in a row."""
        return self.k // self.format.unit


@dataclass(frozen=True)
class _Plan:
    """How a packed matrix is made from tensors of the file."""

    name: str
    format: Format
    rows: int
    k: int
    experts: int
    fill: Callable[[Bytes], None]


class Weights:
    """Packed matrices and float32 vectors by name; names are the file's, less ``.weight``.

    ``blk.N.ffn_gate_up`` (and ``..._exps``) stand for gate and up interleaved.
    """

    def __init__(self, gguf: GGUF, config: Config) -> None:
        self._gguf, self._config = gguf, config
        self._plans: dict[str, _Plan] = {}
        self._vectors: dict[str, Tensor] = {}
        self._order = rope.order(config.rope, config.head_dim)
        self.matrices: dict[str, Matrix] = {}
        self.vectors: dict[str, NDArray[np.float32]] = {}
        self._plan()

    def __contains__(self, name: str) -> bool:
        return name in self._plans or name in self._vectors

    @property
    def n_bytes(self) -> int:
        """Bytes of all matrices, packed."""
        return sum(p.format.packed_bytes(p.rows, p.k) * p.experts for p in self._plans.values())

    # -- what is wanted
    # ---------------------------------------------------------------------------------------

    def _plan(self) -> None:
        c = self._config
        self._matrix("token_embd", c.vocab, c.dim)
        self._vector("output_norm", c.dim)
        if "output.weight" in self._gguf.tensors:
            self._matrix("output", c.vocab, c.dim)
        if "rope_freqs.weight" in self._gguf.tensors:
            self._vector("rope_freqs", c.rope.n_rot // 2)
        for layer in range(c.n_layers):
            blk = f"blk.{layer}."
            self._vector(blk + "attn_norm", c.dim)
            for part, heads in (("q", c.n_heads), ("k", c.n_kv_heads), ("v", c.n_kv_heads)):
                self._matrix(blk + f"attn_{part}", heads * c.head_dim, c.dim, turned=part != "v")
                self._vector(blk + f"attn_{part}.bias", heads * c.head_dim, optional=True)
            self._matrix(blk + "attn_output", c.dim, c.q_dim)
            self._vector(blk + "attn_output.bias", c.dim, optional=True)
            for part in ("q", "k"):
                self._vector(blk + f"attn_{part}_norm", c.head_dim, optional=True)
            self._vector(blk + "post_attention_norm", c.dim, optional=True)
            self._all_or_none(blk, ("attn_q_norm", "attn_k_norm"))
            self._vector(blk + "ffn_norm", c.dim)
            self._vector(blk + "post_ffw_norm", c.dim, optional=True)
            if c.n_experts and blk + "ffn_gate_inp.weight" in self._gguf.tensors:
                self._matrix(blk + "ffn_gate_inp", c.n_experts, c.dim)
                self._gated(blk, "_exps", c.expert_ff, c.n_experts)
                self._matrix(blk + "ffn_down_exps", c.dim, c.expert_ff, experts=c.n_experts)
            else:
                self._gated(blk, "", c.ff, 1)
                self._matrix(blk + "ffn_down", c.dim, c.ff)

        self._check_post_norms()

    def _all_or_none(self, blk: str, names: tuple[str, ...]) -> None:
        """Raise CheckpointError if a layer has some of these vectors but not all."""
        missing = [name for name in names if blk + name not in self._vectors]
        if 0 < len(missing) < len(names):
            raise CheckpointError(
                f"{self._gguf.path}: tensor '{blk}{missing[0]}.weight' is missing, though the layer has "
                f"'{next(name for name in names if name not in missing)}'"
            )

    def _check_post_norms(self) -> None:
        """Norms after blocks are in all layers or in none, and not after experts: programs are laid out for
        that."""
        names = ("post_attention_norm", "post_ffw_norm")
        blocks = [f"blk.{layer}." for layer in range(self._config.n_layers)]
        found = [blk + name for blk in blocks for name in names if blk + name in self._vectors]
        wanted = [blk + name for blk in blocks for name in names] if found else []
        for name in wanted:
            if name not in found:
                raise CheckpointError(
                    f"{self._gguf.path}: tensor '{name}.weight' is missing, though '{found[0]}' is there"
                )
        if found and self._config.n_experts:
            raise CheckpointError(
                f"{self._gguf.path}: tensor '{found[0]}.weight': norms after experts are not supported"
            )

    def _tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self._gguf.tensors.get(name)
        where = f"{self._gguf.path}: tensor '{name}'"
        if tensor is None:
            raise CheckpointError(f"{where} is missing; the file is incomplete or of another architecture")
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{where} has shape {tuple(tensor.shape)}; the model's sizes ask for {shape}"
            )
        if tensor.type not in FORMATS:
            raise CheckpointError(
                f"{where} has type {tensor.type}, which is not supported; supported are {', '.join(FORMATS)}"
            )
        return tensor

    def _vector(self, name: str, size: int, *, optional: bool = False) -> None:
        full = name if name.endswith(".bias") else f"{name}.weight"
        if optional and full not in self._gguf.tensors:
            return
        tensor = self._tensor(full, (size,))
        if FORMATS[tensor.type].quantized:
            raise CheckpointError(
                f"{self._gguf.path}: tensor '{full}' has type {tensor.type}; "
                "a vector must be F32, F16 or BF16"
            )
        self._vectors[name] = tensor

    def _format(self, tensor: Tensor, k: int) -> Format:
        fmt = FORMATS[tensor.type]
        try:
            fmt.row_bytes(k)
        except ValueError as error:
            raise CheckpointError(f"{self._gguf.path}: tensor '{tensor.name}': {error}") from None
        return fmt

    def _matrix(self, name: str, rows: int, k: int, *, turned: bool = False, experts: int = 1) -> None:
        stacked = name.endswith("_exps")
        tensor = self._tensor(f"{name}.weight", (experts, rows, k) if stacked else (rows, k))
        fmt = self._format(tensor, k)
        row_bytes = fmt.row_bytes(k)
        reorder = turned and not np.array_equal(self._order, np.arange(len(self._order)))

        def fill(out: Bytes) -> None:
            raw = tensor.data
            if reorder:
                heads = raw.reshape(-1, len(self._order), row_bytes)
                raw = heads[:, self._order].reshape(-1)
            _pack_experts(fmt, raw.reshape(experts, -1), rows, k, out)

        self._plans[name] = _Plan(name, fmt, rows, k, experts, fill)

    def _gated(self, blk: str, suffix: str, ff: int, experts: int) -> None:
        """Gate and up: one matrix of alternating strips if their types agree, else two."""
        k = self._config.dim
        names = [f"{blk}ffn_{part}{suffix}" for part in ("gate", "up")]
        shape = (experts, ff, k) if suffix else (ff, k)
        gate, up = (self._tensor(f"{n}.weight", shape) for n in names)
        if gate.type != up.type:
            for name in names:
                self._matrix(name, ff, k, experts=experts)
            return
        fmt = self._format(gate, k)
        row_bytes = fmt.row_bytes(k)

        def fill(out: Bytes) -> None:
            for e, to in enumerate(out.reshape(experts, -1)):
                size = ff * row_bytes
                strips = [
                    t.data[e * size : (e + 1) * size].reshape(-1, STRIP * row_bytes) for t in (gate, up)
                ]
                _pack_experts(fmt, np.stack(strips, axis=1).reshape(1, -1), 2 * ff, k, to)

        name = f"{blk}ffn_gate_up{suffix}"
        self._plans[name] = _Plan(name, fmt, 2 * ff, k, experts, fill)

    # -- packing and mapping
    # ----------------------------------------------------------------------------------

    def load(self, store: packed.PackedStore | None, progress: Progress | None) -> None:
        """Map the packed matrices, packing them first if they are not on disk; read the vectors."""
        key = f"{self._gguf.fingerprint}-{LAYOUT_VERSION}"
        n_values = [t.n_values for t in self._vectors.values()]

        def entries() -> list[packed.PackedEntry]:
            found = [
                packed.PackedEntry(p.name, p.format.packed_bytes(p.rows, p.k) * p.experts, p.fill)
                for p in self._plans.values()
            ]
            return [*found, packed.PackedEntry("vectors", 4 * sum(n_values), self._fill_vectors)]

        source: dict[str, object] = {"source": str(self._gguf.path), "fingerprint": self._gguf.fingerprint}
        found = packed.load(store, key, entries, source, progress)
        self._file = found
        for name, p in self._plans.items():
            data = found.arrays[name]
            if data.size != p.format.packed_bytes(p.rows, p.k) * p.experts:
                raise CheckpointError(
                    f"{found.path}: packed '{name}' has {data.size} bytes; remove this folder to pack again"
                )
            self.matrices[name] = Matrix(p.format, p.rows, p.k, data, p.experts)
        values = np.array(found.arrays["vectors"]).view(np.float32)
        for (name, _), part in zip(self._vectors.items(), np.split(values, np.cumsum(n_values)[:-1])):
            # Kernels load whole vectors of 16, and bias vectors are read a pair of strips at a time.
            padded = np.zeros(-(-len(part) // PAIR) * PAIR, np.float32)
            padded[: len(part)] = part
            self.vectors[name] = padded

    def _fill_vectors(self, out: Bytes) -> None:
        parts = []
        c = self._config
        for name, tensor in self._vectors.items():
            values = widen(FORMATS[tensor.type], np.array(tensor.data))
            turned = name.endswith(("attn_q.bias", "attn_k.bias", "attn_q_norm", "attn_k_norm"))
            parts.append(values.reshape(-1, c.head_dim)[:, self._order].reshape(-1) if turned else values)
        out[:] = np.concatenate(parts).view(np.uint8)


def _pack_experts(fmt: Format, raw: Bytes, rows: int, k: int, out: Bytes) -> None:
    """Pack matrices that follow one another, raw uint8[experts, bytes], on all cores in pieces of
    about 2 MB."""
    row_bytes, pair_bytes = fmt.row_bytes(k), 2 * fmt.strip_bytes(k)
    step = max(PAIR, (1 << 21) // row_bytes // PAIR * PAIR)
    pieces = []
    for source, to in zip(raw, out.reshape(len(raw), -1)):
        for first in range(0, rows, step):
            n = min(step, rows - first)
            start = first // PAIR * pair_bytes
            pieces.append(
                (
                    source[first * row_bytes : (first + n) * row_bytes],
                    n,
                    to[start : start + -(-n // PAIR) * pair_bytes],
                )
            )
    if len(pieces) == 1:
        pack(fmt, pieces[0][0], pieces[0][1], k, pieces[0][2])
        return
    with ThreadPoolExecutor() as workers:
        list(workers.map(lambda piece: pack(fmt, piece[0], piece[1], k, piece[2]), pieces))
