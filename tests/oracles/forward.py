"""A plain float32 forward pass of a GGUF file, to hold the product's own against.

Read by the ``gguf`` package and computed in numpy, it shares no code with what it checks. One method per
part of a layer, in the order in which they run; no kernels, no pages. A key/value cache (float32) makes long
greedy runs possible, and several sequences may be stepped together.

    oracle = Oracle("model.gguf")
    oracle.logits(token_ids)                    # float32[n, vocab], one row per position
    oracle.greedy([prompt_ids, ...], n=64)      # continuations with the margin of each choice
    oracle.perplexity(windows)                  # of fixed windows of token ids
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType
from gguf.quants import dequantize
from numpy.typing import NDArray

Array = NDArray[np.float32]
FLOAT_TYPES = {"F32", "F16", "BF16"}
FAMILIES = {"llama", "qwen2", "qwen3", "qwen3moe", "gemma3"}


@dataclass(frozen=True)
class Config:
    """Hyper-parameters of a model, named as in the literature rather than as in the file."""

    arch: str
    n_layers: int
    dim: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    value_dim: int
    n_rot: int
    eps: float
    rope_base: float
    rope_base_local: float
    scaling: str  # none, linear, yarn
    scaling_factor: float
    scaling_n_ctx: int
    attention_scale: float
    attention_cap: float  # 0: none
    final_cap: float  # 0: none
    window: int  # keys a row of a local layer sees, itself included; 0: none
    window_period: int  # every such layer is global
    n_experts: int
    n_experts_used: int
    interleaved_rope: bool  # pairs (2i, 2i+1) as llama files store Q and K; else (i, i + n_rot/2)

    def is_local(self, layer: int) -> bool:
        """Whether a layer sees a sliding window only."""
        return self.window > 0 and (layer + 1) % self.window_period != 0

    @classmethod
    def from_metadata(cls, meta: dict[str, Any]) -> Config:
        """Read the fields of the file's architecture."""
        arch = meta["general.architecture"]
        if arch not in FAMILIES:
            raise ValueError(f"the oracle does not know architecture {arch!r}")

        def get(key: str, default: Any = None) -> Any:
            value = meta.get(f"{arch}.{key}", default)
            if value is None:
                raise KeyError(f"{arch}.{key}")
            return value

        dim, n_heads, n_layers = get("embedding_length"), get("attention.head_count"), get("block_count")
        head_dim = get("attention.key_length", dim // n_heads)
        # llama.cpp: Gemma 3 of 62 layers (27B) divides by sqrt(dim / n_heads), the others by sqrt(head_dim).
        scale_dim = dim / n_heads if arch == "gemma3" and n_layers == 62 else head_dim
        return cls(
            arch=arch,
            n_layers=n_layers,
            dim=dim,
            n_heads=n_heads,
            n_kv_heads=get("attention.head_count_kv", n_heads),
            head_dim=head_dim,
            value_dim=get("attention.value_length", dim // n_heads),
            n_rot=get("rope.dimension_count", head_dim),
            eps=get("attention.layer_norm_rms_epsilon"),
            rope_base=get("rope.freq_base", 10000.0),
            rope_base_local=get("rope.freq_base_swa", 10000.0),
            scaling=get("rope.scaling.type", "linear" if get("rope.scaling.factor", 0.0) else "none"),
            scaling_factor=get("rope.scaling.factor", 1.0) or 1.0,
            scaling_n_ctx=get("rope.scaling.original_context_length", get("context_length")),
            attention_scale=get("attention.scale", 0.0) or 1.0 / math.sqrt(scale_dim),
            attention_cap=get("attn_logit_softcapping", 0.0),
            final_cap=get("final_logit_softcapping", 0.0),
            window=get("attention.sliding_window", 0) if arch == "gemma3" else 0,
            window_period=get("attention.sliding_window_pattern", 6),
            n_experts=get("expert_count", 0),
            n_experts_used=get("expert_used_count", 0),
            interleaved_rope=arch == "llama",
        )


@dataclass
class Cache:
    """Keys and values of one sequence so far: per layer float32[n_kv_heads, n, head_dim]."""

    keys: list[Array] = field(default_factory=list)
    values: list[Array] = field(default_factory=list)
    length: int = 0

    def extend(self, layer: int, k: Array, v: Array) -> tuple[Array, Array]:
        """Append the new rows of a layer and return all of them."""
        if layer == len(self.keys):
            self.keys.append(k)
            self.values.append(v)
        else:
            self.keys[layer] = np.concatenate([self.keys[layer], k], axis=1)
            self.values[layer] = np.concatenate([self.values[layer], v], axis=1)
        return self.keys[layer], self.values[layer]


@dataclass(frozen=True)
class Continuation:
    """A greedy continuation: chosen ids, the runner-up at each step, and the difference of their logits."""

    tokens: list[int]
    seconds: list[int]
    gaps: list[float]


class Oracle:
    """The forward pass of one file.

    keep_weights: hold dequantized weights in memory (4 bytes each); else each is dequantized at each use.
    round_activations: round what goes into a quantized matrix to signed 8-bit per 32 values, as integer
    kernels do; shows how far that rounding alone moves the logits.
    """

    def __init__(
        self, path: str | Path, *, keep_weights: bool = True, round_activations: bool = False
    ) -> None:
        reader = GGUFReader(str(path))
        self.config = Config.from_metadata(_scalars(reader))
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.keep_weights = keep_weights
        self.round_activations = round_activations
        self._kept: dict[str, Array] = {}
        self._factors = self.weight("rope_freqs.weight") if "rope_freqs.weight" in self.tensors else None
        self._head = "output.weight" if "output.weight" in self.tensors else "token_embd.weight"

    # Weights

    def weight(self, name: str) -> Array:
        """A whole tensor as float32, in numpy's order of dimensions (rows, k)."""
        if name in self._kept:
            return self._kept[name]
        tensor = self.tensors[name]
        weight = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if self.keep_weights:
            self._kept[name] = weight
        return weight

    def linear(self, x: Array, name: str) -> Array:
        """x @ W.T + b for tensors ``name.weight`` and, if there is one, ``name.bias``."""
        y = self._product(x, self.weight(f"{name}.weight"), f"{name}.weight")
        if f"{name}.bias" in self.tensors:
            y = y + self.weight(f"{name}.bias")
        return y

    def _product(self, x: Array, weight: Array, name: str) -> Array:
        if self.round_activations and self.tensors[name].tensor_type.name not in FLOAT_TYPES:
            x = round_to_int8(x)
        return x @ weight.T

    def norm(self, x: Array, name: str) -> Array:
        """Root-mean-square norm over the last axis (Gemma's files store 1 + w already)."""
        mean = np.mean(np.square(x), axis=-1, keepdims=True, dtype=np.float32)
        return x / np.sqrt(mean + np.float32(self.config.eps)) * self.weight(f"{name}.weight")

    # The layers, in the order in which they run

    def embed(self, tokens: NDArray[np.int64]) -> Array:
        """Rows of the embedding table; Gemma scales them by sqrt(dim)."""
        tensor = self.tensors["token_embd.weight"]
        x = np.asarray(dequantize(tensor.data[tokens], tensor.tensor_type), dtype=np.float32)
        return x * np.float32(math.sqrt(self.config.dim)) if self.config.arch == "gemma3" else x

    def forward(
        self, batch: Sequence[tuple[Cache, Sequence[int]]], *, last_only: bool = False
    ) -> list[Array]:
        """Run new tokens of several sequences: per sequence float32[n (or 1), vocab]."""
        tokens = np.concatenate([np.asarray(ids, dtype=np.int64) for _, ids in batch])
        ends = np.cumsum([len(ids) for _, ids in batch])
        spans = [slice(end - len(ids), end) for end, (_, ids) in zip(ends, batch, strict=True)]
        caches = [cache for cache, _ in batch]
        positions = [
            np.arange(cache.length, cache.length + s.stop - s.start) for cache, s in zip(caches, spans)
        ]
        x = self.embed(tokens)
        for layer in range(self.config.n_layers):
            x = self.attention_block(x, layer, caches, spans, positions)
            x = self.feed_forward_block(x, layer)
        for cache, span in zip(caches, spans):
            cache.length += span.stop - span.start
        if last_only:
            x = x[ends - 1]
            spans = [slice(i, i + 1) for i in range(len(batch))]
        logits = self.head(x)
        return [logits[span] for span in spans]

    def attention_block(
        self,
        x: Array,
        layer: int,
        caches: list[Cache],
        spans: list[slice],
        positions: list[NDArray[np.int64]],
    ) -> Array:
        """x + attention(norm(x)), with Gemma's second norm before the sum."""
        c, name = self.config, f"blk.{layer}"
        h = self.norm(x, f"{name}.attn_norm")
        q = self.linear(h, f"{name}.attn_q").reshape(-1, c.n_heads, c.head_dim)
        k = self.linear(h, f"{name}.attn_k").reshape(-1, c.n_kv_heads, c.head_dim)
        v = self.linear(h, f"{name}.attn_v").reshape(-1, c.n_kv_heads, c.value_dim)
        if f"{name}.attn_q_norm.weight" in self.tensors:
            q, k = self.norm(q, f"{name}.attn_q_norm"), self.norm(k, f"{name}.attn_k_norm")
        mixed = np.empty((len(x), c.n_heads * c.value_dim), dtype=np.float32)
        for cache, span, pos in zip(caches, spans, positions):
            rotation = self.rotation(pos, local=c.is_local(layer))
            keys, values = cache.extend(
                layer, self.rotate(k[span], *rotation).swapaxes(0, 1), v[span].swapaxes(0, 1)
            )
            queries = self.rotate(q[span], *rotation).swapaxes(0, 1)
            mixed[span] = self.attend(queries, keys, values, pos, local=c.is_local(layer))
        out = self.linear(mixed, f"{name}.attn_output")
        if f"{name}.post_attention_norm.weight" in self.tensors:
            out = self.norm(out, f"{name}.post_attention_norm")
        return x + out

    def attend(
        self, q: Array, keys: Array, values: Array, positions: NDArray[np.int64], *, local: bool
    ) -> Array:
        """Causal attention: q [n_heads, n, d] and keys [n_kv_heads, m, d] to [n, n_heads * d]."""
        c = self.config
        behind = positions[:, None] - np.arange(keys.shape[1])[None, :]
        visible = behind >= 0
        if local:
            visible &= behind < c.window
        grouped = q.reshape(c.n_kv_heads, -1, c.head_dim)  # the heads of a group one after another
        scores = (grouped @ keys.swapaxes(1, 2)) * np.float32(c.attention_scale)
        scores = scores.reshape(c.n_heads, len(positions), -1)
        if c.attention_cap:
            scores = np.tanh(scores / np.float32(c.attention_cap)) * np.float32(c.attention_cap)
        weights = softmax(np.where(visible, scores, np.float32(-np.inf)))
        mixed = weights.reshape(c.n_kv_heads, -1, keys.shape[1]) @ values
        return (
            mixed.reshape(c.n_heads, len(positions), c.value_dim).swapaxes(0, 1).reshape(len(positions), -1)
        )

    def rotation(self, positions: NDArray[np.int64], *, local: bool) -> tuple[Array, Array]:
        """Cosines and sines of the rotary embedding: float32[n, 1, n_rot / 2] each."""
        c = self.config
        base = c.rope_base_local if local else c.rope_base
        frequencies = base ** (-np.arange(0, c.n_rot, 2, dtype=np.float64) / c.n_rot)
        magnitude = 1.0
        if self._factors is not None:
            frequencies = frequencies / self._factors
        if c.scaling == "linear" and not local:
            frequencies = frequencies / c.scaling_factor
        elif c.scaling == "yarn" and not local:
            frequencies = yarn(frequencies, c)
            magnitude = 1.0 + 0.1 * math.log(c.scaling_factor)
        angles = positions[:, None, None] * frequencies
        return (
            (np.cos(angles) * magnitude).astype(np.float32),
            (np.sin(angles) * magnitude).astype(np.float32),
        )

    def rotate(self, x: Array, cos: Array, sin: Array) -> Array:
        """Turn the first n_rot entries of each head; x: [n, heads, head_dim]."""
        n_rot = self.config.n_rot
        out = x.copy()
        if self.config.interleaved_rope:
            first, second = slice(0, n_rot, 2), slice(1, n_rot, 2)
        else:
            first, second = slice(0, n_rot // 2), slice(n_rot // 2, n_rot)
        a, b = x[..., first], x[..., second]
        out[..., first] = a * cos - b * sin
        out[..., second] = b * cos + a * sin
        return out

    def feed_forward_block(self, x: Array, layer: int) -> Array:
        """x + feed_forward(norm(x)), dense or by experts, with Gemma's second norm before the sum."""
        name = f"blk.{layer}"
        h = self.norm(x, f"{name}.ffn_norm")
        if f"{name}.ffn_gate_inp.weight" in self.tensors:
            out = self.experts(h, name)
        else:
            gate, up = self.linear(h, f"{name}.ffn_gate"), self.linear(h, f"{name}.ffn_up")
            out = self.linear(self.activation(gate) * up, f"{name}.ffn_down")
        if f"{name}.post_ffw_norm.weight" in self.tensors:
            out = self.norm(out, f"{name}.post_ffw_norm")
        return x + out

    def activation(self, x: Array) -> Array:
        """SiLU, or Gemma's tanh approximation of GELU."""
        if self.config.arch == "gemma3":
            inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x * x * x)
            return np.float32(0.5) * x * (1 + np.tanh(inner))
        return x * np.float32(0.5) * (1 + np.tanh(x * np.float32(0.5)))  # x * sigmoid(x) without overflow

    def experts(self, x: Array, name: str) -> Array:
        """The chosen experts' outputs, weighted by their softmax over all experts, rescaled to sum to one."""
        c = self.config
        probabilities = softmax(self.linear(x, f"{name}.ffn_gate_inp"))
        chosen = np.argsort(-probabilities, axis=1, kind="stable")[:, : c.n_experts_used]
        shares = np.take_along_axis(probabilities, chosen, axis=1)
        shares = shares / shares.sum(axis=1, keepdims=True)
        gates, ups, downs = (self.weight(f"{name}.ffn_{part}_exps.weight") for part in ("gate", "up", "down"))
        out = np.zeros_like(x)
        for expert in np.unique(chosen):
            rows, slot = np.nonzero(chosen == expert)
            gate = self._product(x[rows], gates[expert], f"{name}.ffn_gate_exps.weight")
            up = self._product(x[rows], ups[expert], f"{name}.ffn_up_exps.weight")
            down = self._product(self.activation(gate) * up, downs[expert], f"{name}.ffn_down_exps.weight")
            out[rows] += down * shares[rows, slot][:, None]
        return out

    def head(self, x: Array) -> Array:
        """Final norm and output product, capped where the file says so."""
        h = self.norm(x, "output_norm")
        logits = self._product(h, self.weight(self._head), self._head)
        cap = np.float32(self.config.final_cap)
        return np.tanh(logits / cap) * cap if cap else logits

    # Whole runs

    def logits(self, tokens: Sequence[int]) -> Array:
        """Logits of every position of one sequence: float32[n, vocab]."""
        return self.forward([(Cache(), tokens)])[0]

    def greedy(self, prompts: Sequence[Sequence[int]], n: int) -> list[Continuation]:
        """The n most likely next tokens of each prompt, one after another (never stopping early)."""
        caches = [Cache() for _ in prompts]
        results = [Continuation([], [], []) for _ in prompts]
        last = [self.forward([(cache, prompt)], last_only=True)[0] for cache, prompt in zip(caches, prompts)]
        for step in range(n):
            for result, logits in zip(results, last):
                first, second = top_two(logits[0])
                result.tokens.append(first)
                result.seconds.append(second)
                result.gaps.append(float(logits[0, first] - logits[0, second]))
            if step + 1 < n:
                batch = [(cache, result.tokens[-1:]) for cache, result in zip(caches, results)]
                last = self.forward(batch, last_only=True)
        return results

    def perplexity(self, windows: Iterable[Sequence[int]]) -> float:
        """exp of the mean loss over all but the first token of each window, each read from an empty cache."""
        loss, count = 0.0, 0
        for window in windows:
            loss += float(losses(self.logits(window), window).sum())
            count += len(window) - 1
        return math.exp(loss / count)


def greedy(path: str | Path, prompt: Sequence[int], n: int) -> list[int]:
    """The n most likely next tokens after a prompt."""
    return Oracle(path).greedy([prompt], n)[0].tokens


def perplexity(path: str | Path, windows: Iterable[Sequence[int]]) -> float:
    """Perplexity of windows of token ids (see ``Oracle.perplexity``)."""
    return Oracle(path).perplexity(windows)


def losses(logits: NDArray[np.floating[Any]], tokens: Sequence[int]) -> NDArray[np.float64]:
    """-log p of tokens[1:], from the logits of the positions before them."""
    rows = np.asarray(logits[: len(tokens) - 1], dtype=np.float64)
    peak = rows.max(axis=1)
    log_sum = peak + np.log(np.exp(rows - peak[:, None]).sum(axis=1))
    return log_sum - rows[np.arange(len(rows)), np.asarray(tokens[1:])]


def softmax(x: Array) -> Array:
    """Softmax over the last axis."""
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def top_two(row: Array) -> tuple[int, int]:
    """Ids of the two largest entries, the lower id first among equals."""
    first = int(row.argmax())
    rest = row.copy()
    rest[first] = -np.inf
    return first, int(rest.argmax())


def round_to_int8(x: Array) -> Array:
    """Each run of 32 values rounded to a signed 8-bit multiple of its own scale."""
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    scale = np.abs(blocks).max(axis=-1, keepdims=True) / np.float32(127)
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)
    return (np.rint(blocks * inverse) * scale).reshape(x.shape)


def yarn(frequencies: NDArray[np.float64], c: Config) -> NDArray[np.float64]:
    """Frequencies by YaRN (arXiv 2309.00071): fast ones kept, slow ones interpolated, a ramp between."""

    def dimension(turns: float) -> float:
        return c.n_rot * math.log(c.scaling_n_ctx / (turns * 2 * math.pi)) / (2 * math.log(c.rope_base))

    low = max(0.0, math.floor(dimension(32.0)))
    high = min(c.n_rot - 1.0, math.ceil(dimension(1.0)))
    ramp = np.clip((np.arange(c.n_rot // 2) - low) / max(0.001, high - low), 0, 1)
    return frequencies / c.scaling_factor * ramp + frequencies * (1 - ramp)


def _scalars(reader: GGUFReader) -> dict[str, Any]:
    """Metadata without the arrays, which are long and not needed here."""
    return {
        name: item.contents()
        for name, item in reader.fields.items()
        if item.types and item.types[0] != GGUFValueType.ARRAY
    }
