from __future__ import annotations

import shutil
import struct
import time
from pathlib import Path

import gguf as reference
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.checkpoints.writing import (
    ARRAY,
    BOOL,
    INT32,
    STRING,
    UINT64,
    RawTensor,
    Typed,
    gguf_bytes,
    small_model,
    write_shards,
)

from chabok.checkpoints.ggml import TYPES, TensorType
from chabok.checkpoints.gguf import GGUF, StringArray
from chabok.errors import CheckpointError


def write(folder: Path, content: bytes) -> Path:
    path = folder / "model.gguf"
    path.write_bytes(content)
    return path


def refused(folder: Path, content: bytes, *words: str) -> None:
    path = write(folder, content)
    with pytest.raises(CheckpointError) as caught:
        GGUF.open(path)
    for word in (str(path), *words):
        assert word in str(caught.value)


def test_reads_every_kind_of_metadata(tmp_path: Path) -> None:
    model = GGUF.open(write(tmp_path, small_model()))
    assert model.architecture == "llama"
    assert model.metadata["general.name"] == "سلام 你好 🙂"
    assert model.metadata["llama.block_count"] == 2
    assert model.metadata["llama.flag"] is True
    assert model.metadata["llama.long"] == 1 << 40
    assert model.metadata["llama.double"] == 1e-300
    assert model.metadata["tokenizer.ggml.tokens"] == ["a", "", "bc", "\0", "ن", "x" * 40]
    assert model.metadata["tokenizer.ggml.token_type"].tolist() == [1, 3, -1]
    assert model.metadata["llama.bools"].tolist() == [True, False]
    assert [part.tolist() for part in model.metadata["llama.nested"]] == [[1, 2], [3]]
    assert len(model.metadata["llama.empty"]) == 0


def test_maps_tensors_in_numpy_order_with_their_bytes(tmp_path: Path) -> None:
    data = bytes(range(96))
    path = write(
        tmp_path, gguf_bytes({}, [RawTensor("a", 0, (4,), b"\1" * 16), RawTensor("e", 1, (8, 2, 3), data)])
    )
    tensor = GGUF.open(path).tensors["e"]
    assert (tensor.type, tensor.shape, tensor.n_values, tensor.n_bytes) == ("F16", (3, 2, 8), 48, 96)
    assert tensor.data.tobytes() == data
    assert not tensor.data.flags.writeable


def test_agrees_with_the_reference_reader(tmp_path: Path) -> None:
    path = tmp_path / "reference.gguf"
    writer = reference.GGUFWriter(path, "qwen2")
    writer.add_block_count(3)
    writer.add_array("tokenizer.ggml.tokens", [f"token {i}" for i in range(1000)])
    writer.add_array("scores", [float(i) for i in range(10)])
    weights = np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32)
    quantized = reference.quants.quantize(weights, reference.GGMLQuantizationType.Q5_1)
    writer.add_tensor("w", quantized, raw_dtype=reference.GGMLQuantizationType.Q5_1)
    writer.add_tensor("n", weights[0])
    for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, step)()
    ours, theirs = GGUF.open(path), reference.GGUFReader(path)
    assert ours.metadata["tokenizer.ggml.tokens"] == theirs.fields["tokenizer.ggml.tokens"].contents()
    assert ours.metadata["scores"].tolist() == theirs.fields["scores"].contents()
    for expected in theirs.tensors:
        tensor = ours.tensors[expected.name]
        assert (tensor.type, tensor.offset) == (expected.tensor_type.name, expected.data_offset)
        assert tensor.shape == tuple(int(n) for n in expected.shape[::-1])
        assert tensor.data.tobytes() == expected.data.tobytes()


def test_type_table_equals_the_reference() -> None:
    for kind, sizes in reference.GGML_QUANT_SIZES.items():
        ours = TYPES[kind.value]
        assert (ours.name, ours.block_size, ours.block_bytes) == (kind.name, *sizes)


def test_a_vocabulary_of_150_000_opens_and_lists_in_a_blink(tmp_path: Path) -> None:
    tokens = [f"token{i}" for i in range(150_000)]
    path = write(tmp_path, gguf_bytes({"tokenizer.ggml.tokens": tokens}))
    best_open = best_list = 1.0
    for _ in range(5):
        start = time.perf_counter()
        array = GGUF.open(path).metadata["tokenizer.ggml.tokens"]
        opened = time.perf_counter()
        listed = array.tolist()
        best_open = min(best_open, opened - start)
        best_list = min(best_list, time.perf_counter() - opened)
    assert listed == tokens
    assert best_open < 0.1  # about 0.012 on an idle machine
    assert best_list < 0.2  # about 0.02


