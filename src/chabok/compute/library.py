"""Kernels become machine code, kept on disk by content.

An object's key is a hash of the sources that emit it, its parameters, the instruction set and the versions of
llvmlite and LLVM, so a cached object is found without emitting a line of IR. Each file carries a checksum;
one that does not match is compiled anew, never executed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from chabok.compute.emit import Module
from chabok.compute.isa import ISA

CACHE_BYTES = 64 << 20
"""Compiled kernels that are kept: some dozens of models' worth."""

DAY = 86_400.0
"""Seconds."""


class Spec(Protocol):
    """What identifies a kernel: a frozen dataclass whose repr names every parameter."""

    @property
    def symbol(self) -> str:
        """The function's name, unique among different specs."""

    def emit(self, module: Module, isa: ISA) -> None:
        """Write the kernel into a module."""


@functools.cache
def _sources_digest() -> bytes:
    """Hash of every source file of this package: what is emitted depends on nothing else."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.digest()


def object_key(spec: Spec, isa: ISA) -> str:
    """The name under which a kernel's object is kept."""
    import llvmlite
    import llvmlite.binding as llvm

    parts = (repr(spec), repr(isa), llvmlite.__version__, str(llvm.llvm_version_info))
    return hashlib.sha256(_sources_digest() + "\0".join(parts).encode()).hexdigest()


def ir_text(spec: Spec, isa: ISA) -> str:
    """The kernel as LLVM IR."""
    module = Module(isa.triple, isa.cpu, isa.features)
    spec.emit(module, isa)
    return module.text()


def compile_object(spec: Spec, isa: ISA) -> bytes:
    """Compile a kernel to a relocatable object for an instruction set, which need not be this machine's."""
    return _compile(spec, isa, assembly=False)


def assembly_text(spec: Spec, isa: ISA) -> str:
    """The kernel as assembly, for people."""
    return _compile(spec, isa, assembly=True).decode()


def _compile(spec: Spec, isa: ISA, *, assembly: bool) -> bytes:
    import llvmlite.binding as llvm

    _initialize(isa)
    context = llvm.create_context()
    module = llvm.parse_assembly(ir_text(spec, isa), context=context)
    module.verify()
    target = llvm.Target.from_triple(isa.triple)
    machine = target.create_target_machine(
        cpu=isa.cpu,
        features=isa.features,
        opt=3,
        reloc="pic",
        codemodel="small" if isa.dot == "neon" else "default",
    )
    # Kernels unroll themselves; LLVM's own unrolling and vectorizing only blur what was laid out on purpose.
    tuning = llvm.create_pipeline_tuning_options(speed_level=2)
    tuning.loop_unrolling = False
    tuning.loop_vectorization = False
    tuning.slp_vectorization = False
    builder = llvm.create_pass_builder(machine, tuning)
    builder.getModulePassManager().run(module, builder)
    return machine.emit_assembly(module).encode() if assembly else bytes(machine.emit_object(module))


_initialized: set[str] = set()
_initialize_lock = threading.Lock()


def _initialize(isa: ISA) -> None:
    import llvmlite.binding as llvm

    kind = "neon" if isa.dot == "neon" else "x86"
    with _initialize_lock:
        if kind in _initialized:
            return
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        try:
            llvm.Target.from_triple(isa.triple)
        except RuntimeError:
            llvm.initialize_all_targets()
            llvm.initialize_all_asmprinters()
        _initialized.add(kind)


class Progress(Protocol):
    """Is told how compiling gets on."""

    def begin(self, what: str, total: int | None, unit: str) -> None:
        """Work on ``total`` of ``unit`` starts."""

    def advance(self, n: int) -> None:
        """That many more are done."""

    def end(self) -> None:
        """The work is over."""


class Library:
    """Loaded kernels of one instruction set.

    cache: folder of compiled objects, None to keep nothing. progress: told while compiling.
    """

    def __init__(self, isa: ISA, cache: Path | None = None, progress: Progress | None = None) -> None:
        self.isa = isa
        self.progress = progress
        self.cache = cache
        self._jit: object = None
        self._trackers: list[object] = []
        self._addresses: dict[Spec, int] = {}
        self._lock = threading.Lock()

    def load(self, specs: Sequence[Spec]) -> dict[Spec, int]:
        """Addresses of the kernels, compiling those that are on no disk yet."""
        with self._lock:
            wanted = [s for s in dict.fromkeys(specs) if s not in self._addresses]
            objects: dict[Spec, bytes] = {}
            for spec in wanted:
                if (found := self._read(spec)) is not None:
                    objects[spec] = found
            missing = [s for s in wanted if s not in objects]
            if missing:
                objects |= self._compile(missing)
            for spec in wanted:
                self._addresses[spec] = self._link(spec, objects[spec])
            return {s: self._addresses[s] for s in specs}

    def _compile(self, specs: list[Spec]) -> dict[Spec, bytes]:
        """Compile on all cores (LLVM works outside the interpreter's lock) and keep the objects."""
        objects = {}
        if self.progress:
            self.progress.begin("Compiling kernels", len(specs), "kernels")
        try:
            with ThreadPoolExecutor() as workers:
                for spec, obj in zip(specs, workers.map(lambda s: compile_object(s, self.isa), specs)):
                    objects[spec] = obj
                    self._write(spec, obj)
                    if self.progress:
                        self.progress.advance(1)
        finally:
            if self.progress:
                self.progress.end()
        self._make_room()
        return objects

    def _make_room(self) -> None:
        """Remove what was used least recently, to the day, where the cache has grown past its bound."""
        if self.cache is None:
            return
        with contextlib.suppress(OSError):  # another process tidies, too, or the cache cannot be written
            found = sorted((p.stat().st_mtime, p.stat().st_size, p) for p in self.cache.iterdir())
            excess = sum(size for _, size, _ in found) - CACHE_BYTES
            for used, size, path in found:
                if excess <= 0 or time.time() - used < DAY / 24:
                    break
                path.unlink(missing_ok=True)
                excess -= size

    def _link(self, spec: Spec, obj: bytes) -> int:
        import llvmlite.binding as llvm

        if self._jit is None:
            _initialize(self.isa)
            self._jit = llvm.create_lljit_compiler(use_jit_link=False)
        builder = llvm.JITLibraryBuilder().add_object_img(obj).export_symbol(spec.symbol)
        tracker = builder.link(self._jit, f"{spec.symbol}-{len(self._trackers)}")
        self._trackers.append(tracker)
        return int(tracker[spec.symbol])

    def _path(self, spec: Spec) -> Path | None:
        return self.cache / f"{object_key(spec, self.isa)}.o" if self.cache else None

    def _read(self, spec: Spec) -> bytes | None:
        path = self._path(spec)
        if path is None:
            return None
        try:
            content = path.read_bytes()
        except OSError:
            return None
        checksum, obj = content[:32], content[32:]
        if hashlib.sha256(obj).digest() != checksum:
            return None
        with contextlib.suppress(OSError):  # a cache that cannot be written
            if time.time() - path.stat().st_mtime > DAY:
                os.utime(path)
        return obj

    def _write(self, spec: Spec, obj: bytes) -> None:
        path = self._path(spec)
        if path is None:
            return
        temporary = path.with_suffix(f".{os.getpid()}.{time.monotonic_ns()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(hashlib.sha256(obj).digest() + obj)
            temporary.replace(path)
        except OSError:
            # A cache that cannot be written costs the next start a few seconds, nothing else.
            with contextlib.suppress(OSError):
                temporary.unlink()
