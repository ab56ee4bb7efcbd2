"""The engine behind the interfaces that clients speak."""
