"""Package the model of a run: its weights, the code that loads them, and a description.

A package is a folder as SageMaker's containers expect it: the weights, and in ``code/`` the source
of the run with an `inference.py`. The control plane never imports torch, so the weights are read by
``entrypoints/package.py``, with the Python and the source of the run. Then the model is loaded once
as a server would, and only a package that loads is given its name.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import re
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath

from deploykit.bundle import archive as bundle
from deploykit.bundle import node_plane
from deploykit.job import environments
from deploykit.job.decode import read_json
from deploykit.job.model import Environment
from deploykit.lib import paths, render, shell
from deploykit.lib.errors import CannotPackage, NotFound, UsageError
from deploykit.lib.version import __version__
from deploykit.observe.metrics.points import Point
from deploykit.run import fetch, rerun
from deploykit.run.fetch import Listed, Listing
from deploykit.run.metrics import RunMetrics
from deploykit.run.registry import Run

MANIFEST = "manifest.json"
PACKAGES = "packages"
"""In a run folder: what `deploy` has packaged."""
CODE = "code"
INFERENCE = "inference.py"
ARCHIVE = "model.tar.gz"
_FORMAT = 1
_TIMEOUT = 3600
"""Seconds in which the weights must be written, and the model loaded."""
_TRACEBACK = 20
"""Lines before the last one that an error shows."""
_FINGERPRINT = 8
_MAX_METRICS = 30
"""Metrics in a model card."""
_STEP = re.compile(r"step-(\d{8})")
"""A checkpoint of the reference trainer; it is complete with its ``whole.json``."""
_NUMBER = re.compile(r"(\d+)\D*\Z")
_WEIGHTS = re.compile(r"(model|pytorch_model).*\.(safetensors|bin)(\.index\.json)?")
_PRETRAINED = "config.json"
_TRAINING_STATE = re.compile(
    r"(optimizer|scheduler|scaler|rng_state.*|training_args|random_.*)\.\w+"
)
"""Files of a Hugging Face checkpoint that only training needs."""
_PROGRAMS = ("package.py", "handler.py", INFERENCE)
_NO_INFERENCE = (
    "only checkpoints of the reference trainer and folders of save_pretrained can be loaded "
    f"without your own code; run `deploykit init --inference`, fill in {INFERENCE}, and pass it "
    "with --inference"
)


@dataclass(frozen=True)
class Checkpoint:
    """The files of a run that become a package."""

    name: str
    part: str
    files: Sequence[Listed]
    here: bool
    """Whether they are on this machine."""
    kind: str
    """``trainer``, ``transformers``, or ``own`` for those that only `inference.py` can read."""

    @property
    def label(self) -> str:
        """Its name; ``output`` if it is not in a folder of its own there."""
        return self.part if self.name == "." else self.name

    @property
    def size(self) -> int:
        return sum(each.file.size for each in self.files)

    def folder(self, row: Run, scratch: Path) -> Path:
        """Where the files are, which are downloaded to `scratch` unless they are here."""
        if self.here:
            return fetch.folder_here(row, self.part) / self.name
        fetch.fetch(row, self.files, (), scratch)
        return scratch / self.part / self.name


def choose(row: Run, wanted: str | None) -> Checkpoint:
    """The checkpoint `wanted`: a step, ``best``, for other scripts its file or folder, or by
    default what the run ended with.

    Raises NotFound if there is none, UsageError for another word.
    """
    listing = fetch.listing(row, ("checkpoints", "output"))
    steps = _trainer_steps(listing)
    if wanted is not None and wanted != "best" and not wanted.isdecimal():
        named = _below(listing, "checkpoints", wanted, "own")
        if steps or not named.files:
            expected = "expected `best` or a step such as 120"
            if not steps:
                expected = "expected a step such as 120, or a file or folder among the checkpoints"
            raise UsageError(f"--checkpoint {wanted}: {expected}")
        return named
    if steps:
        step = _step(row, listing, steps, wanted)
        return _below(listing, "checkpoints", f"step-{step:08d}", "trainer")
    if wanted == "best":
        message = "--checkpoint best works only for the reference trainer"
        raise UsageError(message, hint="choose a step, such as 120")
    folders = list(_pretrained_folders(listing))
    if folders:
        numbered = {int(m[1]): each for each in folders if (m := _NUMBER.search(each[1]))}
        if wanted is not None and int(wanted) not in numbered:
            raise _no_step(row, wanted, numbered)
        finished = [each for each in folders if not re.search(r"checkpoint-\d+\Z", each[1])]
        last = _outermost_newest(listing, finished) if finished else numbered[max(numbered)]
        part, name = last if wanted is None else numbered[int(wanted)]
        return _below(listing, part, name, "transformers")
    return _of_a_script(row, listing, wanted)


def _trainer_steps(listing: Listing) -> list[int]:
    names = (PurePosixPath(each.file.name) for each in listing.files if each.part == "checkpoints")
    matches = (_STEP.fullmatch(str(path.parent)) for path in names if path.name == "whole.json")
    return sorted(int(match[1]) for match in matches if match)


def _step(row: Run, listing: Listing, steps: Sequence[int], wanted: str | None) -> int:
    """The step to package. Of a run that ``--patience`` stopped it is the best one."""
    if wanted is not None and wanted != "best":
        if int(wanted) not in steps:
            raise _no_step(row, wanted, steps)
        return int(wanted)
    latest = _below(listing, "checkpoints", f"step-{steps[-1]:08d}", "trainer")
    manifests = [each for each in latest.files if each.file.name.endswith("/whole.json")]
    with tempfile.TemporaryDirectory() as scratch:
        only = Checkpoint(latest.name, latest.part, manifests, latest.here, latest.kind)
        try:
            manifest = only.folder(row, Path(scratch)) / "whole.json"
            progress = json.loads(manifest.read_bytes())["progress"]
            best, stopped = int(progress["best_step"]), bool(progress.get("out_of_patience"))
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise CannotPackage(
                f"checkpoint {latest.name} of {row.run} has a damaged whole.json: {error}",
                hint=f"choose another: {', '.join(map(str, steps))}",
            ) from error
    if wanted == "best" and not best:
        raise NotFound(
            f"{row.run} has no best checkpoint, because it measured no validation loss",
            hint=f"checkpoints: {', '.join(map(str, steps))}",
        )
    step = best if best and (wanted == "best" or stopped) else steps[-1]
    if step not in steps:
        raise _no_step(row, str(step), steps)
    return step


def _no_step(row: Run, wanted: str, steps: Collection[int]) -> NotFound:
    known = ", ".join(map(str, sorted(steps)))
    none = "no checkpoint has a step in its name; omit --checkpoint"
    hint = f"checkpoints: {known}" if known else none
    return NotFound(f"{row.run} has no checkpoint {wanted}", hint=hint)


def _below(listing: Listing, part: str, name: str, kind: str) -> Checkpoint:
    files = [
        each
        for each in listing.files
        if each.part == part
        and (PurePosixPath(name) in PurePosixPath(each.file.name).parents or each.file.name == name)
    ]
    if kind == "transformers":
        files = [
            each
            for each in files
            if PurePosixPath(each.file.name).parent == PurePosixPath(name)
            and not _TRAINING_STATE.fullmatch(PurePosixPath(each.file.name).name)
        ]
    return Checkpoint(name, part, files, part in listing.here, kind)


def _pretrained_folders(listing: Listing) -> Iterator[tuple[str, str]]:
    """Part and name of each folder that `save_pretrained` wrote."""
    names: dict[tuple[str, str], set[str]] = {}
    for each in listing.files:
        path = PurePosixPath(each.file.name)
        names.setdefault((each.part, str(path.parent)), set()).add(path.name)
    for (part, folder), files in sorted(names.items(), key=lambda item: item[0][0] != "output"):
        if _PRETRAINED in files and any(map(_WEIGHTS.fullmatch, files)):
            yield part, folder


def _outermost_newest(listing: Listing, folders: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """The folder that was written last; of the results, if any are, and in no other of them."""
    first = folders[0][0]
    names = {PurePosixPath(name) for part, name in folders if part == first}
    written = {str(name): 0.0 for name in names if names.isdisjoint(name.parents)}
    for each in listing.files:
        folder = str(PurePosixPath(each.file.name).parent)
        if each.part == first and folder in written:
            written[folder] = max(written[folder], each.file.modified)
    return first, max(sorted(written), key=written.__getitem__)


def _of_a_script(row: Run, listing: Listing, wanted: str | None) -> Checkpoint:
    """The newest file or folder among the checkpoints, else `model/` of the results.

    If any contain weights, as their names tell, it is one of these, and not a log beside them. Of
    the files that were collected from the working folder, it is one as well, and not all of them.
    """
    paths.add_node_plane()
    from deploykit_node.outputs import KEPT
    from deploykit_node.restart.checkpoints import ENDINGS

    files = [
        each.file
        for each in listing.files
        if each.part == "checkpoints" and not each.file.name.startswith(".")
    ]
    weights = [file for file in files if file.name.endswith(ENDINGS)]
    newest: dict[str, float] = {}
    for file in weights or files:
        path = PurePosixPath(file.name)
        top = path.parts[0]
        if top == KEPT:
            top = str(path.parent if path.suffix == ".distcp" else path)
        newest[top] = max(newest.get(top, 0), file.modified)
    if wanted is not None:
        steps = {name: int(m[1]) for name in newest if (m := _NUMBER.search(name))}
        named = [name for name, step in steps.items() if step == int(wanted)]
        if not named:
            raise _no_step(row, wanted, set(steps.values()))
        if len(named) > 1:
            raise UsageError(
                f"--checkpoint {wanted}: {row.run} has {', '.join(sorted(named))}",
                hint=f"choose one of them: --checkpoint {min(named)}",
            )
        return _below(listing, "checkpoints", named[0], "own")
    if newest:
        return _below(listing, "checkpoints", max(newest, key=newest.__getitem__), "own")
    model = _below(listing, "output", "model", "own")
    if not model.files:
        raise NotFound(
            f"{row.run} has no checkpoints, and no folder model/ in its results",
            hint="a script saves checkpoints in the folder DEPLOYKIT_CHECKPOINT_DIR",
        )
    return model


@dataclass(frozen=True)
class Export:
    """What is packaged, from what, and where it goes. Nothing has been written."""

    row: Run
    checkpoint: Checkpoint
    to: str
    python: str
    inference: Path | None = None
    """An `inference.py` in place of the run's own."""

    def write(self) -> None:
        """Write the package; a failure leaves nothing behind. Raises CannotPackage."""
        remote = paths.is_address(self.to)
        target = Path(self.to).absolute()
        beside = paths.private_folder(paths.bundles()) if remote else target.parent
        with paths.scratch(beside) as scratch:
            package = scratch / "package"
            _build(self, package, scratch)
            archive = scratch / ARCHIVE
            if remote:
                write_archive(package, archive)
                _upload(self, archive, package)
            elif target.name.endswith(".tar.gz"):
                write_archive(package, archive)
                _rename(archive, target)
            else:
                _rename(package, target)

    def write_once(self) -> None:
        """As `write`, unless the package is there, or another command writes it meanwhile.

        Its own `inference.py` is that of the next package, too.
        """
        target = Path(self.to)
        paths.private_folder(target.parent)
        if not target.exists():
            try:
                self.write()
            except UsageError:
                if not target.exists():
                    raise
        if self.inference is not None:
            paths.write(target.with_name(INFERENCE), self.inference.read_bytes())


