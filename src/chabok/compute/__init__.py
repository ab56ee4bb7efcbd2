"""Numbers in, numbers out: kernels that are emitted, compiled and run; knows nothing of language models."""
