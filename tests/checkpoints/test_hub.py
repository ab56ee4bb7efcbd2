from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.checkpoints.disks import disk
from tests.checkpoints.hub_server import Hub, serving
from tests.checkpoints.killing import forked, wait
from tests.checkpoints.test_packed import Watch
from tests.checkpoints.writing import RawTensor, gguf_bytes, small_model, write_shards

from chabok.checkpoints import hub, sources
from chabok.checkpoints.gguf import GGUF
from chabok.checkpoints.installed import Receipt
from chabok.errors import CheckpointError, ResourceError, SourceError

REPO = "someone/Some-Model-GGUF"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with serving() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.endpoint)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 100_000)
        monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
        running.repos[REPO] = {"README.md": b"#", "Some-Model-Q4_K_M.gguf": small_model()}
        yield running


def big_model(n_bytes: int = 3_000_000) -> bytes:
    return gguf_bytes(
        {"general.architecture": "llama"}, [RawTensor("w", 24, (n_bytes,), os.urandom(n_bytes))]
    )


def nothing_staged(cache: Path) -> bool:
    return not [path for path in (cache / "models" / ".staging").rglob("*") if path.is_file()]


def test_fetches_the_only_model_checks_it_and_needs_no_network_again(server: Hub, cache: Path) -> None:
    watch = Watch()
    path = sources.resolve(f"hf:{REPO}", watch)
    assert path == cache / "models" / "hub" / REPO / "Some-Model-Q4_K_M.gguf"
    assert path.read_bytes() == small_model()
    assert watch.stages[0] == ("Downloading Some-Model-Q4_K_M.gguf", len(small_model()))
    receipt = Receipt.read(path)
    assert receipt is not None
    assert receipt.licence == "apache-2.0"
    assert receipt.sha256 == {path.name: hashlib.sha256(small_model()).hexdigest()}
    assert nothing_staged(cache)
    asked = len(server.requests)
    assert sources.resolve(f"hf:{REPO}") == sources.resolve(f"hf:{REPO}/{path.name}") == path
    assert sources.find(f"hf:{REPO}:Q4_K_M") == path
    assert len(server.requests) == asked
    (model,) = sources.installed()
    assert (model.name, model.source, model.n_bytes) == (f"hf:{REPO}/{path.name}", "hub", len(small_model()))
    assert model.is_ours
    sources.remove(model)
    assert not list((cache / "models" / "hub").iterdir())


@pytest.mark.parametrize(
    ("names", "asked", "expected"),
    [
        (["m-Q8_0.gguf", "m-Q4_K_M.gguf", "m-f16.gguf"], "", "m-Q4_K_M.gguf"),
        (["m-q8_0.gguf", "m-q4_0.gguf"], "", "m-q4_0.gguf"),
        (["m-Q8_0.gguf", "m-Q4_K_M.gguf"], ":q8_0", "m-Q8_0.gguf"),
        (["m-Q8_0.gguf", "mmproj-m-f16.gguf"], "", "m-Q8_0.gguf"),
        (["sub/m-Q5_K_M.gguf", "m-Q8_0.gguf"], "/sub/m-Q5_K_M.gguf", "sub/m-Q5_K_M.gguf"),
        (["weights.gguf"], "", "weights.gguf"),
    ],
)
def test_chooses_four_bits_where_nothing_is_named(
    server: Hub, cache: Path, names: list[str], asked: str, expected: str
) -> None:
    server.repos[REPO] = dict.fromkeys(names, small_model())
    assert sources.resolve(f"hf:{REPO}{asked}") == cache / "models" / "hub" / REPO / expected


@pytest.mark.parametrize(
    ("names", "asked", "words"),
    [
        (["a-Q4_K_M.gguf", "b-Q4_K_M.gguf"], "", "several Q4_K_M files.*a-Q4_K_M.gguf, b-Q4_K_M.gguf"),
        (["a-IQ1_S.gguf", "a-IQ2_M.gguf"], "", "no usual.*a-IQ1_S.gguf, a-IQ2_M.gguf"),
        (["a-Q4_K_M.gguf"], ":Q8_0", "no Q8_0 file.*a-Q4_K_M.gguf"),
        (["a-Q4_K_M.gguf"], "/b.gguf", "has no b.gguf; it holds a-Q4_K_M.gguf"),
        (["README.md", "model.safetensors"], "", "holds no .gguf file"),
        (["m-Q4_K_M-00001-of-00002.gguf"], "", "has no m-Q4_K_M-00002-of-00002.gguf"),
    ],
)
def test_lists_the_choices_where_none_is_clear(server: Hub, names: list[str], asked: str, words: str) -> None:
    server.repos[REPO] = dict.fromkeys(names, small_model())
    with pytest.raises(SourceError, match=words):
        sources.resolve(f"hf:{REPO}{asked}")


def test_fetches_all_shards(server: Hub, cache: Path, tmp_path: Path) -> None:
    server.repos[REPO] = {f"Q4_K_M/{p.name}": p.read_bytes() for p in write_shards(tmp_path, 3, "m-Q4_K_M")}
    path = sources.resolve(f"hf:{REPO}")
    assert path.name == "m-Q4_K_M-00001-of-00003.gguf"
    assert list(GGUF.open(path).tensors) == ["t0", "t1", "t2"]
    assert sources.find(f"hf:{REPO}/Q4_K_M/m-Q4_K_M-00002-of-00003.gguf") == path
    path.with_name("m-Q4_K_M-00003-of-00003.gguf").unlink()
    assert sources.find(f"hf:{REPO}") is None
    assert sources.resolve(f"hf:{REPO}") == path
    sources.remove(sources.installed()[0])
    assert not list((cache / "models" / "hub").iterdir())


