"""llama.cpp's server from the xllamacpp package: ``python llamacpp.py MODEL THREADS`` prints its port.

Ends when its standard input does.
"""

from __future__ import annotations

import sys


def main(model: str, threads: int) -> None:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.port = 0
    params.hostnames = ["127.0.0.1"]
    params.n_ctx, params.n_parallel = 4096, 2
    params.n_gpu_layers = 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.endpoint_metrics = True
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
