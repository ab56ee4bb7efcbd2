"""``python -m chabok``: the command line, where its script is not on the path."""

import sys

from chabok.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