def prepare(
    row: Run,
    to: str,
    *,
    checkpoint: str | None = None,
    python: str | None = None,
    inference: Path | None = None,
) -> Export:
    """What `write` will do. Queries the target for its files unless they are here.

    Raises NotFound for a run without a checkpoint or source, UsageError if `to` exists.
    """
    if paths.is_address(to) and not to.startswith("s3://"):
        raise UsageError(f"{to}: expected a folder, a .tar.gz file or an s3:// prefix")
    if not paths.is_address(to):
        _refuse_existing(Path(to))
        if not (parent := Path(to).absolute().parent).is_dir():
            raise UsageError(f"the folder {parent} does not exist")
    if inference is not None and not inference.is_file():
        raise NotFound(f"{inference} not found")
    rerun.kept_source(row)
    return Export(row, choose(row, checkpoint), to, python or _python(row), inference)


def in_run_folder(
    row: Run, *, checkpoint: str | None, python: str | None, inference: Path | None
) -> Export:
    """As `prepare`, for the package of a checkpoint that `deploy` keeps in the run folder.

    A checkpoint that has changed, or another `inference.py`, is another package. Without
    `inference`, it is the one that the last package was given, if any.
    """
    folder = Path(row.folder, PACKAGES)
    if inference is None and (folder / INFERENCE).is_file():
        inference = folder / INFERENCE
    unused = str(folder.with_name(f"{PACKAGES}-new"))
    export = prepare(row, unused, checkpoint=checkpoint, python=python, inference=inference)
    name = export.checkpoint.label.replace("/", "-").lstrip(".")
    return replace(export, to=str(folder / f"{name}-{_fingerprint(export)}"))


