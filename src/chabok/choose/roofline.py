"""What a machine can reach with a model: ceilings from its memory and its arithmetic, and what is attainable.

The roofline (Williams, Waterman, Patterson 2009): work takes as long as the slower of its bytes at the read
bandwidth and its operations at the peak. Generation reads all weights for each step, so bandwidth is its
ceiling; reading a prompt uses each weight for many tokens, so multiply-adds are.

What is attainable lies below, by shares that were measured on kernels (see ``Efficiency``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from chabok.choose.shapes import Shape
from chabok.errors import RequestError


@dataclass(frozen=True, slots=True)
class Machine:
    """bandwidth: bytes/s that all threads read from memory; peak: multiply-adds/s of bytes; memory: bytes."""

    bandwidth: float
    peak: float
    threads: int = 1
    instructions: str = ""
    memory: int = 0

    def with_(self, bandwidth: float = 1.0, compute: float = 1.0) -> Machine:
        """A machine with so many times the bandwidth and the arithmetic."""
        return replace(self, bandwidth=self.bandwidth * bandwidth, peak=self.peak * compute)


@dataclass(frozen=True, slots=True)
class Efficiency:
    """How far below the roofline the kernels stay.

    read: share of the bandwidth at which weights stream. unpack: bytes of weights unpacked and multiplied per
    multiply-add of the peak; where memory is faster than that, this is the limit of generation. layer_s,
    expert_layer_s: meetings of the threads and small work in a layer, routing included. step_s: the engine's
    own work per step. product, attention: shares of the peaks of bytes and of floats in prompts. element:
    other work on a number of the activations, in multiply-adds of the peak. floats: multiply-adds of bytes in
    the time of one of floats. sequence_s: the engine's own work for each further sequence of a step.
    """

    read: float = 0.9
    unpack: float = 0.05
    layer_s: float = 12e-6
    expert_layer_s: float = 80e-6
    step_s: float = 60e-6
    product: float = 0.7
    attention: float = 0.85
    element: float = 525.0
    floats: float = 4.0
    sequence_s: float = 200e-6


MEASURED = {"avx512": Efficiency(), "avx2": Efficiency(unpack=0.145, product=0.81, element=140.0, floats=2.0)}
"""By instruction set; fitted to ``benchmarks/peers.json`` and the peaks of that machine.
``benchmarks/roofline.py`` holds them against what is measured. Other instruction sets, which nobody measured,
are taken for the first."""
FEW = 5
"""Sequences up to which a step streams its weights past all rows at once."""

Limit = Literal["memory bandwidth", "unpacking weights", "multiply-adds", "attention", "overhead"]


@dataclass(frozen=True, slots=True)
class Phase:
    """Generation or reading prompts: tokens/s in all, the ceiling and what is attainable; bytes and
    multiply-adds per token; what limits it; reached: what was measured, None if nothing was."""

    name: str
    ceiling: float
    attainable: float
    limit: Limit
    n_bytes: float
    multiply_adds: float
    reached: float | None = None


@dataclass(frozen=True)
class Prediction:
    """A model on a machine. first_token_s: of a prompt of so many tokens that nobody has read before. label:
    the what-if it is of. memory: bytes of weights and of one context; fits: whether the machine has them."""

    model: str
    label: str
    context: int
    batch: int
    prompt: int
    generation: Phase
    prefill: Phase
    first_token_s: float
    memory: int
    fits: bool
    derived: bool
    source: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    def _repr_html_(self) -> str:
        from chabok.choose.sheet import table
        from chabok.measure.report.numbers import number

        rows = [
            [each.name, number(each.ceiling), number(each.attainable), number(each.reached), each.limit]
            for each in (self.generation, self.prefill)
        ]
        title = f"{self.model} {self.label}".strip()
        return table([title, "ceiling, tok/s", "attainable", "reached", "limited by"], rows)


def predict(
    shape: Shape,
    machine: Machine,
    *,
    context: int = 512,
    batch: int = 1,
    prompt: int = 512,
    label: str = "",
    efficiency: Efficiency | None = None,
) -> Prediction:
    """Predict the speed of a model. context: tokens before the one that is generated. batch: sequences at
    once. prompt: tokens of a prompt that is read."""
    for name, value in (("context", context), ("batch", batch), ("prompt", prompt)):
        if not 1 <= value <= 10_000_000:
            raise RequestError(f"{name} is {value}; it must be from 1 to 10000000", name)
    eff = efficiency or MEASURED.get(machine.instructions, MEASURED["avx512"])
    generation = _generation(shape, machine, eff, context, batch)
    prefill, first = _prefill(shape, machine, eff, prompt)
    weights = sum(m.n_bytes * m.copies for m in shape.matrices) + (shape.table.n_bytes if shape.table else 0)
    memory = int(weights + batch * shape.kv_bytes(context + prompt))
    return Prediction(
        shape.name, label, context, batch, prompt, generation, prefill, first, memory,
        not machine.memory or memory < machine.memory, shape.derived, shape.source,
    )  # fmt: skip


def _generation(shape: Shape, machine: Machine, eff: Efficiency, context: int, batch: int) -> Phase:
    weights = sum(m.touched(batch) for m in shape.matrices)
    cached = batch * shape.kv_bytes(context)
    products = float(sum(m.rows * m.k * m.used for m in shape.matrices) * batch)
    if batch > FEW:  # then rows are computed as those of prompts are
        head = sum(m.rows * m.k for m in shape.matrices if m.role == "output")
        products = (shape.multiply_adds + 2 * head) * batch
    attention = batch * shape.seen(context) * shape.heads * shape.head_dim * 2
    ideal = max((weights + cached) / machine.bandwidth, (products + attention * eff.floats) / machine.peak)
    parts: dict[Limit, float] = {
        "memory bandwidth": (weights + cached) / (machine.bandwidth * eff.read),
        "unpacking weights": (weights + cached) / (machine.peak * eff.unpack),
        "multiply-adds": (products / eff.product + attention * eff.floats / eff.attention) / machine.peak,
    }
    limit = max(parts, key=lambda each: parts[each])
    layer = eff.expert_layer_s if shape.experts else eff.layer_s
    # Few rows are multiplied while the weights stream by; many take time of their own.
    step = max(parts.values()) + shape.layers * layer + eff.step_s
    step += (batch - 1) * (shape.elements * eff.element / machine.peak + eff.sequence_s)
    if step > 2 * max(parts.values()):
        limit = "overhead"
    each = (weights + cached) / batch
    return Phase("generation", batch / ideal, batch / step, limit, each, (products + attention) / batch)


def _prefill(shape: Shape, machine: Machine, eff: Efficiency, prompt: int) -> tuple[Phase, float]:
    weights = sum(m.touched(prompt) for m in shape.matrices)
    head = next((m.rows * m.k for m in shape.matrices if m.role == "output"), 0)
    products = shape.multiply_adds * prompt + 2 * head
    attention = shape.attention_multiply_adds(prompt)
    ideal = max(weights / machine.bandwidth, (products + attention * eff.floats) / machine.peak)
    parts: dict[Limit, float] = {
        "multiply-adds": products / eff.product / machine.peak,
        "attention": attention * eff.floats / eff.attention / machine.peak,
        "overhead": prompt * shape.elements * eff.element / machine.peak,
    }
    read = max(weights / (machine.bandwidth * eff.read), weights / (machine.peak * eff.unpack))
    layer = eff.expert_layer_s if shape.experts else eff.layer_s
    total = max(sum(parts.values()), read) + shape.layers * layer + eff.step_s
    limit: Limit = max(parts, key=lambda each: parts[each])
    if read > sum(parts.values()):
        limit = "memory bandwidth"
    phase = Phase(
        "prompt", prompt / ideal, prompt / total, limit, weights / prompt, (products + attention) / prompt
    )
    return phase, total


@dataclass(frozen=True, slots=True)
class WhatIf:
    """Something else that might be: of the machine, or of the model."""

    label: str
    bandwidth: float = 1.0
    compute: float = 1.0
    quantization: str = ""
    dense: bool = False
    batch: int | None = None
    context: int | None = None

    @classmethod
    def of(cls, text: str) -> WhatIf:
        """From ``bandwidth=2x``, ``compute=1.5x``, ``batch=8``, ``context=8192``, ``dense``, or a
        quantization such as ``q8_0``; several joined by commas hold together.

        RequestError: it is none of these.
        """
        found = cls(text)
        for part in text.split(","):
            name, equals, value = part.strip().lower().partition("=")
            if not equals:
                if name == "dense":
                    found = replace(found, dense=True)
                else:
                    from chabok.choose.shapes import types

                    types(name)
                    found = replace(found, quantization=name)
                continue
            try:
                amount = float(value.removesuffix("x"))
            except ValueError:
                amount = math.nan
            if not 0 < amount < 1e7:
                raise RequestError(
                    f"--what-if {part.strip()}: {value!r} is no number above 0, as in {name}=2x"
                )
            if name in ("bandwidth", "compute"):
                found = replace(found, **{name: amount})  # type: ignore[arg-type]
            elif name in ("batch", "context"):
                found = replace(found, **{name: int(amount)})  # type: ignore[arg-type]
            else:
                raise RequestError(
                    f"--what-if {part.strip()}: it takes bandwidth=2x, compute=2x, batch=8, context=8192, "
                    "dense, or a quantization such as q8_0"
                )
        return found


def what_if(
    shape: Shape,
    machine: Machine,
    one: WhatIf,
    *,
    context: int = 512,
    batch: int = 1,
    prompt: int = 512,
    efficiency: Efficiency | None = None,
) -> Prediction:
    """The prediction if something were otherwise."""
    if one.quantization:
        shape = shape.quantized(one.quantization)
    if one.dense:
        shape = shape.dense()
    return predict(
        shape,
        machine.with_(one.bandwidth, one.compute),
        context=one.context or context,
        batch=one.batch or batch,
        prompt=prompt,
        label=one.label,
        efficiency=efficiency,
    )


def survey(machine: Machine, *, context: int = 512, prompt: int = 512) -> list[Prediction]:
    """All models of the catalogue whose shapes are known, the fastest first."""
    from chabok.choose.shapes import of_catalogue, published

    shapes = [shape for name in published() if (shape := of_catalogue(name)) is not None]
    found = [predict(shape, machine, context=context, prompt=prompt) for shape in shapes]
    return sorted(found, key=lambda each: -each.generation.attainable)


def above(found: Sequence[Prediction], tokens_per_s: float, first_token_s: float) -> list[Prediction]:
    """Those that fit, stay above a speed, and begin within a time."""
    return [
        each
        for each in found
        if each.fits and each.generation.attainable >= tokens_per_s and each.first_token_s <= first_token_s
    ]
