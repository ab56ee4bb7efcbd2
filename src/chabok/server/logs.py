"""What a server writes down: a line for each request, and what happens to models; never what was said."""

from __future__ import annotations

import logging
import sys

from chabok.server.settings import Settings


def configure(settings: Settings) -> None:
    """Send the log to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.INFO)