def _fingerprint(export: Export) -> str:
    """Changes with the files of the checkpoint and with `--inference`."""
    files = sorted(
        (each.path, each.file.size, each.file.modified, each.file.etag)
        for each in export.checkpoint.files
    )
    own = export.inference.read_bytes() if export.inference else b""
    return hashlib.sha256(json.dumps(files).encode() + own).hexdigest()[:_FINGERPRINT]


def _path(row: Run) -> str:
    """The folder of the run's script within its source, which Python imports from."""
    script = (row.job_data().get("entrypoint") or {}).get("script") or ""
    return PurePosixPath(script).parent.as_posix()


def _python(row: Run) -> str:
    """The Python of the run, if it is on this machine, else that of deploykit."""
    job = row.job_data()
    chosen = (job.get("local") or {}).get("python")
    if chosen:
        return paths.expanded(chosen)
    keys = job.get("environment") or {}
    environment = Environment(keys.get("conda"), keys.get("venv"), keys.get("uv"))
    return environments.python(environment) or sys.executable


def _build(export: Export, package: Path, scratch: Path) -> None:
    """Write the package to a new folder, and load it. Raises CannotPackage if that fails."""
    row, checkpoint, code = export.row, export.checkpoint, package / CODE
    bundle.unpack(rerun.kept_source(row), code)
    shutil.rmtree(code / node_plane.FOLDER, ignore_errors=True)
    source = checkpoint.folder(row, scratch / "fetched")
    if checkpoint.kind == "trainer":
        _write_weights(export, source, package, scratch)
    else:
        _copy(checkpoint, source, package)
    _write_inference(export, package)
    versions = _loaded(export, package, scratch)
    _write_card(export, package, versions)
    _write_manifest(export, package, versions)


