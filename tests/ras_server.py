"""A server that answers as NCCL's RAS service does, with reports in the formats of its releases.

https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/ras.html
"""

from __future__ import annotations

import contextlib
import socketserver
import threading

HEAD = """\
Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      4          8            1         32       32

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
"""
REPORTS = {
    "healthy": f"""{HEAD}    0         8         4         1         4        32   RUNNING      OK

Errors
======

Warnings
========

""",
    "2.24": f"""{HEAD}    0         1         4       7-8        32        32   RUNNING  INCOMPLETE

Errors
======

INCOMPLETE
  Missing communicator data from 1 job process
  Process 811 on node 10.0.0.3 managing GPU 5

#0-0 (aa11bb22cc33dd44) INCOMPLETE
  Missing communicator data from 1 rank
  The missing rank: 21

Warnings
========

TIMEOUT
  Encountered 2 communication timeouts while gathering communicator data

""",
    "dead": f"""{HEAD}    0         1         1         8         8         8   RUNNING  INCOMPLETE

Errors
======

DEAD
  1 job process is considered dead (unreachable via the RAS network)
  Process 811 on node 10.0.0.3 managing GPU 5

#0-0 (aa11bb22cc33dd44) INCOMPLETE
  Missing communicator data from 2 ranks
  Rank 3 -- GPU 3 managed by process 809 on node 10.0.0.3
  Rank 5 -- GPU 5 managed by process 811 on node 10.0.0.3

""",
    "counts": f"""{HEAD}    0         1         1         4         4         4   RUNNING  MISMATCH
    1         1         1         2         2         2  FINALIZE  MISMATCH

Errors
======

Warnings
========

#0-0 (aa11bb22cc33dd44) MISMATCH
  Communicator ranks have different AllReduce operation counts
  3 ranks have launched up to operation 120
  Rank 2 has launched up to operation 119 -- GPU 2 managed by process 703 on node 10.0.0.1

  Communicator ranks have different Broadcast operation counts
  2 ranks have not launched any operations
  Rank 0 -- GPU 0 managed by process 701 on node 10.0.0.1
  Rank 1 -- GPU 1 managed by process 702 on node 10.0.0.1
  2 ranks have launched up to operation 4

#1-0 (ee55) MISMATCH
  Communicator ranks have different status
  Rank 0 has status FINALIZE -- GPU 0 managed by process 701 on node 10.0.0.1
  Rank 1 has status RUNNING -- GPU 1 managed by process 702 on node 10.0.0.1

""",
}


class Server(socketserver.ThreadingTCPServer):
    """Answers every client with a report; `silent` times it accepts one and says nothing."""

    allow_reuse_address = daemon_threads = True

    def __init__(self, report, silent=0):
        super().__init__(("127.0.0.1", 0), Client)
        self.report, self.silent, self.commands = report, silent, []

    @property
    def address(self):
        return f"127.0.0.1:{self.server_address[1]}"


class Client(socketserver.StreamRequestHandler):
    """A client's commands, one a line, without regard to case."""

    def handle(self):
        if self.server.silent:
            self.server.silent -= 1
            self.rfile.read()
            return
        for line in self.rfile:
            command = line.decode().strip().lower()
            self.server.commands.append(command)
            if command.startswith("client protocol "):
                self.wfile.write(b"SERVER PROTOCOL 2\n")
            elif command.startswith("timeout "):
                self.wfile.write(b"OK\n")
            elif command in ("status", "verbose status"):
                self.wfile.write(self.server.report.encode())
                return
            else:
                self.wfile.write(f"ERROR: Unknown command {command}\n".encode())


@contextlib.contextmanager
def serving(report, silent=0):
    """A server in a thread."""
    with Server(report, silent) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()
