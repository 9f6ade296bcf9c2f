"""Messages about a run to its receivers: a POST of JSON, or a command that gets it on its input.

The launcher starts ``launch.py --notify`` beside it for a message, so that a receiver that does not
answer cannot delay the run. It sends nothing while ``deploykit notify --follow`` is alive on the
machine that submitted: that one knows the cause and the fix.

Each message goes to a receiver once: whoever sends it first claims a file in ``notified/`` of the
run folder. The control plane imports this module for the same reason.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from deploykit_node import LAUNCH, environment, log, records, signals
from deploykit_node.cluster import Cluster
from deploykit_node.environment import Environ
from deploykit_node.records import NodeExit
from deploykit_node.restart import slurm_job

FOLDER = "notified"
FOLLOWER = "follower"
"""In `FOLDER`: its time of change shows that the machine that submitted sends the messages."""
FRESH = 90.0
"""Seconds after which a follower that has not changed its file counts as gone."""
TIMEOUT = 10.0
"""Seconds for each step of a POST."""
COMMAND_TIMEOUT = 30.0
STALE = 60.0
"""Seconds after which a claim without a result counts as lost."""
_AT_END = 2.0
"""Seconds that the last message has on Slurm, which kills all processes of a job at its end."""
NEXT = {"started": "watch", "preempted": "watch", "stalled": "dump", "failed": "diagnose"}
"""The verb to use after an event; `status` after all others."""
_MAX_DISCORD = 2000
"""https://docs.discord.com/developers/resources/webhook#execute-webhook"""
_DISCORD = ("discord.com", "discordapp.com")
_TEAMS = (".webhook.office.com", ".logic.azure.com", ".api.powerplatform.com")
_MAX_COMPLAINT = 200
_MAX_STDERR = 4096


class Undelivered(Exception):
    """A receiver did not get a message. The text says why, without a token."""


class Unanswered(Undelivered):
    """A receiver has got the request and did not answer: it may act on it later."""


def identity(receiver: str | Sequence[str]) -> str:
    """A short name of a receiver as it is written, or of the command."""
    text = receiver if isinstance(receiver, str) else json.dumps(list(receiver))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def claim(run: Path, key: str, receiver: str | Sequence[str]) -> Path | None:
    """Claim the message `key` for a receiver; None if it was sent, or is being sent.

    The sender then calls `settle`.
    """
    path = _claim_file(run, key, receiver)
    if is_claimed(run, key, receiver):
        return None
    records.make_folder(path.parent)
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        if _is_held(path):
            return None
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        return claim(run, key, receiver)
    return path


def is_claimed(run: Path, key: str, receiver: str | Sequence[str]) -> bool:
    """Whether a message was sent to a receiver, or is being sent."""
    path = _claim_file(run, key, receiver)
    return _is_held(_copy(path)) or _is_held(path)


def is_settled(run: Path, key: str, receiver: str | Sequence[str]) -> bool:
    """Whether a message was or may have been sent to a receiver: nobody is still sending it."""
    path = _claim_file(run, key, receiver)
    with contextlib.suppress(OSError):
        return _copy(path).exists() or path.stat().st_size > 0
    return False


def end_key(attempt: int, *, succeeded: bool) -> str:
    """The key of the message about the end of an attempt.

    Node 0 reports a success before another node fails, which is another message.
    """
    return f"{'ended' if succeeded else 'failed'}-{attempt}"


def _claim_file(run: Path, key: str, receiver: str | Sequence[str]) -> Path:
    return run / FOLDER / f"{key}-{identity(receiver)}"


def settle(path: Path, *, sent: bool) -> None:
    """Keep the claim on a message that was or may have been sent; else withdraw it.

    Then it is sent again.
    """
    if sent:
        records.write_text(path, "sent\n")
    else:
        path.unlink(missing_ok=True)


def _copy(path: Path) -> Path:
    """The record of a sent message that the control plane fetches from a login node."""
    return path.parent.parent / records.FOLDER / f"notified-{path.name}.json"