@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=12), max_size=50), st.integers(-60, 60))
@settings(max_examples=60, deadline=None)
def test_string_arrays_behave_like_lists(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], i: int
) -> None:
    path = tmp_path_factory.mktemp("strings") / "s.gguf"
    path.write_bytes(gguf_bytes({"s": Typed(ARRAY, (STRING, texts))}))
    array = GGUF.open(path).metadata["s"]
    assert isinstance(array, StringArray)
    assert array.tolist() == list(array) == texts
    assert array[1:4] == texts[1:4]
    assert array.raws() == [text.encode() for text in texts]
    if -len(texts) <= i < len(texts):
        assert array[i] == texts[i]
    else:
        with pytest.raises(IndexError):
            array[i]


names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
scalars = st.one_of(
    st.booleans(),
    st.integers(0, (1 << 32) - 1),
    st.integers(-(1 << 63), (1 << 63) - 1).map(lambda n: Typed(11, n)),
    st.floats(width=32, allow_nan=False),
    st.text(st.characters(codec="utf-8"), max_size=50),
)
arrays = st.one_of(
    st.lists(st.integers(0, 255), max_size=20).map(lambda items: Typed(ARRAY, (0, items))),
    st.lists(st.floats(allow_nan=False), max_size=20).map(lambda items: Typed(ARRAY, (12, items))),
    st.lists(st.booleans(), max_size=20).map(lambda items: Typed(ARRAY, (BOOL, items))),
    st.lists(st.text(st.characters(codec="utf-8"), max_size=9), max_size=20).map(
        lambda items: Typed(ARRAY, (STRING, items))
    ),
)
blocks = st.sampled_from(sorted(TYPES.values(), key=lambda kind: kind.code))


@given(
    metadata=st.dictionaries(names, st.one_of(scalars, arrays), max_size=8),
    tensors=st.dictionaries(
        names, st.tuples(blocks, st.lists(st.integers(1, 4), min_size=1, max_size=4)), max_size=5
    ),
    alignment=st.sampled_from([1, 8, 32, 256]),
)
@settings(max_examples=150, deadline=None)
def test_whatever_is_written_is_read_back(
    tmp_path_factory: pytest.TempPathFactory,
    metadata: dict[str, object],
    tensors: dict[str, tuple[TensorType, list[int]]],
    alignment: int,
) -> None:
    raw = []
    for seed, (name, (kind, dims)) in enumerate(tensors.items()):
        n_bytes = int(np.prod(dims)) * kind.block_bytes
        data = np.random.default_rng(seed).integers(0, 256, n_bytes, np.uint8).tobytes()
        raw.append(RawTensor(name, kind.code, (dims[0] * kind.block_size, *dims[1:]), data))
    metadata = {**metadata, "general.alignment": alignment}
    path = tmp_path_factory.mktemp("round") / "m.gguf"
    path.write_bytes(gguf_bytes(metadata, raw, alignment=alignment))
    model = GGUF.open(path)
    assert list(model.metadata) == list(metadata)
    for key, written in metadata.items():
        value, read = written.value if isinstance(written, Typed) else written, model.metadata[key]
        if isinstance(value, tuple):
            assert list(read) == value[1]  # type: ignore[call-overload]
        else:
            assert read == value
            assert type(read) is type(value)
    assert list(model.tensors) == list(tensors)
    for expected in raw:
        tensor = model.tensors[expected.name]
        assert tensor.shape == tuple(expected.dims[::-1])
        assert tensor.data.tobytes() == expected.data
        assert tensor.offset % alignment == 0


