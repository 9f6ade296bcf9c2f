"""Runs that are cancelled together."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from deploykit.backends import base as backend
from deploykit.lib.errors import NotPermitted
from deploykit.run import array as run_array


def test_each_run_is_cancelled_although_one_cannot_be(monkeypatch):
    tried = []

    def cancel(handle):
        tried.append(handle)
        if handle == "one":
            raise NotPermitted("one belongs to another user")

    monkeypatch.setattr(backend, "find", lambda _: SimpleNamespace(cancel=cancel))
    rows = [SimpleNamespace(backend="any", handle=handle) for handle in ("one", None, "two")]
    with pytest.raises(NotPermitted, match="another user"):
        run_array.cancel(rows)
    assert tried == ["one", "two"]
