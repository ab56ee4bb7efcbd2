"""Servers on the usual local ports."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from chabok.measure.endpoint import Endpoint, detect
from chabok.measure.failures import MeasureError

PORTS = {
    11435: "Chabok",
    11434: "Ollama",
    8080: "llama.cpp",
    1234: "LM Studio",
    8000: "vLLM",
    30000: "SGLang",
}
"""Where these servers listen unless told otherwise."""


async def discover(**options: Any) -> list[Endpoint]:
    """Endpoints that answer on this machine's usual ports, in the order of ``PORTS``; takes a second at most
    where nothing listens. MeasureError if there is none: names what would be found."""
    found = await asyncio.gather(*(_at(port, options) for port in PORTS))
    endpoints = [endpoint for endpoint in found if endpoint is not None]
    if not endpoints:
        usual = ", ".join(f"{name} {port}" for port, name in PORTS.items())
        raise MeasureError(
            f"no server answers on the usual local ports ({usual}); start one, or give a URL or a model: "
            "chabok bench http://host:port"
        )
    return endpoints


async def _at(port: int, options: dict[str, Any]) -> Endpoint | None:
    try:
        async with asyncio.timeout(1.0):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
        async with asyncio.timeout(5.0):
            return await detect(f"http://127.0.0.1:{port}", **options)
    except (OSError, TimeoutError, MeasureError):
        return None
