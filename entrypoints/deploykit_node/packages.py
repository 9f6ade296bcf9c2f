"""The environment that each node makes with uv: from a uv.lock, or from the header of a script.

The launcher's command begins with ``environment`` and what to make, as JSON:

    {"project": "."}         the folder of pyproject.toml and uv.lock, in the source
    {"script": "train.py"}   a script with a ``# /// script`` block (PEP 723)

and beside it ``options``, which name the project's extras and groups for uv; ``python``, the
versions of Python that the script accepts; ``indexes``, the package indexes that it names;
``keep``, packages of the Python that starts the launcher which stay as they are; and ``uv``, what
pip installs on a node without uv.

uv writes the lock as a pylock.toml for this node, and an environment is made once for each content
of that file, on the node's own disk. If PyTorch is kept, or the lock has none, the environment
lies on top of the launcher's Python and sees its packages.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from deploykit_node import LAUNCH, cluster, command, environment, log, records
from deploykit_node.cluster import BadEnvironment
from deploykit_node.environment import Environ

VARIABLE = "DEPLOYKIT_ENVIRONMENT"
"""The folder of the environment, for what runs in it."""
PYLOCK = "pylock.toml"
"""In ``exit_records/``: the versions of this run, from its first node or from an earlier run."""
_SOURCE = Path(LAUNCH).parents[1]
_PLACES = (".local/bin", ".cargo/bin")
"""Folders of the home folder, besides those of PATH, in which uv's installer leaves it."""
_LAST = 12
"""Lines of a failed command that are shown."""
_ON_TOP = "zz-deploykit.pth"
"""In an environment that lies on top of another one: what makes the packages there visible."""
_INFO = re.compile(r"(?P<name>[A-Za-z0-9._]+)-(?P<version>[^-]+)\.(dist-info|egg-info)")
"""https://packaging.python.org/en/latest/specifications/recording-installed-packages/."""
_LOCAL = re.compile(r"^(directory|archive) = |^\[packages\.(directory|archive)\]", re.MULTILINE)
"""A package that is built from a folder, whose content the lock does not name."""
_CODEARTIFACT = re.compile(
    r"https://(?:[^@/\s\"']*@)?((?P<domain>[a-z0-9-]+)-(?P<owner>[0-9]{12})\.d\.codeartifact"
    r"\.(?P<region>[a-z0-9-]+)\.amazonaws\.com)"
)


def prepare(argv: Sequence[str], env: Environ) -> tuple[str | None, list[str]]:
    """Make the environment that `argv` asks for, and put it into `env`.

    Returns its Python, None without one, and the rest of the command. Raises BadEnvironment.
    """
    wanted, rest = command.environment(argv, env)
    if wanted is None:
        return None, rest
    instead = "set TMPDIR under env in the job file to a folder of your own."
    folder = records.own_folder(Path(tempfile.gettempdir()), instead)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the other ranks of this node wait here
        python = _made_for_run(folder, wanted, env)
    _activate(env, Path(python).parents[1], wanted)
    return python, rest


def _made_for_run(folder: Path, wanted: Mapping[str, Any], env: Environ) -> str:
    """The Python of the environment of this run, which all its ranks and restarts use."""
    name = json.dumps([env.get("DEPLOYKIT_RUN"), env.get("DEPLOYKIT_RUN_DIR"), wanted])
    kept = folder / f"run-{hashlib.sha256(name.encode()).hexdigest()[:32]}"
    with contextlib.suppress(OSError):
        python = kept.read_text()
        if os.access(python, os.X_OK):
            return python
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        python = _Making(folder, Path(scratch), wanted, env).python()
    kept.write_text(python)
    return python


