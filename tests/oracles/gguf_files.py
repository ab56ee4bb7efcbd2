"""Writes small GGUF files for tests: toy vocabularies, tensors of chosen types, retyped copies.

Every file carries what the field's engines ask for, so that it loads in them too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from numpy.typing import NDArray

from .quantize import block_size, decode, encode

NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6
TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
Encoded = tuple[str, NDArray[np.generic]]  # type name, array as ``encode`` gives it


def byte_level_vocabulary(pre: str) -> dict[str, Any]:
    """All bytes, a few merges, four control tokens: 269 entries (an odd number on purpose)."""
    merges = ["t h", "h e", "i n", "e r", "a n", "th e", "Ġ t", "Ġ a", "Ġt he"]
    tokens = [*_byte_characters(), *(merge.replace(" ", "") for merge in merges)]
    controls = ["<|bos|>", "<|eos|>", "<|start|>", "<|end|>"]
    kinds = [NORMAL] * len(tokens) + [CONTROL] * len(controls)
    first = len(tokens)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens + controls,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": first,
        "tokenizer.ggml.eos_token_id": first + 1,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }


def sentencepiece_vocabulary() -> dict[str, Any]:
    """Controls, byte tokens, and a few pieces with scores: 269 entries."""
    controls = ["<pad>", "<eos>", "<bos>", "<unk>"]
    pieces = ["▁", "e", "t", "a", "th", "the", "▁t", "▁the", "in"]
    tokens = controls + [f"<0x{byte:02X}>" for byte in range(256)] + pieces
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 260 + [-float(rank) for rank in range(len(pieces))],
        "tokenizer.ggml.token_type": [CONTROL] * 3 + [UNKNOWN] + [BYTE] * 256 + [NORMAL] * len(pieces),
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.chat_template": TEMPLATE,
    }


def _byte_characters() -> list[str]:
    """GPT-2's printable stand-in for each byte."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def write(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Encoded]) -> None:
    """Write one file; metadata keys are full names, ``general.architecture`` among them."""
    writer = GGUFWriter(path, metadata["general.architecture"])
    for key, value in metadata.items():
        if key != "general.architecture":
            _add(writer, key, value)
    for name, (type_name, data) in tensors.items():
        raw = None if type_name in ("F32", "F16") else gguf.GGMLQuantizationType[type_name]
        writer.add_tensor(name, data, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, list(value))


def retype(source: Path, target: Path, type_of: Callable[[str], str]) -> None:
    """Copy a file with its matrices in other types; a row too short for a type's blocks becomes Q8_0."""
    reader = GGUFReader(source)
    metadata = {name: item.contents() for name, item in reader.fields.items() if not name.startswith("GGUF.")}
    integers = {
        name for name, item in reader.fields.items() if item.types and item.types[0] == GGUFValueType.UINT32
    }
    metadata = {name: int(value) if name in integers else value for name, value in metadata.items()}
    tensors: dict[str, Encoded] = {}
    for tensor in reader.tensors:
        weight = np.asarray(decode(tensor.data, tensor.tensor_type), dtype=np.float32)
        keep = weight.ndim == 1 or tensor.name.endswith("ffn_gate_inp.weight")
        wanted = "F32" if keep else type_of(tensor.name)
        if weight.shape[-1] % block_size(wanted):
            wanted = "Q8_0"
        tensors[tensor.name] = (wanted, encode(weight, wanted))
    write(target, metadata, tensors)
