"""The command: options for torchrun, then the user's program and its exact arguments."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster import BadCommand, BadEnvironment, Cluster, Rank

USAGE = "Expected: launch.py torchrun --nnodes=N --nproc-per-node=N -- train.py ARGUMENTS"
PIECE = "deploykit_argv_"
"""SageMaker's hyperparameters of this name and a number hold pieces of the command as JSON."""


@dataclass(frozen=True)
class Command:
    """What to run. `options` is empty below our own torchrun, which has had them."""

    options: tuple[str, ...]
    program: tuple[str, ...]

    def check_nodes(self, here: Cluster) -> None:
        """The cluster must have as many nodes as the command says."""
        nodes = self._asked().nnodes or "1"
        low, _, high = nodes.partition(":")
        if not (low.isdecimal() and (high or low).isdecimal()):
            raise BadCommand(f"--nnodes={nodes} is no number of nodes. {USAGE}")
        if not int(low) <= len(here.hosts) <= int(high or low):
            raise BadEnvironment(
                f"The command asks for {nodes} node(s), but {here.launcher} gives this job "
                f"{len(here.hosts)}: {', '.join(here.hosts)}. Make the two numbers equal."
            )

    def check_world(self, me: Rank) -> None:
        """The launcher above must have started as many ranks as the command says."""
        asked = self._asked()
        nodes, processes = asked.nnodes or "", asked.nproc_per_node or ""
        if not (nodes.isdecimal() and processes.isdecimal()):  # 1:4, gpu, or nothing asked
            return
        if int(nodes) * int(processes) != me.world_size:
            raise BadEnvironment(
                f"The job asks for {nodes} node(s) x {processes} processes = "
                f"{int(nodes) * int(processes)} ranks, but {me.launcher} started {me.world_size}: "
                "training would be silently wrong. Check the numbers of nodes and of processes."
            )

    def processes(self) -> int:
        """Ranks on each node, as far as the command says; torchrun's own default is 1."""
        asked = self._asked().nproc_per_node or ""
        return int(asked) if asked.isdecimal() else 1

    def _asked(self) -> argparse.Namespace:
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--nnodes")
        parser.add_argument("--nproc-per-node", "--nproc_per_node")
        return parser.parse_known_args(self.options)[0]


def read(argv: Sequence[str], env: Mapping[str, str]) -> Command:
    """Read the command from `argv`, or on SageMaker from its hyperparameters."""
    words = _from_hyperparameters(env) if f"--{PIECE}0" in argv else list(argv)
    options = []
    if words[:1] == ["torchrun"]:
        if "--" not in words:
            raise BadCommand(f"There is no -- between torchrun's options and the program. {USAGE}")
        cut = words.index("--")
        options, words = words[1:cut], words[cut:]
    if words[:1] == ["--"]:  # torchrun's own parser takes it away
        words = words[1:]
    _check_program(words)
    return Command(tuple(options), tuple(words))


def _from_hyperparameters(env: Mapping[str, str]) -> list[str]:
    try:
        given = json.loads(env["SM_HPS"])
        count = sum(name.startswith(PIECE) for name in given)
        words = json.loads("".join(given[f"{PIECE}{at}"] for at in range(count)))
    except (KeyError, TypeError, ValueError) as error:
        raise BadCommand(
            f"The hyperparameters {PIECE}0, {PIECE}1, ... hold no command ({error!r}). "
            "Submit the job with deploykit, which writes them."
        ) from None
    return [str(word) for word in words]


def _check_program(words: Sequence[str]) -> None:
    if not words or words == ["-m"]:
        raise BadCommand(f"There is no program to run. {USAGE}")
    program = words[0]
    if program == "-m":
        return
    if program.startswith("-"):
        raise BadCommand(f"The program {program} starts with a dash. Write it ./{program}")
    if not Path(program).is_file():
        raise BadCommand(
            f"There is no file {program} in {Path.cwd()}. "
            "Check entrypoint.script, and that the bundle does not leave the file out."
        )