def _is_held(path: Path) -> bool:
    try:
        status = path.stat()
    except OSError:
        return False
    return status.st_size > 0 or time.time() - status.st_mtime < STALE


def resolved(receiver: str, env: Environ) -> str:
    """The address behind a ``secret:`` reference. Raises Undelivered."""
    if not receiver.startswith("secret:"):
        return receiver
    try:
        return environment.resolve(receiver, env).strip()
    except environment.Unresolved as error:
        raise Undelivered(f"{receiver}: {error}") from None


def is_web(address: str) -> bool:
    """Whether an address gets a POST."""
    return address.startswith(("https://", "http://"))


def post(address: str, message: Mapping[str, Any]) -> None:
    """POST a message as JSON. Raises Undelivered.

    A redirect is an error: a redirected POST becomes a GET, and another host would get the token.
    """
    import urllib.error
    import urllib.request  # takes 5 MB, and the launcher only starts this program

    class NoRedirect(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *_: Any, **__: Any) -> None:
            return None

    headers = {"Content-Type": "application/json", "User-Agent": "deploykit"}
    try:
        data = json.dumps(body(address, message)).encode()
        request = urllib.request.Request(address, data, headers)  # noqa: S310 - is_web
        opener = urllib.request.build_opener(NoRedirect)
        with opener.open(request, timeout=TIMEOUT):
            return
    except urllib.error.HTTPError as error:
        error.close()
        raise Undelivered(f"HTTP {error.code} {error.reason}") from None
    except urllib.error.URLError as error:
        why = error.reason
        text = getattr(why, "strerror", None) or type(why).__name__
        if isinstance(why, TimeoutError):
            text = f"no connection within {TIMEOUT:g} s"
        raise Undelivered(text) from None
    except TimeoutError:  # of the answer: others come as URLError
        raise Unanswered(
            f"no response within {TIMEOUT:g} s; the message may have arrived"
        ) from None
    except Exception as error:  # noqa: BLE001 - its text may contain the address
        raise Undelivered(type(error).__name__) from None


