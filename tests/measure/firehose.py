"""A server of many streams at once: every tick each of them gets its next event, from one thread.

``python firehose.py STREAMS TICK_MS EVENTS``: prints its port; every answer has EVENTS events. Each event's
text is the perf_counter instant of its writing in nanoseconds: a reader can tell how late it was seen.
"""

from __future__ import annotations

import select
import socket
import sys
import time

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def event(text: str) -> bytes:
    data = (
        b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":'
        b'[{"index":0,"delta":{"content":"%s"},"logprobs":null,"finish_reason":null}]}\n\n' % text.encode()
    )
    return b"%x\r\n%s\r\n" % (len(data), data)


def last(events: int) -> bytes:
    data = (
        b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"length"}]}\n\n'
        b'data: {"choices":[],"usage":{"prompt_tokens":8,"completion_tokens":%d}}\n\ndata: [DONE]\n\n'
        % events
    )
    return b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data)


class Stream:
    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.left = 0
        self.heard = b""

    def hear(self, events: int) -> bool:
        data = self.connection.recv(65536)
        self.heard += data
        head, end, body = self.heard.partition(b"\r\n\r\n")
        if end:
            lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            if len(body) >= int(lengths[0].split(b":")[1] if lengths else 0):
                self.heard = b""
                self.left = events + 1
                self.connection.sendall(HEAD)
        return bool(data)


def main(streams: int, tick_s: float, events: int) -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    print(listener.getsockname()[1], flush=True)
    poller = select.epoll()
    poller.register(listener, select.EPOLLIN)
    found: dict[int, Stream] = {}
    end = last(events)
    tick = time.perf_counter()
    while True:
        # The streams share a tick evenly, a slice of them every half millisecond or so.
        slices = max(1, min(streams, round(tick_s / 0.0005)))
        for part in range(slices):
            due = tick + tick_s * part / slices
            while True:
                wait = due - time.perf_counter()
                for number, _ in poller.poll(max(wait, 0)):
                    if number == listener.fileno():
                        connection, _ = listener.accept()
                        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                        found[connection.fileno()] = Stream(connection)
                        poller.register(connection, select.EPOLLIN)
                    elif not found[number].hear(events):
                        poller.unregister(number)
                        found.pop(number).connection.close()
                if wait <= 0:
                    break
            for number, stream in found.items():
                if stream.left and number % slices == part:
                    stream.left -= 1
                    try:
                        now = str(time.perf_counter_ns())
                        stream.connection.sendall(event(now) if stream.left else end)
                    except OSError:
                        stream.left = 0
        tick = max(tick + tick_s, time.perf_counter() - 5 * tick_s)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]) / 1000, int(sys.argv[3]))