class _Making:
    """One environment: its lock, and its packages."""

    def __init__(
        self, folder: Path, scratch: Path, wanted: Mapping[str, Any], env: Environ
    ) -> None:
        self._folder, self._scratch, self._wanted, self._env = folder, scratch, wanted, env
        self._node = cluster.node_number(env)
        self._what = wanted.get("script") or str(Path(wanted.get("project", "."), "uv.lock"))
        self._place = _SOURCE / wanted.get("project", ".")
        self._settings = self._uv_settings()
        self._uv = self._find_uv()

    def python(self) -> str:
        """Make the environment unless the node has it. Raises BadEnvironment."""
        keep = [name for name in self._wanted.get("keep", ()) if _installed(name)]
        lock = self._lock(keep)
        content = lock.read_text(encoding="utf-8")
        has_torch = re.search(r'(?m)^name = "torch"$', content) is not None
        below = _package_folders() if keep or (not has_torch and _installed("torch")) else []
        python = sys.executable if below else self._find_python()
        parts = [content, python, *below, *([str(_SOURCE)] if _LOCAL.search(content) else [])]
        name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
        target = self._folder / "environments" / name
        complete, made = target / "complete", target / "bin/python"
        if complete.exists():
            log.say(self._node, f"environment: reusing the packages of {self._what} in {target}")
            return str(made)
        stay = f", and keeping {', '.join(keep)} of {sys.executable}" if keep else ""
        into = f"the packages of {self._what} into {target}"
        log.say(self._node, f"environment: installing {into} with uv{stay}")
        self._run("venv", "--clear", "--python", python, str(target))
        self._run("pip", "install", "--python", str(made), "-r", str(lock))
        _put_on_top_of(below, target)
        complete.touch()
        return str(made)

    def _lock(self, keep: Sequence[str]) -> Path:
        """Write the versions to install, without those to keep.

        Nodes that see the run folder all take the versions that the first of them has put there.
        """
        folder = records.folder(self._env)
        if folder is None:
            self._export(self._scratch / PYLOCK, keep)
            return self._scratch / PYLOCK
        shared = folder / PYLOCK
        if not shared.is_file():
            own = folder / f"pylock.node-{self._node}.toml"  # uv accepts no other names
            self._export(own, keep)
            with contextlib.suppress(FileExistsError):
                shared.hardlink_to(own)
            own.unlink()
        return shared

    def _export(self, path: Path, keep: Sequence[str]) -> None:
        script = self._wanted.get("script")
        frozen = not script or (_SOURCE / f"{script}.lock").is_file()
        what = ["--script", str(_SOURCE / script)] if script else ["--no-emit-project"]
        what += self._wanted.get("options", ())
        pruned = [word for name in keep for word in ("--prune", name)]
        options = [*(["--frozen"] if frozen else []), *what, *pruned, "--no-header"]
        self._run("export", "--format", PYLOCK, *options, "--output-file", str(path))

    def _find_python(self) -> str:
        """A Python of the versions that the project or the script accepts; uv may download one."""
        versions = self._wanted.get("python")
        if self._wanted.get("script") and not versions:
            return sys.executable
        words = ["--system", *([versions] if versions else [])]
        try:
            return self._run("python", "find", *words).strip()
        except BadEnvironment:
            self._run("python", "install", *([versions] if versions else []))
            return self._run("python", "find", *words).strip()

    def _uv_settings(self) -> Environ:
        """The variables for uv: the run's, its secrets for indexes, and access to CodeArtifact."""
        env = self._env
        secret = json.loads(env.get(environment.SECRETS) or "{}")
        own = {name: value for name, value in secret.items() if name.startswith("UV_")}
        resolved = environment.secrets({**env, environment.SECRETS: json.dumps(own)})
        indexes = " ".join(f"{name}={url}" for name, url in self._wanted.get("indexes", {}).items())
        settings = {"UV_NO_PROGRESS": "1", **env, **resolved}
        settings.pop("VIRTUAL_ENV", None)
        if indexes:
            settings.setdefault("UV_INDEX", indexes)
        hosts = _codeartifact_hosts(self._place, self._wanted.get("script"), settings)
        if hosts:
            settings["NETRC"] = str(_netrc(hosts, self._scratch / "netrc", settings))
        return settings

    def _find_uv(self) -> str:
        """The uv of this node, or the one that pip installs into the folder of environments."""
        places = [str(Path.home() / place) for place in _PLACES]
        path = os.pathsep.join([self._env.get("PATH", ""), *places])
        program = shutil.which("uv", path=path)
        own = self._folder / "uv"
        if program or (own / "bin/uv").exists():
            return program or str(own / "bin/uv")
        wanted, new = self._wanted["uv"], self._scratch / "uv"
        log.say(self._node, f"environment: uv is not on this node; installing {wanted} with pip")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(new), wanted]
        if self._call(pip).returncode:
            raise BadEnvironment(
                f"The environment of {self._what} could not be created on this node: uv is not on "
                f"PATH, and `{sys.executable} -m pip install {wanted}` failed. Install uv on the "
                "nodes, or load its module with environment.modules."
            )
        new.rename(own)
        return str(own / "bin/uv")

    def _run(self, *words: str) -> str:
        """Run uv and return what it prints. Raises BadEnvironment."""
        done = self._call([self._uv, *words])
        if done.returncode:
            errors = re.findall(r"(?m)^error: (.+)$", done.stderr)
            why = f": {errors[0].rstrip('.,:')}" if errors else ""
            step = " ".join(itertools.takewhile(lambda word: not word.startswith("-"), words))
            raise BadEnvironment(
                f"The environment of {self._what} could not be created on this node: "
                f"`uv {step}` exited with code {done.returncode}{why}."
            )
        return done.stdout

    def _call(self, argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run a command in the project's folder; show the last lines of one that fails."""
        done = subprocess.run(
            argv,
            cwd=self._place,
            env=self._settings,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            print(*done.stderr.splitlines()[-_LAST:], sep="\n", file=sys.stderr, flush=True)
        return done


def versions(python: str | None = None) -> dict[str, str]:
    """The version of each package that the program can import, by its name.

    `python` is that of an environment that `prepare` has made. Only names of folders are read: the
    metadata of a thousand packages on a network disk would take seconds.
    """
    folders = [path for path in sys.path if path]
    if python is not None:
        own = [*Path(python).parents[1].glob("lib/python3*/site-packages")]
        below = _package_folders() if (own[0] / _ON_TOP).is_file() else []
        folders = [*map(str, own), *below]
    by_name: dict[str, str] = {}
    for folder in folders:
        with contextlib.suppress(OSError):
            for entry in sorted(Path(folder).iterdir()):
                if match := _INFO.fullmatch(entry.name):
                    by_name.setdefault(match["name"].lower().replace("_", "-"), match["version"])
    return dict(sorted(by_name.items()))


def record(env: Environ) -> None:
    """Write the `versions` into the run folder."""
    folder, known = records.folder(env), records.PackagesRecord(packages=versions())
    if folder is not None:
        with contextlib.suppress(OSError):  # only a record
            records.write(folder / "packages.json", known)


def sentence(python: str | None) -> str:
    """The `versions` as a line of the log, for runs without a run folder."""
    named = (f"{name}=={version}" for name, version in versions(python).items())
    return f"packages: {' '.join(named)}"


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _package_folders() -> list[str]:
    """The folders of packages of the Python that runs this."""
    return [path for path in sys.path if Path(path).name in {"site-packages", "dist-packages"}]


def _put_on_top_of(below: Sequence[str], target: Path) -> None:
    """Let the environment see the packages in the folders `below`, after its own.

    ``--system-site-packages`` does not see those of another virtual environment.
    """
    (own,) = target.glob("lib/python3*/site-packages")
    lines = [f"import site; site.addsitedir({folder!r})\n" for folder in below]
    if lines:
        (own / _ON_TOP).write_text("".join(lines))


def _activate(env: Environ, folder: Path, wanted: Mapping[str, Any]) -> None:
    """Put the environment first. SageMaker's toolkit has named the image's packages before it."""
    env["VIRTUAL_ENV"] = env[VARIABLE] = str(folder)
    env["PATH"] = f"{folder / 'bin'}{os.pathsep}{env.get('PATH', os.defpath)}"
    env.pop("PYTHONHOME", None)
    source = _SOURCE / wanted.get("project", ".") / "src"
    known = [str(source)] if "project" in wanted and source.is_dir() else []
    known += filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    base = {*_package_folders(), *_library_folders()}
    kept = [path for path in known if path not in base]
    env.pop("PYTHONPATH", None)
    env |= {"PYTHONPATH": os.pathsep.join(kept)} if kept else {}


def _library_folders() -> Iterator[str]:
    """What a Python finds without any setting."""
    return (path for path in sys.path if path.startswith((sys.prefix, sys.base_prefix)))


def _codeartifact_hosts(
    place: Path, script: str | None, settings: Environ
) -> dict[str, re.Match[str]]:
    """The repositories of AWS CodeArtifact that the project, the script or uv's variables name."""
    files = [place / script] if script else [place / "pyproject.toml", place / "uv.toml"]
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files if file.is_file()]
    texts += [value for name, value in settings.items() if name.startswith("UV_")]
    return {match[1]: match for text in texts for match in _CODEARTIFACT.finditer(text)}


def _netrc(hosts: Mapping[str, re.Match[str]], path: Path, settings: Environ) -> Path:
    """A netrc file with a token for each host, from the role of this node."""
    own = Path(settings.get("NETRC") or Path.home() / ".netrc")
    lines = [own.read_text(encoding="utf-8")] if own.is_file() else []
    for host, match in hosts.items():
        token = environment.codeartifact_token(match["domain"], match["owner"], match["region"])
        lines.append(f"machine {host} login aws password {token}\n")
    with open(path, "w", encoding="utf-8", opener=records.private) as file:
        file.write("\n".join(lines))
    return path
