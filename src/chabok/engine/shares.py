"""Fair shares of the work between clients: who asks for much waits for it, and makes nobody else wait.

Fair queueing (Demers, Keshav and Shenker 1989): every client that has something to do is owed an equal share
of the rows that are computed. A virtual clock runs as fast as that share grows; a request is due when the
clock reaches the work its client asked for up to and with it, and the earliest due goes first. Idle clients
save nothing up, and with a finite number of clients the clock passes every request's time.
"""

from __future__ import annotations

_FEW = 64  # idle clients that are remembered without a look at whether they need be


class _Client:
    __slots__ = ("busy", "due", "owed")

    def __init__(self) -> None:
        self.busy = 0  # requests that have not ended
        self.due = 0.0  # when the last of them is due
        self.owed = 0.0  # how much less work its ended requests took than was expected of them


class Shares:
    """The virtual clock, in tokens of each client's share."""

    def __init__(self) -> None:
        self.now = 0.0
        self._clients: dict[str, _Client] = {}
        self._n_busy = 0

    def enter(self, client: str, work: float) -> float:
        """A request of so many tokens came; the instant it is due."""
        one = self._clients.get(client)
        if one is None:
            if len(self._clients) > 2 * self._n_busy + _FEW:
                self._forget()
            one = self._clients[client] = _Client()
        self._n_busy += one.busy == 0
        one.busy += 1
        one.due = max(one.due, self.now) + work
        return one.due

    def _forget(self) -> None:
        """Drop the idle clients that have no more than their share."""
        self._clients = {name: one for name, one in self._clients.items() if one.busy or one.due > self.now}

    def advance(self, work: int) -> None:
        """So many rows were computed."""
        if self._n_busy:
            self.now += work / self._n_busy

    def leave(self, client: str, unused: float) -> None:
        """A request ended with so much less work than was expected of it; negative if it was more."""
        one = self._clients[client]
        one.busy -= 1
        one.owed += unused
        if one.busy == 0:
            one.due -= one.owed
            one.owed = 0.0
            self._n_busy -= 1
            if self._n_busy == 0:
                self._clients.clear()
                self.now = 0.0
            elif one.due <= self.now:
                del self._clients[client]

    def settle(self) -> dict[str, float]:
        """What to take off the instants at which each client's requests are due, as earlier ones took less
        work than expected; to be asked once in a while, and applied to all of them."""
        off = {name: one.owed for name, one in self._clients.items() if one.owed}
        for name, owed in off.items():
            one = self._clients[name]
            one.due -= owed
            one.owed = 0.0
        return off
