"""Chabok's stopwatch as a process: ``stopwatch_worker.py URL STREAMS REQUESTS PROMPTS FOLDER``.

Writes raw timelines as requests end, measures them at the end, and writes what it found to FOLDER/told.json.
Where the events' text is the instant of their writing (as the firehose sends), it also tells how late they
were seen.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import numpy as np

from chabok.measure import Concurrent, Endpoint, Outcome, Stopwatch, TimelineFile, measure, read_timelines
from chabok.measure.prompts import FromFile


def main(url: str, streams: int, requests: int, prompts: Path, folder: Path) -> None:
    endpoint = Endpoint.at(url, model="m")
    source = FromFile(prompts, 1000)

    async def go() -> tuple[Outcome, float]:
        with TimelineFile(folder / "timelines.jsonl") as file:
            async with Stopwatch(endpoint, source, sink=file) as stopwatch:
                return await stopwatch.run(Concurrent(streams, requests)), stopwatch.start

    outcome, start = asyncio.run(go())
    found = {}
    late: list[float] = []
    for timeline in read_timelines(folder / "timelines.jsonl"):
        one = measure(timeline)
        if not one.ok or one.ttft_s is None or one.tpot_s is None or timeline.done is None:
            continue
        word = source(timeline.number).text.split(" ", 1)[0]
        found[word] = [one.ttft_s, one.tpot_s, timeline.scheduled, timeline.done]
        late += [
            event.at + start - int(event.text) / 1e9
            for event in timeline.events
            if event.kind == "content" and event.text.isdigit()
        ]
    more = {"cpu_share": outcome.cpu_share, "lateness_p99_s": outcome.lateness_p99_s}
    if late:
        more["seen_p99_s"] = float(np.percentile(late, 99))
    (folder / "told.json").write_text(json.dumps({"requests": found, "more": more}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), Path(sys.argv[5]))
