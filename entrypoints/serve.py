"""Answer over HTTP with an exported model; what SageMaker hosting asks of a container.

    python serve.py model --port 8080
    curl localhost:8080/invocations -H 'Content-Type: application/json' -d '{"instances": [...]}'

It listens on this machine alone; `--host 0.0.0.0` has it listen to others, as a container must:

    ENTRYPOINT ["python", "serve.py", "--host", "0.0.0.0"]

`GET /ping` says 200 once the model is loaded. `POST /invocations` takes `{"instances": [...]}`, a
list of inputs in the shape of `model.json`, pixels from 0 to 16; it gives the class and the
probabilities of each. For a text model it takes `{"prompt": "...", "length": 100}` and continues
it. The contract: https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-inference-code.html
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer import weights
from trainer.chunks import open_plain
from trainer.http_messages import HTTPError
from trainer.http_server import Server, read_json
from trainer.plain_pickle import Refused
from trainer.restore import filled, outline
from trainer.tasks import normal

LARGEST_ABOUT = 2**16
"""Bytes of a `model.json`."""

Answer = Callable[[dict[str, Any]], dict[str, Any]]


def main() -> None:
    options = parse(sys.argv[1:])
    try:
        server = start(options.model, options.host, options.port)
    except (OSError, ValueError) as error:
        sys.exit(f"serve.py: error: {error}")
    print(f"serving {options.model} on {options.host}, port {server.server_port}", flush=True)
    server.serve_forever()


def start(folder: Path, host: str, port: int) -> Server:
    """A server that is bound and has its model loaded; port 0 means any free one.

    Raises OSError, and ValueError where the folder holds no model that export.py wrote.
    """
    answer = load(folder)
    routes = {
        "/ping": ("GET", lambda _request: {}),
        "/invocations": ("POST", lambda request: answer(read_json(request))),
    }
    return Server(host, port, routes)


def load(folder: Path) -> Answer:
    """The model in a folder. It comes from numbers and names alone, so nothing in it can run."""
    found = weights.read(folder / "model.safetensors")
    try:
        with open_plain(folder / "model.json") as file:
            about = json.loads(file.read(LARGEST_ABOUT))
        task, sizes = about["task"], dict(about["model"])
    except (ValueError, LookupError, TypeError, RecursionError):
        raise Refused(
            f"{folder / 'model.json'} does not describe a model: export it again"
        ) from None
    model = outline({**sizes, "task": task}, most=len(found))
    expected = {name: (value.dtype, value.shape) for name, value in model.state_dict().items()}
    if {name: (value.dtype, value.shape) for name, value in found.items()} != expected:
        raise Refused(f"the weights in {folder} are not those of the model in its model.json")
    filled(model, found)
    return Digits(model) if task == "digits" else Text(model, sizes["sequence"])


class Digits:
    """Classes of images, given as lists of pixels from 0 to 16."""

    most = 4096
    """Images of a request."""
    shape = (1, 8, 8)

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __call__(self, asked: dict[str, Any]) -> dict[str, Any]:
        with torch.no_grad():
            chances = self._model(normal(self._images(asked))).softmax(dim=1)
        return {
            "predictions": [
                {"class": int(row.argmax()), "probabilities": row.tolist()} for row in chances
            ]
        }

    def _images(self, asked: dict[str, Any]) -> torch.Tensor:
        try:
            images = torch.tensor(asked["instances"], dtype=torch.float32)
            images = images.reshape(len(images), *self.shape)
            if 0 < len(images) <= self.most and bool(((images >= 0) & (images <= 16)).all()):  # noqa: PLR2004
                return images
        except (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError):
            pass  # not numbers, too large, of another shape
        raise HTTPError(
            HTTPStatus.BAD_REQUEST,
            f'send {{"instances": [IMAGE, ...]}}, 1 to {self.most} images, each a list of shape '
            f"{list(self.shape)}, pixels from 0 to 16",
        )


class Text:
    """A prompt, continued with the likeliest byte each time: the same answer to the same prompt."""

    longest_prompt, longest = 2**16, 1000

    def __init__(self, model: nn.Module, sequence: int) -> None:
        self._model, self._sequence = model, sequence

    def __call__(self, asked: dict[str, Any]) -> dict[str, Any]:
        written, length = self._prompt(asked), asked.get("length", 100)
        with torch.no_grad():
            for _ in range(min(max(length, 0), self.longest)):
                seen = written[-self._sequence :]
                seen = b" " * (self._sequence - len(seen)) + seen
                written.append(int(self._model(torch.tensor([list(seen)]))[0, -1].argmax()))
        return {"text": written.decode(errors="replace")}

    def _prompt(self, asked: dict[str, Any]) -> bytearray:
        prompt, length = asked.get("prompt"), asked.get("length", 100)
        if type(prompt) is str and type(length) is int and len(prompt) <= self.longest_prompt:
            try:
                return bytearray(prompt.encode())
            except UnicodeEncodeError:
                pass  # half of a character
        raise HTTPError(
            HTTPStatus.BAD_REQUEST,
            'send {"prompt": "some text", "length": 100}, the text of at most '
            f"{self.longest_prompt} characters",
        )


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Serve an exported model over HTTP.")
    parser.add_argument("model", type=Path, nargs="?", default=Path("/opt/ml/model"))
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen at; 0.0.0.0 for all, as in a container. Default: %(default)s",
    )
    port = os.environ.get("SAGEMAKER_BIND_TO_PORT", "8080")
    parser.add_argument("--port", type=int, default=port, help="default: %(default)s")
    if arguments[-1:] == ["serve"]:  # how SageMaker starts every container
        arguments = arguments[:-1]
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
