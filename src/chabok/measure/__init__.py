"""The stopwatch: what an endpoint feels like, what it carries, and where its time goes."""
