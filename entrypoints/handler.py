"""Load a package of `deploykit export`, and answer requests with its `inference.py`.

    python handler.py model      # loads the model, and reports any error

`inference.py` defines the same four functions as for SageMaker's PyTorch containers. As there, text
is passed to `input_fn` as `str`, and each function can take a context, which is None here. To
answer requests in batches, a fifth one, `predict_batch_fn`, receives a list of `input_fn` results
and returns one prediction per entry.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import platform
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

CODE = "code"
FUNCTIONS = ("model_fn", "input_fn", "predict_fn", "output_fn")
BATCHED = "predict_batch_fn"
PACKAGES = ("torch", "transformers", "safetensors", "numpy", "sklearn")
"""Those whose versions a package records, if `inference.py` imports them."""
TEXT = ("application/json", "text/csv")
JSON = "application/json"
_SHAPES = re.compile(
    r"\b(shapes?|sizes?|dim(ension)?s?|channels|features|elements|\dD input)\b"
    r"|index out of range in self"
)
"""Words by which torch, numpy and scikit-learn refuse inputs of another shape than a model's."""
_OF_SHAPES = (RuntimeError, ValueError, IndexError, AssertionError)
"""Not their subclasses: torch uses those for CUDA errors and for running out of memory."""


class Request(NamedTuple):
    """A body, its type, and the type of the answer that the client accepts."""

    body: bytes
    content_type: str
    accept: str


class Answer(NamedTuple):
    """An HTTP status, and the body with its type; of an error a sentence."""

    status: int
    body: bytes
    content_type: str = JSON


class Handler:
    """The model of a package. Raises ValueError if `inference.py` lacks a function.

    `is_batched`: it must have `predict_batch_fn` too.
    """

    def __init__(self, package: Path, *, is_batched: bool = False) -> None:
        here = str(Path(__file__).resolve().parent)
        code = str((package / CODE).resolve())
        sys.path[:] = [code, *(path for path in sys.path if path not in (here, code))]
        self._module = importlib.import_module("inference")
        needed = (*FUNCTIONS, BATCHED) if is_batched else FUNCTIONS
        if missing := [name for name in needed if not hasattr(self._module, name)]:
            raise ValueError(f"{CODE}/inference.py has no function {', '.join(missing)}")
        self._model = self._call("model_fn", str(package))

    def _call(self, name: str, *arguments: Any) -> Any:
        function: Callable[..., Any] = getattr(self._module, name)
        takes_context = len(inspect.signature(function).parameters) > len(arguments)
        return function(*arguments, None) if takes_context else function(*arguments)

    def answers(
        self, requests: Sequence[Request], alone: Callable[[], object] = lambda: None
    ) -> list[Answer]:
        """Answer requests, several together.

        What `input_fn` raises is an error of the client's, and so is a wrong shape in `predict_fn`.
        Calls `alone` before it predicts one by one what it could not predict together.
        """
        read = [self._read(request) for request in requests]
        inputs_only = [each for each in read if not isinstance(each, Answer)]
        predictions = iter(self._predict(inputs_only, alone))
        return [
            inputs if isinstance(inputs, Answer) else self._write(next(predictions), request)
            for inputs, request in zip(read, requests, strict=True)
        ]

    def _read(self, request: Request) -> Any:
        """The inputs of a request, or the answer to one that cannot be read."""
        content_type = request.content_type.partition(";")[0].strip().lower() or JSON
        try:
            body = request.body.decode() if content_type in TEXT else request.body
            return self._call("input_fn", body, content_type)
        except Exception as error:  # noqa: BLE001 - the code of the package
            return Answer(400, _sentence(error))

    def _predict(self, inputs: list[Any], alone: Callable[[], object]) -> list[Any]:
        """The prediction for each of the inputs, or the answer if there is none.

        If they cannot be predicted together, each is alone: one may be of another shape, or wrong.
        """
        if len(inputs) > 1:
            try:
                predictions = list(self._call(BATCHED, inputs, self._model))
                if len(predictions) == len(inputs):
                    return predictions
                message = (
                    f"{BATCHED} returned {len(predictions)} predictions for {len(inputs)} inputs"
                )
                print(message, file=sys.stderr, flush=True)
            except Exception:  # noqa: BLE001 - the code of the package
                traceback.print_exc()
            alone()
        return [self._checked("predict_fn", each, self._model) for each in inputs]

    def _write(self, prediction: Any, request: Request) -> Answer:
        """The answer with a prediction."""
        accept = JSON if request.accept in ("", "*/*") else request.accept
        output = prediction
        if not isinstance(prediction, Answer):
            output = self._checked("output_fn", prediction, accept)
        if isinstance(output, Answer):
            return output
        content, kind = output if isinstance(output, tuple) else (output, accept)
        return Answer(200, content.encode() if isinstance(content, str) else bytes(content), kind)

    def _checked(self, name: str, *arguments: Any) -> Any:
        """What a function returns, or the answer if it raises."""
        try:
            return self._call(name, *arguments)
        except Exception as error:  # noqa: BLE001 - the code of the package
            traceback.print_exc()
            is_client = name == "predict_fn" and is_of_shape(error)
            return Answer(400 if is_client else 500, _sentence(error))


def is_of_shape(error: Exception) -> bool:
    """Return True if a model refuses the shape of its inputs."""
    return type(error) in _OF_SHAPES and _SHAPES.search(str(error)) is not None


def _sentence(error: Exception) -> bytes:
    return json.dumps({"error": f"{type(error).__name__}: {error}"[:1000]}).encode()


def _frames(error: Exception, package: Path) -> str:
    """The traceback below the package's code, with paths in the package."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [number for number, each in enumerate(frames) if each.filename.startswith(str(package))]
    kept = [each for each in frames[own[0] if own else 0 :] if not each.filename.startswith("<")]
    return "".join(traceback.format_list(kept)).replace(f"{package}{os.sep}", "")


def main() -> None:
    """Load the model of a package, and print the versions of what it imported, as JSON.

    Exits with code 1 and a sentence if that fails.
    """
    for name in [name for name in os.environ if name.startswith("DEPLOYKIT_DATA_")]:
        del os.environ[name]  # a server has no training data
    try:
        Handler(Path(sys.argv[1]))
    except Exception as error:  # noqa: BLE001 - the code of the package
        sys.stderr.write(_frames(error, Path(sys.argv[1])))
        sys.exit(f"{type(error).__name__}: {error}")
    versions = {name: getattr(sys.modules.get(name), "__version__", "") for name in PACKAGES}
    known = {name: str(version) for name, version in versions.items() if version}
    print(json.dumps({"python": platform.python_version(), **known}))


if __name__ == "__main__":
    main()
