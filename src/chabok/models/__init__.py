"""One file per architecture family: configuration to program."""
