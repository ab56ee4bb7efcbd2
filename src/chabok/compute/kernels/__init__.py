"""One file per kernel family."""
