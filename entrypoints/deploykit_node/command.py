"""The command: options for torchrun, then the user's program and its exact arguments."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploykit_node.cluster import BadCommand, BadEnvironment, Cluster, Environ, Rank

USAGE = "Usage: launch.py torchrun --nnodes=N --nproc-per-node=N -- train.py ARGUMENTS"
PIECE = "deploykit_argv_"
"""Prefix of SageMaker hyperparameters, numbered from 0, that hold the command as JSON in pieces."""


@dataclass(frozen=True)
class Command:
    """The command in two parts. `options` is empty below our own torchrun.

    `plain`: one process on each node, without torchrun, whose program starts the others itself.
    """

    options: tuple[str, ...]
    program: tuple[str, ...]
    plain: bool = False

    def check_nodes(self, here: Cluster) -> None:
        """Check that the cluster has as many nodes as the command says.

        Raises BadCommand if that is not a number, and BadEnvironment if the numbers differ.
        """
        least, most = self.nodes()
        if not least <= len(here.hosts) <= most:
            wanted = f"{least} to {most}" if least < most else least
            raise BadEnvironment(
                f"The command asks for {wanted} node(s), but {here.launcher} started the job on "
                f"{len(here.hosts)}: {', '.join(here.hosts)}. Make the two numbers equal."
            )

    @property
    def elastic(self) -> bool:
        """Whether the number of nodes may change while the job runs."""
        return ":" in self._size()[0]

    def nodes(self) -> tuple[int, int]:
        """The fewest and the most nodes. Raises BadCommand if these are no numbers."""
        text = self._size()[0] or "1"
        low, _, high = text.partition(":")
        if not (low.isdecimal() and (high or low).isdecimal()):
            raise BadCommand(f"--nnodes={text} must be a number or a range MIN:MAX. {USAGE}")
        return int(low), int(high or low)

    def with_nodes(self, count: int) -> Command:
        """The same command for a fixed number of nodes."""
        options = [word for word in self.options if not word.startswith("--nnodes")]
        return Command((f"--nnodes={count}", *options), self.program)

    def check_world(self, rank: Rank) -> None:
        """Check that the launcher above has started as many ranks as the command says.

        Raises BadEnvironment if it has not.
        """
        nodes, processes = self._size()
        if not (nodes.isdecimal() and processes.isdecimal()):  # 1:4, gpu, or not given
            return
        if int(nodes) * int(processes) != rank.world_size:
            raise BadEnvironment(
                f"The job asks for {nodes} node(s) x {processes} processes = "
                f"{int(nodes) * int(processes)} ranks, but {rank.launcher} started "
                f"{rank.world_size}: training would be silently wrong. Check the numbers of nodes "
                "and processes."
            )

    def processes(self) -> int:
        """Ranks on each node; 1, torchrun's default, if the command gives no number."""
        _, text = self._size()
        return int(text) if text.isdecimal() else 1

    def _size(self) -> tuple[str, str]:
        """The nodes and the processes of each as torchrun's options state them; empty if not."""
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--nnodes", default="")
        parser.add_argument("--nproc-per-node", "--nproc_per_node", default="")
        values = parser.parse_known_args(self.options)[0]
        return values.nnodes, values.nproc_per_node


def read(argv: Sequence[str], env: Environ) -> Command:
    """The command in `argv`, or in the hyperparameters on SageMaker.

    Raises BadCommand if it is incomplete or the program does not exist.
    """
    words = _words(argv, env)
    options, plain = [], words[:1] == ["python"]
    if plain or words[:1] == ["torchrun"]:
        if "--" not in words:
            raise BadCommand(
                f"`--` is missing between {words[0]}'s options and the program. {USAGE}"
            )
        cut = words.index("--")
        options, words = words[1:cut], words[cut:]
    if words[:1] == ["--"]:  # some versions of torchrun's parser have removed it
        words = words[1:]
    _check_program(words)
    return Command(tuple(options), tuple(words), plain)


def environment(argv: Sequence[str], env: Environ) -> tuple[dict[str, Any] | None, list[str]]:
    """The environment to make first, as `packages` describes it, and the rest of the command.

    None if the command names none. Raises BadCommand.
    """
    words = _words(argv, env)
    if words[:1] != ["environment"]:
        return None, words
    return json.loads(words[1]), words[2:]


def _words(argv: Sequence[str], env: Environ) -> list[str]:
    return _from_hyperparameters(env) if f"--{PIECE}0" in argv else list(argv)


def _from_hyperparameters(env: Environ) -> list[str]:
    try:
        hyperparameters = json.loads(env["SM_HPS"])
        count = sum(name.startswith(PIECE) for name in hyperparameters)
        words = json.loads("".join(hyperparameters[f"{PIECE}{at}"] for at in range(count)))
    except (KeyError, TypeError, ValueError) as error:
        raise BadCommand(
            f"The hyperparameters {PIECE}0, {PIECE}1, ... contain no valid command ({error!r}). "
            "Submit the job with deploykit, which sets them."
        ) from None
    return [str(word) for word in words]


def _check_program(words: Sequence[str]) -> None:
    if not words or words == ["-m"]:
        raise BadCommand(f"No program is given. {USAGE}")
    program = words[0]
    if program == "-m":
        return
    if program.startswith("-"):
        raise BadCommand(f"The program {program} starts with a dash. Write it as ./{program}")
    if not Path(program).is_file():
        raise BadCommand(
            f"File {program} not found in {Path.cwd()}. "
            "Check entrypoint.script, and check that the bundle includes the file."
        )
