from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.checkpoints.writing import small_model, write_shards

from chabok.checkpoints import catalog, lmstudio, ollama, sources
from chabok.checkpoints.hub import HubModel
from chabok.checkpoints.installed import quantization
from chabok.checkpoints.wheel import Wheel
from chabok.errors import SourceError

DIGEST = "a" * 64


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def add_ollama(home: Path, name: str, digest: str = DIGEST, content: bytes | None = None) -> Path:
    """``name`` is registry/namespace/model/tag."""
    root = home / ".ollama" / "models"
    manifest = root / "manifests" / name
    manifest.parent.mkdir(parents=True, exist_ok=True)
    layers = [
        {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{digest}", "size": 1},
        {"mediaType": "application/vnd.ollama.image.template", "digest": f"sha256:{'b' * 64}", "size": 1},
    ]
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))
    blob = root / "blobs" / f"sha256-{digest}"
    blob.parent.mkdir(exist_ok=True)
    blob.write_bytes(small_model() if content is None else content)
    return blob


def add_lmstudio(home: Path, name: str, folder: str = ".lmstudio/models") -> Path:
    path = home / folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(small_model())
    return path


def test_every_entry_of_the_catalogue_has_a_source_that_parses() -> None:
    names = [name for entry in catalog.entries() for name in (entry.name, *entry.aliases)]
    assert len(names) == len(set(names))
    for entry in catalog.entries():
        if entry.source.startswith("hf:"):
            model = HubModel.parse(entry.source)
            assert model.file is not None
            assert model.file.endswith(".gguf")
        else:
            assert str(Wheel.parse(entry.source)) == entry.source
            assert entry.sha256 is not None
        assert entry.bytes > 10**7
        assert entry.licence
        assert catalog.find(entry.name.upper()) is entry
        assert catalog.by_source(entry.source) is entry
    default = catalog.find(sources.DEFAULT_MODEL)
    assert default is not None
    assert len(default.sha256 or "") == 64


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("smolm2", "smollm2"),
        ("qwen3:0.6", "qwen3:0.6b"),
        ("qwen2.5-coder", "qwen2.5-coder:7b"),
        ("lama3.2:1b", "llama3.2:1b"),
        ("Gemma3:270M ", None),
    ],
)
def test_typos_are_met_with_what_may_be_meant(typo: str, meant: str | None) -> None:
    if meant is None:
        assert sources.find(typo) is None  # known, though not here
        return
    with pytest.raises(SourceError, match=r"did you mean .*\?") as caught:
        sources.resolve(typo)
    assert meant in str(caught.value)


def test_a_repository_without_its_prefix_is_recognized() -> None:
    with pytest.raises(SourceError, match="write hf:someone/Some-Model"):
        sources.resolve("someone/Some-Model")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("ollama:llama3", "Ollama has no model 'llama3' on this machine: `ollama pull llama3` fetches it"),
        ("lmstudio:pub/repo", "LM Studio has no model 'pub/repo' on this machine: fetch it there"),
    ],
)
def test_what_another_program_lacks_is_fetched_there(name: str, says: str) -> None:
    with pytest.raises(SourceError, match=says):
        sources.resolve(name)


