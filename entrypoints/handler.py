"""Load a package of `deploykit export`, and answer requests with its `inference.py`.

    python handler.py model      # loads the model, and says what is wrong if that fails

`inference.py` has the four functions that SageMaker's PyTorch containers call too. As there,
text is passed to `input_fn` as `str`, and each function may take a context, which is None here.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import platform
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

CODE = "code"
FUNCTIONS = ("model_fn", "input_fn", "predict_fn", "output_fn")
PACKAGES = ("torch", "transformers", "safetensors", "numpy", "sklearn")
"""Those whose versions a package records, if `inference.py` imports them."""
TEXT = ("application/json", "text/csv")
JSON = "application/json"


class Answer(NamedTuple):
    """An HTTP status, and the body with its type; of an error a sentence."""

    status: int
    body: bytes
    content_type: str = JSON


class Handler:
    """The model of a package. Raises ValueError if `inference.py` lacks a function."""

    def __init__(self, package: Path) -> None:
        here = str(Path(__file__).resolve().parent)
        code = str((package / CODE).resolve())
        sys.path[:] = [code, *(path for path in sys.path if path not in (here, code))]
        self._module = importlib.import_module("inference")
        if missing := [name for name in FUNCTIONS if not hasattr(self._module, name)]:
            raise ValueError(f"{CODE}/inference.py has no function {', '.join(missing)}")
        self._model = self._call("model_fn", str(package))

    def _call(self, name: str, *arguments: Any) -> Any:
        function: Callable[..., Any] = getattr(self._module, name)
        takes_context = len(inspect.signature(function).parameters) > len(arguments)
        return function(*arguments, None) if takes_context else function(*arguments)

    def answer(self, body: bytes, content_type: str, accept: str) -> Answer:
        """Answer a request; what `input_fn` raises is an error of the client's."""
        content_type = content_type.partition(";")[0].strip().lower() or JSON
        accept = JSON if accept in ("", "*/*") else accept
        try:
            text = body.decode() if content_type in TEXT else body
            inputs = self._call("input_fn", text, content_type)
        except Exception as error:  # noqa: BLE001 - the code of the package
            return Answer(400, _sentence(error))
        try:
            prediction = self._call("predict_fn", inputs, self._model)
            output = self._call("output_fn", prediction, accept)
        except Exception as error:  # noqa: BLE001 - the code of the package
            traceback.print_exc()
            return Answer(500, _sentence(error))
        content, kind = output if isinstance(output, tuple) else (output, accept)
        return Answer(200, content.encode() if isinstance(content, str) else bytes(content), kind)


def _sentence(error: Exception) -> bytes:
    return json.dumps({"error": f"{type(error).__name__}: {error}"[:1000]}).encode()


def main() -> None:
    """Load the model of a package, and print the versions of what it imported, as JSON.

    Exits with code 1 and a sentence if that fails.
    """
    for name in [name for name in os.environ if name.startswith("DEPLOYKIT_DATA_")]:
        del os.environ[name]  # a server has no training data
    try:
        Handler(Path(sys.argv[1]))
    except Exception as error:  # noqa: BLE001 - the code of the package
        traceback.print_exc()
        sys.exit(f"{type(error).__name__}: {error}")
    versions = {name: getattr(sys.modules.get(name), "__version__", "") for name in PACKAGES}
    known = {name: str(version) for name, version in versions.items() if version}
    print(json.dumps({"python": platform.python_version(), **known}))


if __name__ == "__main__":
    main()
