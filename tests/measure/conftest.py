"""A scripted server for all tests of measuring."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from time import perf_counter
from typing import Any

import pytest
from tests.measure.scripted import ScriptedServer

from chabok.measure import Endpoint, Patience, Timeline


@pytest.fixture(scope="session")
def server() -> Iterator[ScriptedServer]:
    running = ScriptedServer()
    yield running
    running.close()


def ask(url: str, dialect: str = "openai-chat", output: int = 64, **options: Any) -> tuple[Timeline, float]:
    """The timeline of one request on a warm connection, and the perf_counter instant it counts from."""
    endpoint = Endpoint.at(
        url, dialect=dialect, model="m", patience=options.pop("patience", Patience(total_s=20)), **options
    )

    async def go() -> tuple[Timeline, float]:
        async with endpoint.client() as client:
            await client.warm(1)
            start = perf_counter()
            timeline = Timeline(0, 0.0, asked_output=output)
            await endpoint.time(client, endpoint.ask("hello", output), timeline, start)
            return timeline, start

    return asyncio.run(go())