def _write_weights(export: Export, checkpoint: Path, package: Path, scratch: Path) -> None:
    """Run ``package.py`` with the code of the run, in which it is not found by its own imports."""
    path = _path(export.row)
    code = (package / CODE).absolute()
    search = os.pathsep.join(dict.fromkeys([str(code / path), str(code)]))
    argv = [_program(scratch, "package.py"), str(checkpoint), "--output", str(package.absolute())]
    _run(export, [*argv, "--path", path], code, {"PYTHONPATH": search})


def _copy(checkpoint: Checkpoint, source: Path, package: Path) -> None:
    for each in checkpoint.files:
        name = PurePosixPath(each.file.name).relative_to(checkpoint.name)
        if source.is_file():
            shutil.copyfile(source, package / source.name)
        else:
            (package / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, package / name)


def _write_inference(export: Export, package: Path) -> None:
    """Put `inference.py` into `code/`, unless the source has one, and list what it requires."""
    code = package / CODE
    own = [code / INFERENCE, code / _path(export.row) / INFERENCE]
    chosen = export.inference or next(filter(Path.is_file, own), None)
    needs = []
    if chosen is None and _library(package) == "transformers":
        chosen = paths.shipped("templates") / "inference_transformers.py"
        needs = ["transformers", "safetensors"]
    elif chosen is None and export.checkpoint.kind == "trainer":
        chosen = paths.shipped("entrypoints") / INFERENCE
        needs = ["safetensors"]
    if chosen is None:
        raise CannotPackage(
            f"{export.row.run} has no {INFERENCE} to load {export.checkpoint.label}",
            hint=_NO_INFERENCE,
        )
    if own[1] != own[0] and chosen in (own[1], export.inference):  # its neighbours come first
        shutil.copytree(own[1].parent, code, dirs_exist_ok=True)
    if chosen != code / INFERENCE:
        shutil.copyfile(chosen, code / INFERENCE)
    requirements = code / "requirements.txt"
    lines = requirements.read_text().splitlines() if requirements.is_file() else []
    listed = {re.split(r"[^\w-]", line, maxsplit=1)[0].lower() for line in lines}
    lines += [name for name in needs if name not in listed]
    requirements.write_text("".join(f"{line}\n" for line in lines))


