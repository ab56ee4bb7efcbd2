"""Models on the Hugging Face hub: ``hf:owner/repo[/file.gguf]`` or ``hf:owner/repo:Q4_K_M``.

Through huggingface_hub, so HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE mean what they mean elsewhere.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NoReturn

from chabok.checkpoints import paths
from chabok.checkpoints.gguf import GGUF, shard_paths
from chabok.checkpoints.installed import (
    InstalledModel,
    Receipt,
    delete,
    is_model_name,
    model_files,
    quantization,
    size_of,
)
from chabok.checkpoints.progress import Progress
from chabok.checkpoints.storage import explained, locked
from chabok.checkpoints.transfer import (
    check_room,
    check_sha256,
    put_in_place,
    sha256_of,
    staging_folder,
    watched,
)
from chabok.errors import CheckpointError, SourceError

# Four bits with the best quality for their size first, then what comes nearest to that.
PREFERRED = ("Q4_K_M", "Q4_K_S", "Q4_0", "Q4_1", "Q5_K_M", "Q5_K_S", "Q6_K", "Q8_0", "BF16", "F16")

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_SPEC = re.compile(rf"hf:(?P<repo>{_PART}/{_PART})(?::(?P<tag>[A-Za-z0-9_]+)|/(?P<file>.+))?")


@dataclass(frozen=True, slots=True)
class HubModel:
    """Which repository, and which file in it: by path, by quantization, or to be chosen."""

    repo: str
    file: str | None
    tag: str | None

    @classmethod
    def parse(cls, spec: str) -> HubModel:
        """Read an ``hf:`` name."""
        match = _SPEC.fullmatch(spec)
        if match is None or ".." in (match["file"] or "").split("/"):
            raise SourceError(
                f"'{spec}' should look like hf:owner/repo, hf:owner/repo/model.gguf or hf:owner/repo:Q4_K_M"
            )
        return cls(match["repo"], match["file"], match["tag"])

    def __str__(self) -> str:
        return f"hf:{self.repo}" + (f"/{self.file}" if self.file else f":{self.tag}" if self.tag else "")


@dataclass(frozen=True, slots=True)
class _Remote:
    """A file of a repository as the hub lists it."""

    name: str
    n_bytes: int | None
    sha256: str | None


def _root() -> Path:
    return paths.models_dir() / "hub"


def installed() -> Iterator[InstalledModel]:
    """Models fetched from the hub before."""
    root = _root()
    for path in model_files(root.rglob("*.gguf")):
        receipt = Receipt.read(path)
        name = f"hf:{path.relative_to(root).as_posix()}"
        yield InstalledModel(name, "hub", path, size_of(path), receipt.licence if receipt else None)


def find(model: HubModel) -> Path | None:
    """The model if it is here already."""
    folder = _root() / model.repo
    if model.file is not None:
        path = folder / model.file
        shards = shard_paths(path)
        return shards[0] if all(shard.is_file() for shard in shards) else None
    names = {path.relative_to(folder).as_posix(): path for path in model_files(folder.rglob("*.gguf"))}
    try:
        return names[_choose(model, list(names))]
    except SourceError:
        return None


def remove(model: InstalledModel) -> None:
    """Delete a model fetched from the hub."""
    delete(model.path, _root())


def fetch(model: HubModel, progress: Progress) -> Path:
    """The model: downloaded, or resumed, checked and put in place unless that was done before."""
    found = find(model)
    if found is not None:
        return found
    if _is_offline():
        raise SourceError(f"{model} is not on this machine, and HF_HUB_OFFLINE forbids fetching it")
    with explained("Fetching a model", paths.models_dir()):
        waiting = f"Another process is fetching from {model.repo}; waiting for it."
        lock = paths.models_dir() / ".locks" / f"hub-{model.repo.replace('/', '--')}.lock"
        with locked(lock, lambda: progress.say(waiting)):
            return find(model) or _fetch(model, progress)


def _fetch(model: HubModel, progress: Progress) -> Path:
    commit, licence, remote = _listing(model)
    chosen = _choose(model, [name for name in remote if is_model_name(PurePosixPath(name).name)])
    shards = [str(PurePosixPath(shard)) for shard in shard_paths(Path(chosen))]
    for shard in shards:
        if shard not in remote:
            raise SourceError(f"hf:{model.repo} has no {shard}, which {chosen} needs")
    staging = staging_folder("hub", model.repo.replace("/", "--"))
    sizes = [remote[shard].n_bytes for shard in shards]
    total = None if None in sizes else sum(size or 0 for size in sizes)
    if total is not None:
        already = sum(path.stat().st_size for path in staging.rglob("*") if path.is_file())
        check_room(staging, total - min(already, total), f"hf:{model.repo}/{chosen}")
    with watched(staging, f"Downloading {PurePosixPath(chosen).name}", total, progress):
        partial = [_download(model, commit, remote[shard], staging) for shard in shards]
    try:
        hashes: dict[str, str] = {}
        staged: list[Path] = []
        for path, shard in zip(partial, shards):
            name = PurePosixPath(shard).name
            hashes[name] = sha256_of(path, name, progress)
            expected = remote[shard].sha256
            if expected is not None:
                check_sha256(hashes[name], expected, f"hf:{model.repo}/{shard}")
            staged.append(path.rename(staging / name))
        GGUF.open(staged[0])  # no model that cannot be read is ever put in place
    except (SourceError, CheckpointError):
        shutil.rmtree(staging, ignore_errors=True)  # what was downloaded is no good
        raise
    folder = (_root() / model.repo / chosen).parent
    done = put_in_place(staged, folder, Receipt(f"hf:{model.repo}/{chosen}", licence, hashes))
    shutil.rmtree(staging, ignore_errors=True)
    return done


def _listing(model: HubModel) -> tuple[str, str | None, dict[str, _Remote]]:
    """The commit of a repository, its licence, and its files."""
    from huggingface_hub import HfApi

    try:
        info = HfApi(endpoint=_endpoint()).model_info(model.repo, files_metadata=True, timeout=30)
    except Exception as error:
        _explain(model, error)
    files = {
        file.rfilename: _Remote(file.rfilename, file.size, file.lfs.sha256 if file.lfs else None)
        for file in info.siblings or []
        if not {"", ".", ".."} & set(file.rfilename.split("/"))  # no path leads out of our folder
    }
    licence = info.card_data.get("license") if info.card_data else None
    return info.sha or "main", licence if isinstance(licence, str) else None, files


def _download(model: HubModel, commit: str, remote: _Remote, staging: Path) -> Path:
    """Fetch one file, continuing what a killed run left of the same content; returns where it is.

    ``hf_hub_download`` starts over after a kill, hence its inner ``http_get``, which retries and resumes.
    """
    from huggingface_hub import hf_hub_url, utils
    from huggingface_hub.file_download import http_get

    name = PurePosixPath(remote.name).name
    partial = staging / f"{name}.{(remote.sha256 or commit)[:16]}.part"
    url = hf_hub_url(model.repo, remote.name, revision=commit, endpoint=_endpoint())
    headers = utils.build_hf_headers()  # type: ignore[attr-defined]
    quiet = utils.are_progress_bars_disabled()  # type: ignore[attr-defined]
    utils.disable_progress_bars()  # type: ignore[attr-defined]
    try:
        partial.touch()
        with partial.open("r+b") as file:
            already = file.seek(0, os.SEEK_END)
            if remote.n_bytes is None or already > remote.n_bytes:
                already = file.truncate(file.seek(0))
            http_get(url, file, resume_size=already, headers=headers, expected_size=remote.n_bytes)
    except Exception as error:
        _explain(model, error)
    finally:
        if not quiet:
            utils.enable_progress_bars()  # type: ignore[attr-defined]
    return partial


def _choose(model: HubModel, names: list[str]) -> str:
    """The file to take of the models ``names``; SourceError, listing them, if that is not clear."""
    firsts = sorted(name for name in names if str(PurePosixPath(shard_paths(Path(name))[0])) == name)
    if model.file is not None:
        if model.file in names:
            return str(PurePosixPath(shard_paths(Path(model.file))[0]))
        raise SourceError(f"hf:{model.repo} has no {model.file}; {_choices(firsts)}")
    if not firsts:
        raise SourceError(f"hf:{model.repo} holds no .gguf file; try the -GGUF repository of the same model")
    wanted = [model.tag.upper()] if model.tag else list(PREFERRED)
    if not model.tag and len(firsts) == 1:
        return firsts[0]
    for kind in wanted:
        matching = [name for name in firsts if quantization(PurePosixPath(name).name) == kind]
        if len(matching) == 1:
            return matching[0]
        if matching:
            raise SourceError(f"hf:{model.repo} has several {kind} files; name one: {_choices(matching)}")
    raise SourceError(
        f"hf:{model.repo} has no {model.tag or 'usual 4-bit'} file; name one: {_choices(firsts)}"
    )


def _choices(names: list[str]) -> str:
    listed = ", ".join(names[:30]) + (f" and {len(names) - 30} more" if len(names) > 30 else "")
    return f"it holds {listed}" if names else "it holds no .gguf file"


def _endpoint() -> str | None:
    # huggingface_hub reads it once, on import; a server may set it later.
    return os.environ.get("HF_ENDPOINT") or None


def _is_offline() -> bool:
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE") for name in names)


def _explain(model: HubModel, error: Exception) -> NoReturn:
    """Turn what huggingface_hub raises into something to act on; room and rights are explained elsewhere."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        raise SourceError(
            f"hf:{model.repo} is gated: accept its licence on the hub, then set HF_TOKEN to a token of yours"
        ) from error
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.RepositoryNotFoundError):
        token = "your HF_TOKEN may not see it" if os.environ.get("HF_TOKEN") else "it may need HF_TOKEN"
        raise SourceError(f"hf:{model.repo} was not found on the hub: check the name, or {token}") from error
    if isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError):
        raise SourceError(f"{model} was not found: there is no such file in the repository") from error
    if status in (401, 403):
        raise SourceError(f"the hub refuses access to hf:{model.repo} ({status}): check HF_TOKEN") from error
    if status == 429:
        raise SourceError("the hub asks to slow down (429): try again later, or set HF_TOKEN") from error
    if status is not None:
        raise SourceError(f"the hub answered {status} for hf:{model.repo}: try again later") from error
    if isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError):
        raise error
    where = _endpoint() or "the Hugging Face hub"
    raise SourceError(
        f"{model} cannot be fetched: {where} cannot be reached, or broke off ({type(error).__name__}); "
        "check the network (HF_ENDPOINT names a mirror) and try again, what was downloaded is kept"
    ) from error
