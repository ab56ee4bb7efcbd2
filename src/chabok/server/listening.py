"""Sockets to listen at, and what to say when that is not possible."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from pathlib import Path

from chabok.errors import ResourceError
from chabok.server.settings import Settings, SettingsError, is_loopback

FILES = 65536
"""How many files and connections the process shall be able to have open, where the system permits."""


def check_exposure(settings: Settings, has_keys: bool) -> None:
    """Raise SettingsError if the network could use the server without a key and nobody wanted that."""
    if settings.is_local or has_keys or settings.allow_remote_without_key:
        return
    raise SettingsError(
        f"at {settings.host} other machines could use this server without a key: give --api-keys FILE "
        "(`chabok serve --new-key NAME --api-keys FILE` makes one), set CHABOK_API_KEY, or say "
        "--allow-remote-without-key if that is what you want"
    )


def listen(settings: Settings) -> list[socket.socket]:
    """Sockets bound to where the settings say, not yet listening. Raises ResourceError or SettingsError."""
    if settings.socket is not None:
        return [_unix(settings.socket)]
    try:
        found = socket.getaddrinfo(
            settings.host.strip("[]"), settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise SettingsError(
            f"host {settings.host!r} is not an address of this machine ({error.strerror or error}); "
            "127.0.0.1 is for this machine alone, 0.0.0.0 for all"
        ) from None
    sockets: list[socket.socket] = []
    port = settings.port
    try:
        for family, address in dict.fromkeys((each[0], each[4]) for each in found):
            try:
                sockets.append(_bound(family, (address[0], port, *address[2:])))
            except OSError as error:
                unusable = error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
                if unusable and len(found) > 1:
                    continue  # a name with an IPv6 address on a machine without IPv6
                raise _explained(error, settings.host, port) from None
            port = sockets[-1].getsockname()[1]  # of 0, the same for all
    except BaseException:
        for each in sockets:
            each.close()
        raise
    if not sockets:
        raise SettingsError(f"host {settings.host!r} is not an address of this machine")
    return sockets


def _bound(family: int, address: tuple[object, ...]) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":  # else a port stays taken for a minute after a restart
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if address[0] == "::" else 1)
        made.bind(address)
    except BaseException:
        made.close()
        raise
    return made


def _explained(error: OSError, host: str, port: int) -> ResourceError:
    if error.errno == errno.EADDRINUSE:
        holder = holder_of(port)
        taken = f"port {port} is taken{f' by {holder}' if holder else ''}"
        return ResourceError(f"{taken}; stop that, or choose another port with --port (0: any free one)")
    if error.errno == errno.EACCES:
        return ResourceError(f"port {port} is for the administrator; choose one from 1024 with --port")
    if error.errno == errno.EADDRNOTAVAIL:
        return ResourceError(f"{host} is not an address of this machine; 127.0.0.1 or 0.0.0.0 are")
    return ResourceError(f"cannot listen at {host}, port {port}: {error.strerror or error}")


def _unix(path: Path) -> socket.socket:
    """A Unix socket that only its owner may use; one left by a server that is gone is replaced."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists() and not stat.S_ISSOCK(path.stat().st_mode):
            raise SettingsError(f"socket {path} exists and is not a socket; choose another path")
        if path.exists():
            with contextlib.suppress(ConnectionRefusedError), socket.socket(socket.AF_UNIX) as probe:
                probe.connect(str(path))
                raise ResourceError(f"another server listens at {path}; stop it, or choose another path")
            path.unlink()
        before = os.umask(0o177)
        try:
            made.bind(str(path))
        finally:
            os.umask(before)
    except OSError as error:
        made.close()
        raise ResourceError(f"cannot listen at {path}: {error.strerror or error}") from None
    except BaseException:
        made.close()
        raise
    return made


def holder_of(port: int, proc: Path = Path("/proc")) -> str:
    """The program that listens at a TCP port, "ollama (process 123)"; "" if that cannot be found out.

    Sockets and their inodes are in /proc/net/tcp (proc_net_tcp.txt of Linux); open files in /proc/PID/fd.
    """
    inodes: set[str] = set()
    for name in ("net/tcp", "net/tcp6"):
        with contextlib.suppress(OSError):
            for line in (proc / name).read_text().splitlines()[1:]:
                parts = line.split()
                if parts[3] == "0A" and int(parts[1].rpartition(":")[2], 16) == port:
                    inodes.add(f"socket:[{parts[9]}]")
    if not inodes:
        return ""
    for process in proc.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # another user's, or gone
            if any(os.readlink(file) in inodes for file in (process / "fd").iterdir()):
                words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
                name = (process / "comm").read_text().strip()
                name = "another chabok serve" if "serve" in words and "chabok" in " ".join(words) else name
                return f"{name} (process {process.name})"
    return ""


def raise_file_limit(wanted: int = FILES) -> int:
    """Let the process have as many connections as the system permits; the limit that holds then."""
    try:
        import resource
    except ImportError:  # not on Windows, where there is no such limit
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    return soft


def reach_of(settings: Settings) -> str:
    """What is to be added to the address where it is not the only one: other machines have others."""
    if settings.socket is None and settings.host.strip("[]") in ("0.0.0.0", "::"):
        return f", and for other machines at every address of this one (host {settings.host})"
    return ""


def address_of(settings: Settings, sockets: list[socket.socket]) -> str:
    """The URL under which a client on this machine finds the server, or the path of its socket."""
    if settings.socket is not None:
        return str(settings.socket)
    host, port = sockets[0].getsockname()[:2]
    if not is_loopback(settings.host) and host in ("0.0.0.0", "::"):
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"
    scheme = "https" if settings.tls_certificate else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
