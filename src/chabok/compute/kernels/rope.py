"""Queries and keys turned by their positions, keys and values filed in their pages."""

from __future__ import annotations

from dataclasses import dataclass

from chabok.compute.emit import F16, F32, I16, I32, I64, PTR, Function, Module, Value
from chabok.compute.isa import ISA
from chabok.compute.kernels.attention import PAGE, head_bytes
from chabok.compute.kernels.common import begin, chunks, flagged
from chabok.compute.kernels.quantize import root_mean_square


@dataclass(frozen=True)
class RopeStore:
    """Rotates queries and keys by their positions and files keys and values in their pages.

    qkv float32[rows, (heads + 2 * kv_heads) * head_dim]: queries are rotated in place and scaled, keys and
    values become f16 in the cache. Dimension i turns with i + half; with ``norms``, each head is first
    divided by its root mean square and multiplied by a weight of its own (q_norm, k_norm). Half of the
    table's row is cosines, half sines.

    Su et al., "RoFormer" (2021).
    """

    head_dim: int
    norms: bool = False

    fields = ("rows", "qkv", "qkv_stride", "heads", "kv_heads", "positions", "pages", "layer", "table",
              "q_scale", "q_norm", "k_norm", "eps", "counter")  # fmt: skip

    @property
    def symbol(self) -> str:
        """Name of the function."""
        return flagged(f"rope_store_{self.head_dim}", norms=self.norms)

    def emit(self, module: Module, isa: ISA) -> None:
        """Write the kernel."""
        f, ops = begin(module, self.symbol, self.fields)
        dim = self.head_dim
        rows, heads, kv_heads = ops.ptr("rows").load(I64), ops.int("heads"), ops.int("kv_heads")
        all_heads = heads + kv_heads * 2
        blocks = (rows + 15) // 16
        # An item is one head of sixteen rows: threads then rarely write to the same line of a transposed
        # page.
        with (
            chunks(f, ops.ptr("counter"), blocks * all_heads, 2) as (start, stop),
            f.loop(start, stop) as item,
        ):
            head, first = item % all_heads, item // all_heads * 16
            with f.loop(first, f.minimum(first + 16, rows)) as r:
                x = ops.ptr("qkv").at(r * ops.int("qkv_stride")).at(head, 4 * dim)
                position = ops.ptr("positions").at(r, 4).load(I32).sext(I64)
                with f.either(head < heads) as otherwise:
                    rotated = self.rotate(
                        f, ops.ptr("table"), x, position, ops.ptr("q_norm"), ops.float("eps")
                    )
                    for i, v in enumerate(rotated):
                        x.store(v * ops.float("q_scale"), 64 * i)
                    otherwise()
                    page = ops.ptr("pages").at(r, 8).load(PTR, align=8).at(ops.int("layer"))
                    token = position & (PAGE - 1)
                    is_key = head < heads + kv_heads
                    kv_head = is_key.select(head - heads, head - heads - kv_heads)
                    keys = page.at(kv_head, head_bytes(dim))
                    with f.either(is_key) as value_branch:
                        rotated = self.rotate(
                            f, ops.ptr("table"), x, position, ops.ptr("k_norm"), ops.float("eps")
                        )
                        column = keys.at(token, 2)
                        for i, v in enumerate(rotated):
                            narrow = _to_half(f, v).bitcast(I16 * 16)
                            for lane in range(16):
                                column.store(narrow.lane(lane), (16 * i + lane) * PAGE * 2)
                        value_branch()
                        values = keys.at(PAGE * dim * 2).at(token, dim * 2)
                        for i in range(dim // 16):
                            values.store(_to_half(f, x.load(F32 * 16, 64 * i)), 32 * i)

    def rotate(
        self, f: Function, table: Value, x: Value, position: Value, norm: Value, eps: Value
    ) -> list[Value]:
        """A head's vectors of 16, normalized if asked, rotated."""
        n = self.head_dim // 16
        v = [x.load(F32 * 16, 64 * i) for i in range(n)]
        if self.norms:
            factor = root_mean_square(f, x, f.const(self.head_dim, I64), eps)
            v = [a * factor * norm.load(F32 * 16, 64 * i) for i, a in enumerate(v)]
        turn = table.at(position, 4 * self.head_dim)
        low, high = [], []
        for i in range(n // 2):
            cos, sin = turn.load(F32 * 16, 64 * i), turn.load(F32 * 16, 64 * (n // 2 + i))
            a, b = v[i], v[n // 2 + i]
            low.append(f.fma(a, cos, -(b * sin)))
            high.append(f.fma(b, cos, a * sin))
        return low + high


def _to_half(f: Function, v: Value) -> Value:
    """Floats as f16, kept within its range."""
    return f.maximum(f.minimum(v, 65504.0), -65504.0).to_float(F16)
