"""A package as `deploykit export` writes it, without a model that could be loaded."""

from __future__ import annotations

import json

from deploykit.run import export


def package(folder, run, weights=b"weights", **more):
    """Write one to a new folder."""
    (folder / "code").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "code/inference.py").write_text("def model_fn(folder): ...\n")
    manifest = {
        "format": 1,
        "run": run,
        "backend": "local",
        "checkpoint": "step-00000034",
        "kind": "trainer",
        "commit": "0123456789abcdef0123456789abcdef01234567",
        "bundle": "b" * 64,
        "submitted": "2026-11-29T20:00:00Z",
        "deploykit": "0.2.0",
        "versions": {"torch": "2.6.0+cpu", "safetensors": "0.7.0"},
        "files": export.checksums(folder),
        **more,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder
