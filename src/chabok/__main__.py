"""``python -m chabok`` is the ``chabok`` command."""

from __future__ import annotations

import sys

from chabok.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
