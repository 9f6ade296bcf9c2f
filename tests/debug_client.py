"""An editor's side of the Debug Adapter Protocol, as far as a test needs it.

https://microsoft.github.io/debug-adapter-protocol/specification
"""

from __future__ import annotations

import json
import socket


class Editor:
    """A connection to a debugger on this machine."""

    def __init__(self, port):
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self._read = self._socket.makefile("rb")
        self._sent = 0
        self._events = []

    def ask(self, command, **arguments):
        """The body of the answer to a request."""
        self._send(command, arguments)
        while (found := self._message())["type"] != "response" or found["command"] != command:
            self._events.append(found)
        assert found["success"], found
        return found.get("body") or {}

    def attach(self, mappings, breakpoints):
        """Connect, and stop the program at the lines of each file, a path on this machine."""
        self.ask("initialize", adapterID="test", pathFormat="path")
        self._send("attach", {"pathMappings": mappings, "justMyCode": True})
        self.event("initialized")
        for path, lines in breakpoints.items():
            listed = [{"line": line} for line in lines]
            self.ask("setBreakpoints", source={"path": path}, breakpoints=listed)
        self.ask("configurationDone")

    def event(self, name):
        """Wait for an event; its body."""
        while True:
            found = self._events.pop(0) if self._events else self._message()
            if found["type"] == "event" and found["event"] == name:
                return found.get("body") or {}

    def close(self):
        self._socket.close()

    def _send(self, command, arguments):
        self._sent += 1
        request = {"seq": self._sent, "type": "request", "command": command}
        data = json.dumps({**request, "arguments": arguments}).encode()
        self._socket.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(data), data))

    def _message(self):
        size = 0
        while line := self._read.readline().strip():
            if line.lower().startswith(b"content-length:"):
                size = int(line.partition(b":")[2])
        assert size, "the debugger has hung up"
        return json.loads(self._read.read(size))