def body(address: str, message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The JSON that an address expects: a chat service only its text, which nobody is called by."""
    from urllib.parse import urlsplit

    host = urlsplit(address).hostname or ""
    text = str(message["text"])
    if host == "hooks.slack.com":
        for sign, escaped in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
            text = text.replace(sign, escaped)
        return {"text": text}
    if host in _DISCORD:
        return {"content": text[:_MAX_DISCORD], "allowed_mentions": {"parse": []}}
    if host.endswith(_TEAMS):
        block = {"type": "TextBlock", "wrap": True, "text": text.replace("\n", "\n\n")}
        card = {"type": "AdaptiveCard", "version": "1.2", "body": [block]}
        kind = "application/vnd.microsoft.card.adaptive"
        return {"type": "message", "attachments": [{"contentType": kind, "content": card}]}
    return message


def run_command(command: Sequence[str], message: Mapping[str, Any], env: Environ) -> None:
    """Run a command with the message as JSON on its input. Raises Undelivered."""
    try:
        with tempfile.TemporaryFile() as stderr:  # a pipe would stay open in its children
            done = subprocess.run(
                list(command),
                input=json.dumps(message).encode(),
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                env=env,
                timeout=COMMAND_TIMEOUT,
                check=False,
            )
            stderr.seek(max(0, stderr.seek(0, os.SEEK_END) - _MAX_STDERR))
            printed = stderr.read()
    except subprocess.TimeoutExpired:  # it may have sent the message
        raise Unanswered(f"{command[0]} timed out after {COMMAND_TIMEOUT:g} s") from None
    except OSError as error:
        raise Undelivered(f"{command[0]}: {error.strerror}") from None
    if done.returncode:
        complaint = printed.decode(errors="replace").strip()[-_MAX_COMPLAINT:]
        how = records.how(signals.shell_code(done.returncode))
        raise Undelivered(f"{command[0]} {how}: {complaint}")


# --- on the node


def main(env: Environ) -> None:
    """Send the message on standard input; the program ``launch.py --notify``."""
    order = json.load(sys.stdin)
    run, key, message = Path(order["folder"]), order["key"], order["message"]
    threads = [
        threading.Thread(target=_deliver, args=(run, key, receiver, message, env))
        for receiver in (*order["to"], *filter(None, [order["command"]]))
    ]
    for thread in threads:
        thread.start()


def _deliver(
    run: Path, key: str, receiver: str | list[str], message: Mapping[str, Any], env: Environ
) -> None:
    """Send a message to one receiver, unless another process does; a failure is left to others."""
    with contextlib.suppress(Undelivered, OSError):
        address = resolved(receiver, env) if isinstance(receiver, str) else ""
        if isinstance(receiver, str) and not is_web(address):
            return
        path = claim(run, key, receiver)
        if path is None:
            return
        sent = False
        try:
            if isinstance(receiver, str):
                post(address, message)
            else:
                run_command(receiver, message, env)
            sent = True
        except Unanswered:
            sent = True  # a second request might be a second message
        finally:
            settle(path, sent=sent)
        records.write(_copy(path), {"sent": log.now()})


class Notifier:
    """What the launcher of a node reports to the receivers of its run."""

    def __init__(self, env: Mapping[str, str]) -> None:
        settings = json.loads(env.get(environment.NOTIFY) or "{}")
        self._env = dict(env)
        self._events = frozenset(settings.get("events", ()))
        self._order = {name: settings.get(name, []) for name in ("to", "command")}
        self._attempt = records.attempt(env)
        self._began = time.time()
        self._stalled = self._has_failed = False
        self.children: list[subprocess.Popen[bytes]] = []
        """The programs that send, which are not waited for."""
        folder = env.get("DEPLOYKIT_RUN_DIR", "")
        if not folder:
            self._events = frozenset()
        self._run = Path(folder)

    def begin(self, here: Cluster) -> None:
        """Report the start, or the restart after a preemption."""
        with self._harmless(here):
            self._begin(here)

    def look(self, here: Cluster) -> None:
        """Report once in an attempt that all nodes have stalled."""
        with self._harmless(here):
            self._look(here)

    def end(self, here: Cluster, end: NodeExit, *, capped: bool) -> None:
        """Report the end of the run; node 0 a success, any node a failure."""
        with self._harmless(here):
            self._end(here, end, capped=capped)

    @contextlib.contextmanager
    def _harmless(self, here: Cluster) -> Iterator[None]:
        """Log an error, once: no message is worth a training run."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - as above
            if not self._has_failed:
                log.say(here.node, f"a notification could not be sent: {error!r}")
            self._has_failed = True

    def _begin(self, here: Cluster) -> None:
        if here.number:
            return
        if not self._attempt:
            self._send("started", "started-0", "running", "")
        elif slurm_job.why_restarted(self._env, self._attempt) == slurm_job.PREEMPTION:
            self._send("preempted", f"preempted-{self._attempt}", "running", "it was restarted")

    def _look(self, here: Cluster) -> None:
        if "stalled" not in self._events or self._stalled:
            return
        folder = self._run / records.FOLDER
        record = records.read(folder / f"stall-{here.number}.json")
        if record is not None:
            # names alone, as nodes are many
            self._stalled = sum(1 for _ in folder.glob("stall-*.json")) >= len(here.hosts)
        if record is not None and self._stalled:
            kept = f"; the stacks are in stacks/{record['dump']}" if record["dump"] else ""
            reason = f"no progress for {_span(record['seconds'])}{kept}"
            self._send("stalled", f"stalled-{self._attempt}", "running", reason)

    def _end(self, here: Cluster, end: NodeExit, *, capped: bool) -> None:
        if end.code == 0 and here.number:
            return
        state = "failed" if end.code else "succeeded"
        event = "cap" if capped and "cap" in self._events else state
        key = end_key(self._attempt, succeeded=not end.code)
        child = self._send(event, key, state, end.reason if end.code else "")
        if child is not None and "SLURM_JOB_ID" in self._env:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_AT_END)

    def _send(self, event: str, key: str, state: str, cause: str) -> subprocess.Popen[bytes] | None:
        """Start the program that sends a message; None if none is wanted, or another sends it."""
        if event not in self._events or self._is_followed():
            return None
        order = {**self._order, "folder": str(self._run), "key": key}
        order["message"] = self._message(event, state, cause)
        try:
            child = subprocess.Popen(
                [sys.executable, LAUNCH, "--notify"],
                env=self._env,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            with child.stdin or contextlib.nullcontext() as pipe:
                if pipe is not None:
                    pipe.write(json.dumps(order).encode())
        except OSError:
            return None
        self.children.append(child)
        return child

    def _is_followed(self) -> bool:
        try:
            return time.time() - (self._run / FOLDER / FOLLOWER).stat().st_mtime < FRESH
        except OSError:
            return False

    def _message(self, event: str, state: str, cause: str) -> dict[str, Any]:
        """The message with what a node knows: `diagnose` knows the fix."""
        run, seconds, where = self._env.get("DEPLOYKIT_RUN", ""), time.time() - self._began, ""
        if event in {"failed", "cap"} and (error := self._error()):
            where = str(error.get("root", "")).partition(" at ")[2]
            how, *more = cause.split("; ")
            cause = "; ".join([f"{how}: {error.get('error', '')}", *more])
        known = {"run": run, "state": state, "event": event, "seconds": round(seconds, 1)}
        known |= {"cost": self._cost(seconds), "cause": cause, "where": where, "fix": ""}
        return message({**known, "next": f"deploykit {NEXT.get(event, 'status')} {run}"})

    def _error(self) -> dict[str, Any] | None:
        """Why the first rank failed in the last round."""
        with contextlib.suppress(OSError):  # the reason is enough
            files = (self._run / records.FOLDER).glob(f"error-{self._attempt}.*.json")
            newest = max(files, key=lambda path: path.stat().st_mtime, default=None)
            return records.read(newest) if newest else None
        return None

    def _cost(self, seconds: float) -> str | None:
        """What the run has cost; None if that is unknown, as after a restart."""
        price = records.read(self._run / "price.json")
        if price is None or self._attempt:
            return None
        with contextlib.suppress(LookupError, TypeError, ValueError):
            return f"{float(price['hourly']) * seconds / 3600:.2f} {price['currency']}"
        return None


def message(known: Mapping[str, Any]) -> dict[str, Any]:
    """What is known of an event, with its `text` for people."""
    about = [text for text in (_span(known["seconds"]), known["cost"]) if text]
    about = [] if known["event"] in {"started", "preempted"} else about
    what = {
        "test": "can send you messages",
        "started": "has started",
        "stalled": "is making no progress",
        "preempted": "was preempted",
    }
    what |= {"lost": "is lost: its job no longer exists"}
    what |= {"cap": "was stopped at its cost cap"}
    what |= {"budget": "was refused: it may exceed its budget"}
    lines = [f"{known['run']} {what.get(known['event'], known['event'])}"]
    lines[0] += f" ({', '.join(about)})" if about else ""
    label = "Result" if known["event"] == "succeeded" else "Cause"
    named = ((label, "cause"), ("At", "where"), ("Fix", "fix"), ("Next", "next"))
    lines += [f"{name}: {known[key].splitlines()[0]}" for name, key in named if known[key]]
    text = "\n".join(lines)
    return {**known, "text": "".join(c if c.isprintable() or c == "\n" else "?" for c in text)}


def _span(seconds: float | None) -> str:
    """``2h 14m``, ``14m 5s``, ``5s``."""
    if seconds is None:
        return ""
    hours, rest = divmod(int(seconds), 3600)
    minutes, rest = divmod(rest, 60)
    if hours:
        return f"{hours}h {minutes}m"
    return f"{minutes}m {rest}s" if minutes else f"{rest}s"
