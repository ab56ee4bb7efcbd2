"""The parts transformers are made of, as steps of a program.

A ``Graph`` appends steps for one configuration. It is built twice: for few rows (decoding), where each thread
prepares the small inputs of a product for itself and threads meet only after products; and for many, where
all work is shared out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from chabok.compute.kernels.attention import Attention, Merge
from chabok.compute.kernels.experts import Choose, Combine, Sort, Spread
from chabok.compute.kernels.matmul import MatMul
from chabok.compute.kernels.quantize import Quantize
from chabok.compute.kernels.rope import RopeStore
from chabok.compute.kernels.rows import AddNorm, Embed, Gate, Gather, Pick, Summarize
from chabok.compute.program import Operand, Program
from chabok.models.config import Config
from chabok.models.rope import RopeTable
from chabok.models.weights import Matrix, Weights
from chabok.models.workspace import FEW_ROWS, Workspace

CHUNK_BYTES = 32 * 1024
"""Weights a thread takes at a time when it streams them: large enough that taking costs nothing, small enough
that threads finish together."""

NONE = np.zeros(64, np.uint8)
"""What an operand that is not read points at."""


@dataclass
class Input:
    """Rows that products read: lines of 8-bit activations and, for unquantized weights, floats. Strides in
    bytes."""

    rows: NDArray[np.int64]
    lines: NDArray[np.uint8]
    floats: NDArray[np.float32]
    k: int
    private: bool
    n_private: int = FEW_ROWS
    """Rows in a thread's own copy."""
    terms: int = 1
    """Lines that make up a row, where its rounding matters most."""
    skipped: int = 0
    """Lines after each that belong to the row but are not read."""

    def operands(self, matrix: Matrix) -> tuple[NDArray[np.generic], int, int]:
        """Address, bytes of a row, bytes of a thread's copy (0 where all share one)."""
        source: NDArray[np.generic] = self.lines if matrix.format.quantized else self.floats
        line, quantized = source.strides[0], matrix.format.quantized
        private = (
            line * self.n_private * (self.terms + self.skipped if quantized else 1) if self.private else 0
        )
        return source, line * (1 + self.skipped) if quantized else line, private

    def coarse(self) -> Input:
        """The same rows without their second lines."""
        return replace(self, terms=1, skipped=self.terms - 1)

    def terms_of(self, matrix: Matrix) -> int:
        """Lines in a row of what a matrix reads: floats need no second one."""
        return self.terms if matrix.format.quantized else 1


