"""systemd's readiness protocol: datagrams to the socket named by NOTIFY_SOCKET (sd_notify(3)). Silent without it."""

from __future__ import annotations

import os
import socket


class Notifier:
    """Tells the service manager about start-up, health and stopping. Never raises: a datagram may get lost."""

    def __init__(self, environ: dict[str, str] | None = None) -> None:
        env = os.environ if environ is None else environ
        path = env.get("NOTIFY_SOCKET", "")
        self._address = "\0" + path[1:] if path.startswith("@") else path
        pid = env.get("WATCHDOG_PID", "")
        usec = env.get("WATCHDOG_USEC", "")
        ours = not pid or pid == str(os.getpid())
        self.watchdog_s = int(usec) / 1e6 if usec.isdigit() and ours else 0.0

    def send(self, *lines: str) -> None:
        """Send assignments such as "READY=1"."""
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as s:
                s.setblocking(False)
                s.sendto("\n".join(lines).encode(), self._address)
        except OSError:
            return

    def loading(self, stage: str, fraction: float, allow_s: float = 120.0) -> None:
        """Progress while starting; asks for `allow_s` more, so that only a start that stands still times out."""
        self.send(f"STATUS=loading: {stage} {fraction:.0%}", f"EXTEND_TIMEOUT_USEC={int(allow_s * 1e6)}")

    def ready(self, status: str) -> None:
        """The service answers."""
        self.send("READY=1", f"STATUS={status}")

    def stopping(self, status: str, allow_s: float) -> None:
        """The service drains and will be gone within `allow_s`."""
        self.send("STOPPING=1", f"STATUS={status}", f"EXTEND_TIMEOUT_USEC={int(allow_s * 1e6)}")

    def alive(self) -> None:
        """One watchdog beat."""
        self.send("WATCHDOG=1")