def test_a_token_that_is_not_utf8_is_named_when_read_but_does_not_stop_the_rest(tmp_path: Path) -> None:
    path = write(tmp_path, gguf_bytes({"s": Typed(ARRAY, (STRING, [b"ok", b"\xff\xfe"]))}))
    array = GGUF.open(path).metadata["s"]
    assert array[0] == "ok"
    assert array.raw(1) == b"\xff\xfe"
    for read in (lambda: array[1], array.tolist):
        with pytest.raises(CheckpointError, match="entry 1 is not valid UTF-8"):
            read()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["it is empty"]),
        (b"GGUF", ["magic"]),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64, ["Git LFS"]),
        (b"PK\3\4" + bytes(60), ["zip"]),
        (b"\0" * 64, ["begins with zeros"]),
        (b"<!DOCTYPE html><html><head></head></html>", ["web page"]),
        (struct.pack("<Q", 100) + b'{"__metadata__":{}}' + bytes(80), ["safetensors"]),
        (gguf_bytes(version=1), ["version 1"]),
        (gguf_bytes(version=9), ["version 9"]),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), ["big-endian"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_files_that_are_no_gguf_are_told_apart(tmp_path: Path, content: bytes, words: list[str]) -> None:
    refused(tmp_path, content, *words)


HUGE = 1 << 63


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"GGUF" + struct.pack("<IQQ", 3, HUGE, 0), ["tensor count"]),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, HUGE), ["metadata count"]),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 9), ["metadata count", "do not fit"]),
        (gguf_bytes([("k", 1), ("k", 2)]), ["'k'", "twice"]),
        (gguf_bytes({"k": Typed(BOOL, True)})[:-1] + b"\2", ["'k'", "0 or 1"]),
        (gguf_bytes({"kkk": 1}).replace(b"kkk\4", b"kkk\x3f"), ["'kkk'", "63"]),
        (gguf_bytes({"a": [1, 2]})[:-1], ["'a'"]),
        (gguf_bytes({"a": ["x", "y"]})[:-1], ["'a'", "end of the file"]),
        (gguf_bytes({"a": ["x" * 20, "yyyy"]})[:-9], ["'a'", "string 1 of 2"]),
        (gguf_bytes({"a": b"\xff"}), ["'a'", "UTF-8"]),
        (gguf_bytes({b"\xff": 1}), ["metadata key 0", "UTF-8"]),  # type: ignore[dict-item]
        (gguf_bytes({"n": Typed(ARRAY, (ARRAY, [[[[[1]]]]]))}), ["'n'", "nested"]),
        (gguf_bytes({"general.alignment": 24}), ["general.alignment", "24"]),
        (gguf_bytes({"general.alignment": 0}), ["general.alignment", "0"]),
        (gguf_bytes({"general.alignment": "x"}), ["general.alignment"]),
        (gguf_bytes({}, [RawTensor("t", 0, (4,), bytes(16))] * 2), ["'t'", "twice"]),
        (gguf_bytes({}, [RawTensor("t", 0, (4,), b"", offset=1 << 62)]), ["'t'", "outside"]),
        (gguf_bytes({}, [RawTensor("t", 0, (4,), bytes(16), offset=5)]), ["'t'", "alignment"]),
        (gguf_bytes({}, [RawTensor("t", 0, (4, 0), bytes(16))]), ["'t'", "shape"]),
        (gguf_bytes({}, [RawTensor("t", 0, (1 << 32, 1 << 32), bytes(16))]), ["'t'", "shape"]),
        (gguf_bytes({}, [RawTensor("t", 0, (HUGE,), bytes(16))]), ["'t'", "shape"]),
        (gguf_bytes({}, [RawTensor("t", 0, (1 << 40,), bytes(16))]), ["'t'", "outside"]),
        (gguf_bytes({}, [RawTensor("t", 2, (33,), bytes(36))]), ["'t'", "Q4_0", "32"]),
        (gguf_bytes({}, [RawTensor("t", 0, (1,) * 5, bytes(16))]), ["'t'", "5 dimensions"]),
        (gguf_bytes({}, [RawTensor("t", 0, (), bytes(16))]), ["'t'", "0 dimensions"]),
        (
            gguf_bytes(
                {}, [RawTensor("a", 0, (16,), bytes(64)), RawTensor("b", 0, (4,), bytes(16), offset=32)]
            ),
            ["'b'", "overlaps", "'a'"],
        ),
        (
            gguf_bytes({}, [RawTensor("a", 0, (4,), bytes(16)), RawTensor("b", 99, (4,), b"", offset=0)]),
            ["overlaps"],
        ),
        (small_model()[:-40], ["'experts'", "incomplete"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_hostile_headers_are_refused_by_field(tmp_path: Path, content: bytes, words: list[str]) -> None:
    refused(tmp_path, content, *words)


def test_a_missing_file_and_a_folder_are_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        GGUF.open(tmp_path / "none.gguf")
    with pytest.raises(CheckpointError, match="not a file"):
        GGUF.open(tmp_path)


def test_an_unknown_tensor_type_is_listed_and_refused_only_when_read(tmp_path: Path) -> None:
    path = write(
        tmp_path, gguf_bytes({}, [RawTensor("a", 0, (4,), bytes(16)), RawTensor("odd", 99, (7,), bytes(9))])
    )
    model = GGUF.open(path)
    assert model.tensors["odd"].type == "type 99"
    assert model.tensors["a"].data.tobytes() == bytes(16)
    with pytest.raises(CheckpointError, match="'odd' has type 99"):
        _ = model.tensors["odd"].data


def test_the_alignment_of_the_file_counts(tmp_path: Path) -> None:
    tensors = [RawTensor("a", 0, (1,), b"\1\0\0\0"), RawTensor("b", 0, (1,), b"\2\0\0\0")]
    path = write(tmp_path, gguf_bytes({"general.alignment": 256}, tensors, alignment=256))
    model = GGUF.open(path)
    assert [tensor.offset % 256 for tensor in model.tensors.values()] == [0, 0]
    assert model.tensors["b"].data[0] == 2


def test_getters_name_file_and_field(tmp_path: Path) -> None:
    metadata = {"i": 3, "f": 0.5, "s": "x", "b": True, "nan": float("nan"), "list": [1, 2], "tokens": ["a"]}
    path = write(tmp_path, gguf_bytes(metadata))
    model = GGUF.open(path)
    assert model.get("i", int) == 3
    assert model.get("i", float) == 3.0
    assert model.get("f", float) == 0.5
    assert model.get("none", str, "default") == "default"
    assert model.get("b", bool) is True
    assert model.get("list", np.ndarray).tolist() == [1, 2]
    assert model.get("tokens", StringArray)[0] == "a"
    assert model.per_layer("list", 2) == [1, 2]
    assert model.per_layer("i", 2) == [3, 3]
    assert model.per_layer("none", 2, 7) == [7, 7]
    for ask, words in [
        (lambda: model.get("none", int), "missing"),
        (lambda: model.get("s", int), "must be an integer, not a string"),
        (lambda: model.get("b", int), "must be an integer, not a boolean"),
        (lambda: model.get("f", int), "must be an integer"),
        (lambda: model.get("list", int), "not an array of 2"),
        (lambda: model.get("nan", float), "finite"),
        (lambda: model.get("i", int, at_least=4), "at least 4"),
        (lambda: model.get("i", int, at_most=2), "at most 2"),
        (lambda: model.per_layer("list", 3), "2 values for 3 layers"),
        (lambda: model.per_layer("list", 2, at_least=2), "at least 2"),
    ]:
        with pytest.raises(CheckpointError, match=words) as caught:
            ask()
        assert str(path) in str(caught.value)


def test_shards_open_as_one(tmp_path: Path) -> None:
    paths = write_shards(tmp_path)
    model = GGUF.open(paths[0])
    assert list(model.tensors) == ["t0", "t1", "t2"]
    assert model.tensors["t2"].data.tobytes() == b"\2" * 16
    assert model.paths == paths
    assert model.n_bytes == sum(path.stat().st_size for path in paths)


def test_broken_splits_are_told(tmp_path: Path) -> None:
    paths = write_shards(tmp_path)
    with pytest.raises(CheckpointError, match=r"open model-00001-of-00003\.gguf"):
        GGUF.open(paths[1])
    content = paths[2].read_bytes()
    paths[2].unlink()
    with pytest.raises(CheckpointError, match=r"shard 3 of 3 is missing: .*model-00003-of-00003\.gguf"):
        GGUF.open(paths[0])
    shutil.copy(paths[1], paths[2])
    with pytest.raises(CheckpointError, match=r"model-00003-of-00003.gguf: field 'split.no'"):
        GGUF.open(paths[0])
    paths[2].write_bytes(content.replace(b"t2", b"t0"))
    with pytest.raises(CheckpointError, match=r"'t0': occurs in model-00001-of-00003\.gguf too"):
        GGUF.open(paths[0])
    renamed = paths[0].rename(tmp_path / "single.gguf")
    with pytest.raises(CheckpointError, match="not named like"):
        GGUF.open(renamed)


def test_a_split_that_counts_fewer_tensors_is_refused(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, 2)
    metadata = {"split.no": Typed(2, 0), "split.count": Typed(2, 2), "split.tensors.count": Typed(INT32, 9)}
    paths[0].write_bytes(gguf_bytes(metadata, [RawTensor("t0", 0, (4,), bytes(16))]))
    with pytest.raises(CheckpointError, match="says 9, but the shards hold 2"):
        GGUF.open(paths[0])


def test_the_fingerprint_follows_the_content_not_the_name(tmp_path: Path) -> None:
    first = write(tmp_path, small_model())
    copy = tmp_path / "copy.gguf"
    shutil.copy(first, copy)
    print_ = GGUF.open(first).fingerprint
    assert GGUF.open(copy).fingerprint == print_
    for tensor in GGUF.open(first).tensors.values():
        changed = bytearray(small_model())
        changed[tensor.offset + tensor.n_bytes // 2] ^= 1
        copy.write_bytes(changed)
        assert GGUF.open(copy).fingerprint != print_
    copy.write_bytes(small_model().replace(b"llama.block_count", b"llama.block_cOunt"))
    assert GGUF.open(copy).fingerprint != print_


def test_views_outlive_the_object(tmp_path: Path) -> None:
    data = GGUF.open(write(tmp_path, small_model(1))).tensors["experts"].data
    assert data.sum() > 0


def test_long_counts_of_a_known_type_do_not_allocate(tmp_path: Path) -> None:
    content = gguf_bytes({"a": Typed(ARRAY, (UINT64, [1]))})
    grown = content[:-16] + struct.pack("<Q", 1 << 39) + content[-8:]
    refused(tmp_path, grown, "'a'", "do not fit")