class Graph:
    """Appends the steps of a model to a program."""

    def __init__(
        self, c: Config, weights: Weights, work: Workspace, tables: tuple[RopeTable, RopeTable], *, few: bool
    ) -> None:
        """tables: rotations of global and of local layers. few: whether the program is for at most FEW_ROWS
        rows."""
        self.c, self.weights, self.work, self.tables, self.few = c, weights, work, tables, few
        self.program = Program()
        # Where blocks end with a norm, the residual sum needs whole rows: for few rows each thread keeps its
        # own stream.
        self.own_stream = few and "blk.0.post_attention_norm" in weights
        self.x_private = FEW_ROWS * work.x.strides[0] if self.own_stream else 0

    # -- single steps
    # -----------------------------------------------------------------------------------------

    def embed(self) -> None:
        """x = rows of the embedding table, scaled."""
        table, c = self.weights.matrices["token_embd"], self.c
        self.program.step(
            Embed(table.format.name, private=self.own_stream),
            barrier=not self.own_stream,
            rows=self.work.n_rows,
            tokens=self.work.tokens,
            table=table.data,
            strip_bytes=table.strip_bytes,
            units=table.units,
            scale=float(c.embedding_scale),
            out=self.work.x,
            out_stride=self.work.x.strides[0],
            out_private=self.x_private,
        )

    def prepare(
        self,
        x: NDArray[np.float32],
        k: int,
        norm: str | None,
        readers: list[Matrix],
        *,
        to: Input,
        x_private: int = 0,
    ) -> Input:
        """Make the input of products: rows of x, normalized if a norm is named, in the forms their weights
        need."""
        forms = sorted({m.format.quantized for m in readers})
        for to_bytes in forms:
            reader = next(m for m in readers if m.format.quantized == to_bytes)
            target, stride, private = to.operands(reader)
            terms = to.terms_of(reader)
            # A thread's own stream can only be read by that thread: in shared mode every copy is the same.
            self.program.step(
                Quantize(norm is not None, to_bytes, private=to.private, terms=terms),
                barrier=not to.private and to_bytes == forms[-1],
                rows=to.rows,
                x=x,
                x_stride=x.strides[0],
                x_private=x_private,
                k=k,
                norm=self.weights.vectors[norm] if norm else NONE,
                eps=float(self.c.eps),
                out=target,
                out_stride=stride * terms,
                out_private=private,
                line_stride=stride,
            )
        return to

    def product(
        self,
        matrix: Matrix,
        source: Input,
        out: NDArray[np.float32],
        *,
        epilogue: str = "store",
        bias: str | None = None,
        barrier: bool = True,
        experts: bool = False,
    ) -> None:
        """out = source times a matrix; out's rows lie ``out.strides[0]`` bytes apart."""
        x, x_stride, x_private = source.operands(matrix)
        bias = bias if bias in self.weights.vectors else None
        pair_bytes = 2 * matrix.strip_bytes
        # Half of the strips are shared out beforehand; the rest goes, in small pieces, to whoever is free.
        share = matrix.pairs // (2 * self.work.threads)
        more: dict[str, Operand] = {}
        if experts:
            routes = self.work.routes
            more = {
                "active": routes.fields["active"],
                "n_active": routes.fields["n_active"],
                "active_private": routes.copy if self.few else 0,
                "expert_bytes": matrix.expert_bytes,
            }
        self.program.step(
            MatMul(matrix.format.name, epilogue, bias is not None, experts, source.terms_of(matrix)),
            barrier=barrier,
            rows=source.rows,
            x=x,
            x_stride=x_stride,
            x_private=x_private,
            w=matrix.data,
            strip_bytes=matrix.strip_bytes,
            pairs=matrix.pairs,
            share=share,
            chunk=max(1, CHUNK_BYTES // pair_bytes),
            units=matrix.units,
            out=out,
            out_stride=out.strides[0],
            bias=self.weights.vectors[bias] if bias else NONE,
            scratch=self.work.scratch,
            scratch_stride=self.work.scratch.strides[0],
            **more,
        )

    def stream_input(self, norm: str, readers: list[Matrix], terms: int = 1) -> Input:
        """The normalized residual stream as input of products."""
        c, w = self.c, self.work
        lines = w.lines if terms == 1 else w.fine_lines
        to = Input(w.n_rows, lines, w.floats, c.dim, self.few, terms=terms)
        return self.prepare(w.x, c.dim, norm, readers, to=to, x_private=self.x_private)

    def add_to_stream(self, matrix: Matrix, source: Input, post_norm: str, bias: str | None = None) -> None:
        """x += source times matrix, normalized first if the file has such a norm."""
        c, w = self.c, self.work
        if post_norm not in self.weights:
            self.product(matrix, source, w.x, epilogue="add", bias=bias)
            return
        self.product(matrix, source, w.y, bias=bias)
        last = post_norm == f"blk.{c.n_layers - 1}.post_ffw_norm"
        self.program.step(
            AddNorm(private=self.own_stream),
            barrier=not self.own_stream or last,
            rows=w.n_rows,
            x=w.x,
            x_stride=w.x.strides[0],
            x_private=self.x_private,
            y=w.y,
            y_stride=w.y.strides[0],
            k=c.dim,
            norm=self.weights.vectors[post_norm],
            eps=float(c.eps),
        )

    def transformer(self) -> None:
        """Embedding; in each layer attention, then feed-forward or, where it has a router, experts;
        the head."""
        self.embed()
        for layer in range(self.c.n_layers):
            self.attention(layer)
            if f"blk.{layer}.ffn_gate_inp" in self.weights:
                self.experts(layer)
            else:
                self.feed_forward(layer)
        self.head()

    # -- blocks
    # -----------------------------------------------------------------------------------------------

    def attention(self, layer: int) -> None:
        """x += attention(norm(x))."""
        c, w, blk = self.c, self.work, f"blk.{layer}."
        matrices = [self.weights.matrices[f"{blk}attn_{part}"] for part in "qkv"]
        # Rounding does most harm in keys and values, which every later row reads, and where the model ends
        # (measured as perplexity). These products are small: their activations are kept to fifteen bits.
        source = self.stream_input(blk + "attn_norm", matrices, terms=2)
        starts = (0, c.q_dim, c.q_dim + c.kv_dim)
        for part, matrix, start in zip("qkv", matrices, starts):
            reads = source.coarse() if part == "q" else source
            self.product(matrix, reads, w.qkv[:, start:], bias=f"{blk}attn_{part}.bias", barrier=part == "v")
        local = c.is_local(layer)
        norms = blk + "attn_q_norm" in self.weights
        stride, offset = w.qkv.strides[0], layer * c.page_layer_bytes
        self.program.step(
            RopeStore(c.head_dim, norms),
            rows=w.n_rows,
            qkv=w.qkv,
            qkv_stride=stride,
            heads=c.n_heads,
            kv_heads=c.n_kv_heads,
            positions=w.positions,
            pages=w.pages,
            layer=offset,
            table=self.tables[local].values,
            q_scale=float(c.attention_scale),
            q_norm=self.weights.vectors[blk + "attn_q_norm"] if norms else NONE,
            k_norm=self.weights.vectors[blk + "attn_k_norm"] if norms else NONE,
            eps=float(c.eps),
        )
        self.program.step(
            Attention(c.head_dim, c.n_heads // c.n_kv_heads, window=local, cap=c.attention_cap > 0),
            items=w.items,
            n_items=w.n_items,
            qkv=w.qkv,
            qkv_stride=stride,
            kv_heads=c.n_kv_heads,
            cache=w.cache_base,
            page_bytes=c.page_bytes,
            layer=offset,
            window=c.window,
            cap=float(c.attention_cap),
            partials=w.partials,
            scratch=w.scratch,
            scratch_stride=w.scratch.strides[0],
        )
        output = self.weights.matrices[blk + "attn_output"]
        mixed = Input(w.n_rows, w.lines, w.floats, c.q_dim, self.few)
        target, out_stride, private = mixed.operands(output)
        self.program.step(
            Merge(c.head_dim, output.format.quantized, private=self.few),
            barrier=not self.few,
            rows=w.n_rows,
            slots=w.slots,
            partials=w.partials,
            heads=c.n_heads,
            out=target,
            out_stride=out_stride,
            out_private=private,
            scratch=w.scratch,
            scratch_stride=w.scratch.strides[0],
        )
        self.add_to_stream(output, mixed, blk + "post_attention_norm", blk + "attn_output.bias")

    def feed_forward(self, layer: int) -> None:
        """x += down(act(gate(norm(x))) * up(norm(x)))."""
        c, w, blk = self.c, self.work, f"blk.{layer}."
        down = self.weights.matrices[blk + "ffn_down"]
        readers = self._gate_readers(blk, "")
        source = self.stream_input(blk + "ffn_norm", readers)
        hidden = Input(w.n_rows, w.hidden_lines, w.hidden_floats, c.ff, self.few)
        self._gated(readers, source, hidden, down)
        self.add_to_stream(down, hidden, blk + "post_ffw_norm")

    def _gate_readers(self, blk: str, suffix: str) -> list[Matrix]:
        together = f"{blk}ffn_gate_up{suffix}"
        names = (
            [together]
            if together in self.weights
            else [f"{blk}ffn_{part}{suffix}" for part in ("gate", "up")]
        )
        return [self.weights.matrices[name] for name in names]

    def _gated(
        self, readers: list[Matrix], source: Input, hidden: Input, down: Matrix, *, experts: bool = False
    ) -> None:
        """hidden = act(gate) * up, ready for ``down``."""
        w, act = self.work, self.c.activation
        if len(readers) == 1:
            self.product(readers[0], source, w.gate, epilogue=act, experts=experts)
            self.prepare(w.gate, hidden.k, None, [down], to=hidden)
            return
        for matrix, out in zip(readers, (w.gate, w.up)):
            self.product(matrix, source, out, barrier=out is w.up, experts=experts)
        target, stride, private = hidden.operands(down)
        self.program.step(
            Gate(act, down.format.quantized, private=hidden.private),
            barrier=not hidden.private,
            rows=hidden.rows,
            gate=w.gate,
            up=w.up,
            stride=w.gate.strides[0],
            k=hidden.k,
            out=target,
            out_stride=stride,
            out_private=private,
        )

    def experts(self, layer: int) -> None:
        """x += weighted sum over each row's experts of their feed-forward."""
        c, w, blk, used = self.c, self.work, f"blk.{layer}.", self.c.n_experts_used
        routes, few = w.routes, self.few
        router, down = (
            self.weights.matrices[blk + "ffn_gate_inp"],
            self.weights.matrices[blk + "ffn_down_exps"],
        )
        readers = self._gate_readers(blk, "_exps")
        source = self.stream_input(blk + "ffn_norm", [router, *readers])
        self.product(router, source, w.router)
        f, copy = routes.fields, routes.copy if few else 0
        self.program.step(
            Choose(used, private=few),
            barrier=not few,
            rows=w.n_rows,
            logits=w.router,
            logits_stride=w.router.strides[0],
            experts=c.n_experts,
            ids=f["ids"],
            weights=f["weights"],
            private=copy,
        )
        self.program.step(
            Sort(used, private=few),
            barrier=not few,
            rows=w.n_rows,
            experts=c.n_experts,
            private=copy,
            ids=f["ids"],
            starts=f["starts"],
            source=f["source"],
            place=f["place"],
            active=f["active"],
            n_active=f["n_active"],
            n_sorted=f["n_sorted"],
        )
        n_sorted = f["n_sorted"].view(np.int64)
        n_private = FEW_ROWS * used
        spread = Input(n_sorted, w.expert_lines, w.expert_floats, c.dim, few, n_private)
        x, x_stride, x_private = source.operands(readers[0])
        to, to_stride, to_private = spread.operands(readers[0])
        self.program.step(
            Spread(private=few),
            barrier=not few,
            rows=n_sorted,
            source=f["source"],
            x=x,
            x_stride=x_stride,
            x_private=x_private,
            bytes=to.shape[1] * to.itemsize,
            out_stride=to_stride,
            out=to,
            out_private=to_private,
            private=copy,
        )
        # Every thread's n_sorted is the same number, so the first copy serves where only the count is read.
        hidden = Input(n_sorted, w.hidden_lines, w.hidden_floats, c.expert_ff, few, n_private)
        self._gated(readers, spread, hidden, down, experts=True)
        self.product(down, hidden, w.expert_out, experts=True)
        self.program.step(
            Combine(used),
            rows=w.n_rows,
            x=w.x,
            x_stride=w.x.strides[0],
            y=w.expert_out,
            y_stride=w.expert_out.strides[0],
            weights=f["weights"],
            place=f["place"],
            k=c.dim,
        )

    def head(self) -> None:
        """Logits of the rows that want them, and what choosing a token needs to know of them."""
        c, w = self.c, self.work
        matrix = self.weights.matrices["output" if "output" in self.weights else "token_embd"]
        self.program.step(
            Gather(),
            rows=w.n_out,
            index=w.out_rows,
            x=w.x,
            x_stride=w.x.strides[0],
            k=c.dim,
            out=w.out_x,
            out_stride=w.out_x.strides[0],
        )
        to = Input(w.n_out, w.fine_lines, w.floats, c.dim, self.few, terms=2)
        source = self.prepare(w.out_x, c.dim, "output_norm", [matrix], to=to)
        self.product(matrix, source, w.logits)
        self.program.step(
            Summarize(cap=c.final_cap > 0),
            rows=w.n_out,
            logits=w.logits,
            stride=w.logits.strides[0],
            n=c.vocab,
            cap=float(c.final_cap),
            maxima=w.maxima,
            maxima_stride=w.maxima.strides[0],
            sums=w.sums,
            sums_stride=w.sums.strides[0],
            scales=w.scales,
        )
        self.program.step(
            Pick(),
            rows=w.n_out,
            logits=w.logits,
            stride=w.logits.strides[0],
            n=c.vocab,
            maxima=w.maxima,
            maxima_stride=w.maxima.strides[0],
            sums=w.sums,
            sums_stride=w.sums.strides[0],
            best=w.best,
        )