def test_a_path_is_a_model(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(small_model())
    assert sources.resolve(str(path)) == sources.find(str(path)) == path
    assert sources.resolve(str(tmp_path)) == path
    shards = write_shards(tmp_path)
    assert sources.resolve(str(shards[2])) == shards[0]
    with pytest.raises(SourceError, match=r"is a folder; name one.*m\.gguf, model-00001-of-00003\.gguf"):
        sources.resolve(str(tmp_path))
    for missing in (str(tmp_path / "none"), "none.gguf", "./none"):
        with pytest.raises(SourceError, match="no such file"):
            sources.resolve(missing)


def test_models_of_ollama_are_found_in_place(home: Path) -> None:
    blob = add_ollama(home, "registry.ollama.ai/library/qwen3/0.6b")
    other = add_ollama(home, "registry.ollama.ai/me/mine/latest", "c" * 64)
    foreign = add_ollama(home, "hf.co/owner/repo/Q4_K_M", "d" * 64)
    names = {model.name: model for model in sources.installed()}
    assert set(names) == {"ollama:qwen3:0.6b", "ollama:me/mine:latest", "ollama:hf.co/owner/repo:Q4_K_M"}
    assert sources.resolve("ollama:qwen3:0.6b") == sources.resolve("qwen3:0.6b") == blob
    assert sources.resolve("ollama:me/mine") == sources.resolve("me/mine") == other
    assert sources.resolve("ollama:hf.co/owner/repo:Q4_K_M") == foreign
    model = sources.find_installed("qwen3:0.6b")
    assert model is not None
    assert not model.is_ours
    with pytest.raises(SourceError, match="belongs to Ollama"):
        sources.remove(model)
    assert blob.exists()
    with pytest.raises(SourceError, match="Ollama has no model 'other'"):
        sources.resolve("ollama:other")


def test_the_default_never_becomes_a_larger_model_of_ollama(home: Path) -> None:
    add_ollama(home, "registry.ollama.ai/library/smollm2/latest")  # there, the 1.7 B one
    assert sources.find("smollm2") is None


def test_what_is_broken_in_ollama_is_passed_over(home: Path) -> None:
    add_ollama(home, "registry.ollama.ai/library/safetensors/latest", "c" * 64, b"not a GGUF")
    add_ollama(home, "registry.ollama.ai/library/gone/latest", "d" * 64).unlink()
    (home / ".ollama/models/evil").write_bytes(small_model())
    manifests = home / ".ollama/models/manifests/registry.ollama.ai/library"
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:../../evil"}
    evil = json.dumps({"layers": [layer]})
    for name, text in [
        ("text", "{"),
        ("list", "[]"),
        ("odd", '{"layers": [{"digest": 1}]}'),
        ("none", "{}"),
        ("evil", evil),
    ]:
        (manifests / name).mkdir()
        (manifests / name / "latest").write_text(text)
    (manifests / "stray").write_text("{}")
    assert list(ollama.installed()) == []


def test_models_of_lm_studio_are_found_in_place(home: Path, tmp_path: Path) -> None:
    path = add_lmstudio(home, "pub/Repo-GGUF/Repo-Q4_K_M.gguf")
    add_lmstudio(home, "pub/Repo-GGUF/mmproj-Repo-f16.gguf")
    old = add_lmstudio(home, "pub/Old-GGUF/old.gguf", ".cache/lm-studio/models")
    (home / ".lmstudio-home-pointer").write_text(str(tmp_path / "elsewhere"))
    moved = add_lmstudio(tmp_path, "pub/Moved/moved.gguf", "elsewhere/models")
    assert {model.path for model in lmstudio.installed()} == {path, old, moved}
    for name in ("pub/Repo-GGUF", "repo-gguf", "Repo-Q4_K_M", "lmstudio:pub/Repo-GGUF/Repo-Q4_K_M.gguf"):
        assert sources.resolve(name) == path
    model = sources.find_installed("repo-gguf")
    assert model is not None
    with pytest.raises(SourceError, match="belongs to LM Studio"):
        sources.remove(model)
    add_lmstudio(home, "pub/Repo-GGUF/Repo-Q8_0.gguf")
    with pytest.raises(SourceError, match=r"several models; name one of them: .*Q4_K_M.*Q8_0"):
        sources.resolve("pub/Repo-GGUF")


def test_no_folder_of_other_programs_is_no_error() -> None:
    assert sources.installed() == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Model-7B-Q4_K_M.gguf", "Q4_K_M"),
        ("model.q8_0.gguf", "Q8_0"),
        ("m-IQ2_XXS.gguf", "IQ2_XXS"),
        ("SmolLM2-360M-Instruct-Q8_0-then-f16.gguf", "F16"),
        ("Qwen3-8B-Q4_K_M-00001-of-00002.gguf", "Q4_K_M"),
        ("gpt-oss-20b-MXFP4.gguf", "MXFP4"),
        ("plain.gguf", None),
    ],
)
def test_quantization_is_read_from_names(name: str, expected: str | None) -> None:
    assert quantization(name) == expected


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "name of the model is empty"),
        ("  ", "name of the model is empty"),
        ("/dev/null", "not a file"),
        ("/no/such.gguf", "no such file"),
        ("~nobody-of-this-name/model.gguf", "no such user"),
    ],
)
def test_what_cannot_be_a_model_is_said_to_be_none(name: str, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        sources.resolve(name)


@pytest.mark.parametrize("name", ["qwen3:0.6b", "hf:owner/repo", "pypi:package==1.0"])
def test_a_name_that_is_known_but_not_fetched_is_told_how_to_be_fetched(home: Path, name: str) -> None:
    assert str(sources.unknown(name)) == f"{name} is not on this machine; `chabok pull {name}` fetches it"
