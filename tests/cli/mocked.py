"""``chabok`` with a model that has no weights, for tests that start it as a process."""

import sys

from tests.engine.mock import ByteTokenizer, MockModel, PlainTemplate

from chabok.engine import llm
from chabok.engine.load import Loaded, Options


def load(name: str, options: Options, progress: object = None) -> Loaded:
    row_s = 0.01 if name == "slow" else 0.0
    model = MockModel(eos_every=0 if name in ("slow", "endless") else 40, row_s=row_s)
    model.name = name
    if options.context is None:
        options = Options(options.threads, 2048, options.max_batch, options.kv_memory, options.pack)
    return Loaded(model, ByteTokenizer(), PlainTemplate, options)


llm.load = load  # type: ignore[assignment]

if __name__ == "__main__":
    from chabok.cli.main import main

    sys.exit(main())
