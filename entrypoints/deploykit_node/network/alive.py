"""A port that accepts connections while this process lives, and closes each of them at once.

Other nodes connect to it to see whether this one lives. Whoever else does fills no queue.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time


class Listener:
    """Such a port, on one address."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        self._socket.bind((address, 0))
        self._socket.listen(socket.SOMAXCONN)
        self.port: int = self._socket.getsockname()[1]
        self._closed = False
        # signals are for the main thread, which may not have blocked them yet
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        threading.Thread(target=self._accept, daemon=True).start()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _accept(self) -> None:
        while not self._closed:
            try:
                self._socket.accept()[0].close()
            except OSError:  # such as too many open files
                time.sleep(0.1)
        self._socket.close()

    def close(self) -> None:
        """Live no more, for the other nodes."""
        self._closed = True
        with contextlib.suppress(OSError):  # of macOS
            self._socket.shutdown(socket.SHUT_RDWR)  # which ends `accept`