def test_shards_that_were_finished_before_a_kill_are_not_fetched_again(
    server: Hub, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = {path.name: path.read_bytes() for path in write_shards(tmp_path, 3, "m-Q4_K_M")}
    server.repos[REPO] = shards
    download = hub._download

    def killed(model: hub.HubModel, commit: str, remote: hub._Remote, staging: Path) -> Path:
        if remote.name.startswith("m-Q4_K_M-00003"):
            raise KeyboardInterrupt
        return download(model, commit, remote, staging)

    with monkeypatch.context() as patch:
        patch.setattr(hub, "_download", killed)
        with pytest.raises(KeyboardInterrupt):
            sources.resolve(f"hf:{REPO}")
    assert sources.find(f"hf:{REPO}") is None
    server.requests.clear()
    sources.resolve(f"hf:{REPO}")
    assert [path.rpartition("/")[2] for path, _ in server.downloads()] == ["m-Q4_K_M-00003-of-00003.gguf"]


def test_a_killed_download_is_resumed_where_it_stopped(server: Hub, cache: Path) -> None:
    content = big_model()
    server.repos[REPO] = {"big-Q4_K_M.gguf": content}
    server.stall_after = 1_000_000
    child = forked(lambda: sources.resolve(f"hf:{REPO}"))
    partial: list[Path] = []
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and sum(path.stat().st_size for path in partial) < 1_000_000:
        partial = [path for path in (cache / "models" / ".staging").rglob("*.part") if path.exists()]
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    wait(child)
    assert sources.find(f"hf:{REPO}") is None
    server.stall_after = None
    server.requests.clear()
    assert sources.resolve(f"hf:{REPO}").read_bytes() == content
    ranges = [wanted for _, wanted in server.downloads() if wanted]
    assert ranges
    assert int(ranges[-1].removeprefix("bytes=").rstrip("-")) >= 1_000_000
    assert nothing_staged(cache)


@pytest.mark.parametrize("name", ["../../../escaped.gguf", "/escaped.gguf", "a/../../../../escaped.gguf"])
def test_paths_in_a_listing_cannot_leave_the_folder(server: Hub, tmp_path: Path, name: str) -> None:
    server.repos[REPO] = {name: small_model()}
    with pytest.raises(SourceError, match="holds no"):
        sources.resolve(f"hf:{REPO}")
    assert not list(tmp_path.rglob("escaped.gguf"))


@pytest.mark.parametrize("no_hash", [False, True])
def test_content_that_is_not_what_the_hub_says_is_thrown_away(
    server: Hub, cache: Path, no_hash: bool
) -> None:
    server.wrong_hash, server.no_hash = True, no_hash
    if no_hash:
        server.repos[REPO] = {"m.gguf": small_model()[:-50]}
        with pytest.raises(CheckpointError, match="incomplete"):
            sources.resolve(f"hf:{REPO}")
    else:
        with pytest.raises(SourceError, match="not what it should be"):
            sources.resolve(f"hf:{REPO}")
    assert sources.find(f"hf:{REPO}") is None
    assert nothing_staged(cache)


def test_what_the_hub_refuses_is_explained(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SourceError, match=r"hf:no/such was not found on the hub.*HF_TOKEN"):
        sources.resolve("hf:no/such")
    server.gated.add(REPO)
    with pytest.raises(SourceError, match="gated: accept its licence"):
        sources.resolve(f"hf:{REPO}")
    server.tokens.add("secret")
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert sources.resolve(f"hf:{REPO}").is_file()
    server.fail_status = 403
    with pytest.raises(SourceError, match="refuses access"):
        sources.resolve("hf:some/other")
    server.fail_status = 404
    with pytest.raises(SourceError, match=r"404|not found"):
        sources.resolve("hf:some/other")


def test_offline_and_unreachable_hubs_are_told_apart(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(SourceError, match=r"http://127.0.0.1:9 cannot be reached.*check the network"):
        sources.resolve(f"hf:{REPO}")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(SourceError, match="HF_HUB_OFFLINE forbids"):
        sources.resolve(f"hf:{REPO}")


def test_a_full_disk_is_told_before_downloading(
    server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.repos[REPO] = {"big.gguf": big_model()}
    with disk(tmp_path / "disk", 1000) as folder:
        monkeypatch.setenv("CHABOK_CACHE", str(folder))
        with pytest.raises(ResourceError, match=r"no room for hf:.*3\.0 MB.*CHABOK_CACHE"):
            sources.resolve(f"hf:{REPO}")
        monkeypatch.setattr(hub, "check_room", lambda *args: None)  # filled meanwhile by others
        with pytest.raises(ResourceError, match="no room left"):
            sources.resolve(f"hf:{REPO}")


@pytest.mark.parametrize("spec", ["hf:", "hf:x", "hf:a/b/../../c.gguf", "hf:../x", "hf:a/b:", "hf:-x/y"])
def test_malformed_names_are_refused(spec: str) -> None:
    with pytest.raises(SourceError, match="should look like"):
        sources.resolve(spec)