def _library(package: Path) -> str:
    """The library that reads the weights, as far as `config.json` says; empty if it does not."""
    try:
        config = read_json(package / _PRETRAINED)
    except FileNotFoundError:
        return "pytorch"
    except (OSError, ValueError):
        return ""
    known = isinstance(config, dict) and {"model_type", "transformers_version"} & config.keys()
    return "transformers" if known else ""


def _loaded(export: Export, package: Path, scratch: Path) -> dict[str, str]:
    """Load the model as a server would, and return the versions of the packages that it uses."""
    argv = [_program(scratch, "handler.py"), str(package.absolute())]
    printed = _run(export, argv, package, {})
    return dict(json.loads(printed.splitlines()[-1]))


def _program(scratch: Path, name: str) -> str:
    """Copy the node plane's programs to a folder without the trainer, and return one's path."""
    folder = scratch / "program"
    if not folder.exists():
        folder.mkdir()
        for each in _PROGRAMS:
            shutil.copyfile(paths.shipped("entrypoints") / each, folder / each)
    return str(folder / name)


def _run(export: Export, argv: Sequence[str], folder: Path, variables: Mapping[str, str]) -> str:
    """Run a program with the Python of the run, and return what it prints.

    Raises CannotPackage with its last line, and the lines before it as a hint.
    """
    own = {name: value for name, value in os.environ.items() if not name.startswith("DEPLOYKIT_")}
    own.pop("PYTHONPATH", None)
    env = {**own, "PYTHONDONTWRITEBYTECODE": "1", **variables}
    done = shell.run([export.python, *argv], cwd=folder, env=env, timeout=_TIMEOUT)
    if done.code == 0:
        return done.out
    *before, last = done.err.rstrip().splitlines() or [f"exit code {done.code}"]
    where = f"loaded with {export.python}; choose another with --python"
    raise CannotPackage(
        f"cannot rebuild the model of {export.row.run}: {last}",
        hint="\n".join([where, *before[-_TRACEBACK:]]),
    )


def _write_card(export: Export, package: Path, versions: Mapping[str, str]) -> None:
    """Write the model card, README.md."""
    row = export.row
    job = row.job_data()
    entry = job.get("entrypoint") or {}
    program = ["-m", entry["module"]] if entry.get("module") else [entry.get("script") or ""]
    described = package / "model.json"
    text = render.markdown(
        "package/README.md.j2",
        library=_library(package),
        version=__version__,
        run=row.run,
        backend=row.backend,
        created=_time(row.created),
        checkpoint=export.checkpoint.label,
        commit=row.revision or "",
        changed=Path(row.folder, "uncommitted.diff").is_file(),
        bundle=row.bundle[:12],
        command=[*program, *map(str, entry.get("args") or ())],
        data={name: data_path(channel) for name, channel in (job.get("data") or {}).items()},
        model=json.loads(described.read_text()) if described.is_file() else None,
        versions=", ".join(f"{name} {number}" for name, number in versions.items()),
        metrics=results(row)[:_MAX_METRICS],
    )
    (package / "README.md").write_text(text, encoding="utf-8")


def data_path(channel: str | Mapping[str, str]) -> str:
    return channel if isinstance(channel, str) else channel["path"]


