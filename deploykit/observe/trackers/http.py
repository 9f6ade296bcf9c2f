"""Requests of JSON to a tracker's server."""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import Callable, Mapping
from functools import partial
from http.client import HTTPException
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, NoReturn
from urllib import error, parse, request

from deploykit.job.decode import from_json
from deploykit.lib.errors import BackendUnavailable, DeploykitError, NotPermitted, TryAgain

Sign = Callable[[str, str, bytes], Mapping[str, str]]
"""Headers for a request, by its method, URL and body."""
_PATIENCE = 30.0
"""Seconds to wait for the next bytes of an answer."""
_LONGEST = 60.0
"""Seconds that a request and its answer may take in all."""
_LARGEST = 64 << 20
"""Bytes of an answer."""
_DENIED = {401, 403}
_BUSY = {408, 429, 500, 502, 503, 504}


class Refused(BackendUnavailable):
    """A request that the server refuses; `code` is the name of the error."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class Client:
    """Sends requests to one server."""

    def __init__(self, base: str, sign: Sign, context: ssl.SSLContext | None = None) -> None:
        self._base, self._sign = base, sign
        handlers: list[request.BaseHandler] = [_NoRedirect()]
        if context is not None:
            handlers.append(request.HTTPSHandler(context=context))
        self._opener = request.build_opener(*handlers)

    def get(self, path: str, **values: str) -> Any:
        """The answer to a GET. Raises Refused, NotPermitted, TryAgain or BackendUnavailable."""
        query = parse.urlencode(values, quote_via=parse.quote)
        return self._ask("GET", f"{self._base}/{path}?{query}", b"")

    def post(self, path: str, data: Mapping[str, Any]) -> Any:
        """The answer to a POST of JSON. Raises as `get`."""
        return self._ask("POST", f"{self._base}/{path}", json.dumps(data).encode())

    def _ask(self, method: str, url: str, body: bytes) -> Any:
        headers = {"Content-Type": "application/json"} if body else {}
        headers |= self._sign(method, url, body)
        message = request.Request(url, body or None, headers, method=method)  # noqa: S310 - checked
        return self._in_time(partial(self._answer, message))

    def _in_time(self, ask: Callable[[], Any]) -> Any:
        """What `ask` returns or raises. Raises TryAgain where it takes longer than `_LONGEST`.

        The time-out of a socket is that of a single read, so a thread waits that may be left alone.
        """
        done: SimpleQueue[Callable[[], Any]] = SimpleQueue()

        def work() -> None:
            try:
                answer = ask()
            except Exception as error:  # noqa: BLE001 - raised where it is waited for
                done.put(partial(_raise, error))
            else:
                done.put(lambda: answer)

        Thread(target=work, daemon=True).start()
        try:
            outcome = done.get(timeout=_LONGEST)
        except Empty:
            raise TryAgain(
                f"{self._base} did not finish its answer within {_LONGEST:g} s",
                hint="send it later with `deploykit sync`",
            ) from None
        return outcome()

    def _answer(self, message: request.Request) -> Any:
        try:
            with self._opener.open(message, timeout=_PATIENCE) as answer:
                return _decoded(self._base, answer.read(_LARGEST))
        except error.HTTPError as refusal:
            with refusal:
                raise _meaning(self._base, refusal) from refusal
        except (HTTPException, OSError, ValueError) as problem:
            reason = getattr(problem, "reason", None) or problem
            raise BackendUnavailable(
                f"{self._base} cannot be reached: {reason}",
                hint="check the address and the network; nothing is lost",
            ) from problem


def _raise(error: Exception) -> NoReturn:
    raise error


def _decoded(base: str, body: bytes) -> Any:
    try:
        return from_json(body or b"{}")
    except ValueError as problem:
        raise BackendUnavailable(f"{base} did not answer with JSON") from problem


def _meaning(base: str, refusal: error.HTTPError) -> DeploykitError:
    """The error for an answer that is none of 2xx."""
    if "Location" in refusal.headers:
        return BackendUnavailable(
            f"{base} redirects to {refusal.headers['Location']}; use that address"
        )
    try:
        data = from_json(refusal.read(_LARGEST))
    except (OSError, ValueError):
        data = {}
    data = data if isinstance(data, dict) else {}
    reason = str(data.get("message") or refusal.reason)[:500]
    message = f"{base} answered {refusal.code}: {reason}"
    if refusal.code in _DENIED:
        return NotPermitted(message, hint="check the credentials in the environment")
    if refusal.code in _BUSY:
        return TryAgain(message, hint="send it later with `deploykit sync`")
    return Refused(message, str(data.get("error_code", refusal.code)))


class _NoRedirect(request.HTTPRedirectHandler):
    """Refuses redirects, which would take credentials to another host."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Follow none."""


def tls(insecure: str, certificates: str) -> ssl.SSLContext | None:
    """How to check a server, by the variables of these names; None: as usual."""
    if os.environ.get(insecure, "").lower() in {"1", "true"}:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context
    path = os.environ.get(certificates)
    return ssl.create_default_context(cafile=path) if path else None
