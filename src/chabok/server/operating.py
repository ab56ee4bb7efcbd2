"""What those who watch over a server ask: is it alive, is it ready, what does it count."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.routing import BaseRoute, Route

from chabok.server.call import Call, Endpoint
from chabok.server.errors import RefusedError

if TYPE_CHECKING:
    from chabok.server.metrics import Metrics


def routes() -> list[BaseRoute]:
    """/health, /ready and /metrics."""
    return [
        Route("/health", Endpoint(health), methods=["GET"]),
        Route("/ready", Endpoint(ready), methods=["GET"]),
        Route("/metrics", Endpoint(metrics), methods=["GET"]),
    ]


async def health(call: Call) -> None:
    """200 as long as the server answers at all."""
    from chabok import __version__

    await call.json({"status": "ok", "version": __version__})


async def ready(call: Call) -> None:
    """200 if requests are welcome; 503 with the reason while models are loaded, and when stopping."""
    reason = call.server.roster.unready
    await call.json({"status": reason or "ready"}, 503 if reason else 200, {"Cache-Control": "no-store"})


async def metrics(call: Call) -> None:
    """Prometheus' text format, or OpenMetrics where that is asked for."""
    found: Metrics | None = getattr(call.server, "metrics", None)
    if found is None:
        raise RefusedError(404, "metrics are switched off here", "not_found")
    data, media_type = found.render(call.headers.get("accept", ""))
    await call.answer(data, media_type)
