"""Which instructions are used, and what is said when that cannot be."""

from __future__ import annotations

import pytest

from chabok.compute import isa
from chabok.compute.isa import UnsupportedCPUError, choose


def test_the_best_set_is_chosen_when_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CHABOK_ISA", raising=False)
    assert choose() == isa.available()[0]


@pytest.mark.parametrize("one", isa.available(), ids=lambda one: one.name)
def test_a_lower_set_may_be_asked_for(one: isa.ISA, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHABOK_ISA", one.name.upper())
    assert choose() == one
    monkeypatch.setenv("CHABOK_ISA", "nonsense")
    assert choose(one.name) == one


@pytest.mark.parametrize("name", ["nonsense", "sse2", "avx1024"])
def test_an_unknown_set_is_an_error_that_names_what_is_possible(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHABOK_ISA", name)
    with pytest.raises(UnsupportedCPUError, match=f"{name}.*{isa.available()[0].name}"):
        choose()


def test_a_processor_without_any_is_an_error_that_names_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isa, "available", lambda: ())
    with pytest.raises(UnsupportedCPUError, match="none of the instruction sets"):
        choose()


@pytest.mark.parametrize(
    ("machine", "features", "names"),
    [
        ("x86_64", {"sse4.2", "avx"}, []),
        ("AMD64", {f[1:] for f in isa.AVX2.features.split(",")}, ["avx2"]),
        ("x86_64", {f[1:] for f in isa.AVXVNNI.features.split(",")}, ["avxvnni", "avx2"]),
        ("x86_64", {f[1:] for f in isa.AVX512.features.split(",")} - {"evex512"}, ["avx512", "avx2"]),
        ("aarch64", {"neon", "dotprod"}, ["neon"]),
        ("aarch64", {"neon"}, []),
        ("riscv64", {"v"}, []),
    ],
)
def test_a_set_is_available_when_every_feature_is(
    machine: str, features: set[str], names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isa.platform, "machine", lambda: machine)
    monkeypatch.setattr(isa.platform, "system", lambda: "Linux")
    monkeypatch.setattr(isa, "host_features", lambda: frozenset(features))
    assert [one.name for one in isa.available.__wrapped__()] == names
