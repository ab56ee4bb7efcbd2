"""Writes fixtures/reference.json: what llama.cpp makes of the corpus, with real and with small vocabularies.

Run with a Python that has llama-cpp-python (0.3.36 made the committed file) and gguf, from the root of the
repository:

    PYTHONPATH=. python tests/text/make_reference.py
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from gguf import GGUFWriter
from llama_cpp import Llama
from tests.models import model_path
from tests.text.corpus import texts
from tests.text.vocabularies import FIXTURES, byte_level, sentencepiece

REAL = ("smollm2", "gemma3", "qwen05")
# llama.cpp only approximates tekken and gpt-4o; the corpus stays clear of where that shows.
PRE_TOKENIZERS = (
    "default", "gpt-2", "smollm", "llama-bpe", "qwen2", "qwen35", "deepseek-llm", "deepseek-coder",
    "deepseek-v3", "falcon", "bailingmoe", "seed-coder", "glm4", "refact", "starcoder", "viking", "bloom",
    "tekken", "gpt-4o",
)  # fmt: skip


def tokenize(path: Path, corpus: list[str]) -> dict[str, list[list[int]]]:
    model = Llama(model_path=str(path), vocab_only=True, verbose=False)
    return {
        kind: [model.tokenize(text.encode(), add_bos=False, special=kind == "special") for text in corpus]
        for kind in ("plain", "special")
    }


def write(metadata: dict[str, Any], path: Path) -> None:
    writer = GGUFWriter(path, metadata["general.architecture"])
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif key != "general.architecture":
            writer.add_string(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    corpus = texts()
    reference: dict[str, Any] = {"texts": corpus}
    for name in REAL:
        reference[name] = tokenize(model_path(name), corpus)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocabulary.gguf"
        for name in PRE_TOKENIZERS:
            write(byte_level(name), path)
            # Only the cutting differs between these, so a text each way is enough.
            reference[f"pre:{name}"] = {"plain": tokenize(path, corpus)["plain"]}
        for name, prefix in (("spm", True), ("spm-no-prefix", False)):
            write(sentencepiece(add_space_prefix=prefix), path)
            reference[name] = tokenize(path, corpus)
    path = FIXTURES / "reference.json"
    path.write_text(json.dumps(reference, separators=(",", ":")) + "\n")
    print(f"{len(corpus)} texts, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