def results(row: Run) -> list[Point]:
    """The last value of each metric; only those of evaluations, if there are any."""
    points = list(RunMetrics(row).whole())
    stepped = [point for point in points if point.step is not None]  # else from lines of the log
    last = {point.name: point for point in stepped or points}
    evaluated = [name for name in last if re.match(r"(test|val|eval|best)", name)]
    return [last[name] for name in sorted(evaluated or last)]


def _time(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%FT%TZ}"


def _write_manifest(export: Export, package: Path, versions: Mapping[str, str]) -> None:
    """Write what the package comes from, and the size and SHA-256 of each other file."""
    row = export.row
    manifest = {
        "format": _FORMAT,
        "run": row.run,
        "backend": row.backend,
        "checkpoint": export.checkpoint.label,
        "kind": export.checkpoint.kind,
        "commit": row.revision,
        "bundle": row.bundle,
        "submitted": _time(row.created),
        "deploykit": __version__,
        "versions": versions,
        "files": checksums(package),
    }
    (package / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def checksums(package: Path) -> dict[str, tuple[int, str]]:
    """The size and SHA-256 of each file of a package, by its path."""
    return {
        path.relative_to(package).as_posix(): (path.stat().st_size, _sha256(path))
        for path in _files(package)
    }


def _files(package: Path) -> list[Path]:
    """All files of a package but the byte code that a server leaves in it."""
    files = (path for path in package.rglob("*") if path.is_file())
    return sorted(path for path in files if path.parent.name != "__pycache__")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_archive(package: Path, archive: Path) -> None:
    """Write a package as SageMaker's ``model.tar.gz``; the same package gives the same bytes."""
    with (
        archive.open("wb") as file,
        gzip.GzipFile("", "wb", 1, file, mtime=0) as compressed,
        tarfile.open(mode="w|", fileobj=compressed, format=tarfile.PAX_FORMAT) as tar,
    ):
        for path in _files(package):
            info = tarfile.TarInfo(path.relative_to(package).as_posix())
            info.mode, info.size = 0o644, path.stat().st_size
            with path.open("rb") as content:
                tar.addfile(info, content)


@contextlib.contextmanager
def archived(package: Path) -> Iterator[Path]:
    """The archive of a package, which is deleted after the context."""
    beside = paths.private_folder(paths.bundles())
    with paths.scratch(beside) as scratch:
        archive = scratch / ARCHIVE
        write_archive(package, archive)
        yield archive


def _refuse_existing(target: Path) -> None:
    if os.path.lexists(target):
        raise UsageError(
            f"{target} already exists", hint="choose another folder, or remove this one"
        )


def _rename(finished: Path, target: Path) -> None:
    """Give a finished folder or file its name, unless another has taken it meanwhile."""
    _refuse_existing(target)
    finished.rename(target)


def _upload(export: Export, archive: Path, package: Path) -> None:
    """Upload the archive, the card and at last the manifest below the prefix.

    Raises UsageError if there is a package already, and what `aws.errors` raises.
    """
    from deploykit.backends.sagemaker import aws  # only where S3 is used

    section = export.row.job_data().get("sagemaker") or {}
    region = section.get("region") or os.environ.get("AWS_REGION") or "us-east-1"
    credentials = aws.Credentials(section.get("profile"), section.get("assume_role"))
    bucket, _, prefix = export.to.removeprefix("s3://").partition("/")
    prefix = f"{prefix.rstrip('/')}/" if prefix else ""
    owner = section.get("bucket_owner") if bucket == section.get("bucket") else None
    owner = owner or aws.account(region, credentials)
    client = aws.client("s3", region, credentials)
    owned = {"ExpectedBucketOwner": owner}
    with aws.errors(region):
        taken = client.list_objects_v2(Bucket=bucket, Prefix=prefix + MANIFEST, MaxKeys=1, **owned)
        if taken.get("KeyCount"):
            raise UsageError(
                f"{export.to} already contains a package", hint="choose another prefix"
            )
        for path in (archive, package / "README.md", package / MANIFEST):
            extra = {**owned, "ChecksumAlgorithm": "SHA256"}
            client.upload_file(str(path), bucket, prefix + path.name, ExtraArgs=extra)
