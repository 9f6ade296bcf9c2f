"""A run sent from a login node: what goes there, and what comes back.

Every step can be done again, and a broken connection leaves a step done or not done. Who sends
the job holds a lock there, so that whoever asks after a broken connection waits for the answer.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from deploykit import contract, private
from deploykit.backends.slurm import machine
from deploykit.backends.slurm.sent import Place
from deploykit.decode import whole
from deploykit.errors import BackendUnavailable, CannotWrite, NotPermitted, TryAgain
from deploykit.model import Handle, Plan

SITE_DEFAULTS = ("account", "partition", "qos", "reservation", "constraint")
"""Options that a site sets by variables (SBATCH_ACCOUNT) where a job file leaves them open."""
LOGS = ("logs/*.log", "tasks/*/logs/*.log")
"""In the run's folder; the second ones are those of an array."""
_SCRIPT = "plan.sh"
_MOST = 1 << 23
"""Bytes of one log that are fetched at once."""
_MOST_AT_ONCE = 1 << 26
"""Bytes of all logs that are fetched at once."""
_LOG = re.compile(r"(tasks/[0-9]{1,9}/)?logs/[^/]{1,200}\.log")
_END = re.compile(r"(tasks/[0-9]{1,9}/)?exit_records/[\w-][\w.-]{0,200}", re.ASCII)
"""Files that a login node may have written here, by their names."""
_BUSY = 75
_SHA256 = "sha256sum | cut -c1-64"
_NOT_MINE = 73
_NARROWED = "it was open to other users, and now is yours alone"
_ENTER = (
    "umask 077; mkdir -p {place} && cd {place} && {{ [ -O . ] || exit 73; }} && "
    f'case "$(stat -c %a .)" in *00) ;; *) chmod go= . && echo "{_NARROWED}" >&2;; esac'
)
"""What deploykit makes there is for its user alone, and so is the folder itself."""


def deliver(plan: Plan, place: Place) -> None:
    """The bundle, unless one of its hash is there, unpacked for the run; and the batch script."""
    home = plan.options.home
    archive = f"bundles/{plan.bundle.hash}.tar.gz"
    folder = _relative(place, home)
    folders = " ".join(shlex.quote(f"{folder}/{name}") for name in contract.FOLDERS)
    # a name proves nothing; the hash is that of the archive before compression
    same = f'[ "$(gzip -dc {archive} | {_SHA256})" = {plan.bundle.hash} ]'
    good = f"[ -O {archive} ] && gzip -tq {archive} && {same}"
    have = _do(place.host, home, f"mkdir -p bundles {folders}; if {good}; then echo yes; fi")
    if not have:
        _upload(place.host, home, archive, plan.bundle.store().read_bytes())
    # a folder that is there is whole: it gets its name last
    tar = f"tar --no-same-permissions -xzf {archive} -C {folder}/new"
    unpack = f"{tar} && mv {folder}/new {folder}/source"
    fresh = f"rm -rf {folder}/new; mkdir {folder}/new && {unpack}"
    # one that exists shows its changes at once
    more = (
        f"touch {folder}/rendezvous.json {folder}/sending; [ -d {folder}/source ] || {{ {fresh}; }}"
    )
    _upload(place.host, home, f"{folder}/{_SCRIPT}", plan.text.encode(), more)


def sbatch(plan: Plan, place: Place) -> list[str]:
    """The command that sends the script, once: done again, it gives the same answer."""
    left = [name for name in SITE_DEFAULTS if f"#SBATCH --{name}=" not in plan.text]
    kept = "|".join(f"SBATCH_{name.upper()}" for name in left)
    names = f"env | sed -n 's/^\\(SBATCH_[A-Z_]*\\)=.*/\\1/p' | grep -vxE '{kept}'"
    # the job gets the umask of sbatch, which is the user's own
    fresh = f"(umask 077; : > job.new); sbatch {_SCRIPT} > job.new && mv job.new job || exit 1"
    once = f"[ -s job ] || {{ {fresh}; }}; cat job"
    script = (
        f"cd {shlex.quote(place.folder)} && unset $({names}); "
        f"flock -w 60 sending sh -c {shlex.quote(once)}"
    )
    return machine.argv(place.host, script)


def job(place: Place) -> str | None:
    """The id of the job that was sent or has claimed the run, as the files there tell."""
    script = (
        f"cd {shlex.quote(place.folder)} 2>/dev/null || exit 0; exec 9>sending; "
        f"flock -w 60 9 || exit {_BUSY}; cat job 2>/dev/null || readlink claim; exit 0"
    )
    code, out, err = machine.run(place.host, script)
    if code:
        raise BackendUnavailable(f"{place.host}: {err.strip() or 'a submit is at work there'}")
    match = re.search(rb"(?<![0-9])[0-9]{1,18}(?![0-9])", out)
    return match[0].decode() if match else None


def fetch_ends(host: str, runs: Sequence[tuple[Handle, Place]]) -> None:
    """Bring what the nodes have left in the folders of these runs and their tasks, in one call."""
    files = "exit_records/*.json tasks/*/exit_records/*.json"  # of one line each
    loop = (
        'cd "$1" 2>/dev/null && { printf "\\t%s\\n" "$1"; '
        f"grep -sH '' {files}; [ ! -L claim ] || echo \"claim:$(readlink claim)\"; }}"
    )
    folders = " ".join(shlex.quote(place.folder) for _, place in runs)
    script = f'show() {{ {loop}; }}; for one in {folders}; do (show "$one"); done; exit 0'
    local = {place.folder: Path(handle.folder) for handle, place in runs}
    found: dict[str, dict[str, str]] = {there: {} for there in local}
    there = ""
    for line in _run(host, script).decode(errors="replace").splitlines():
        if line.startswith("\t"):
            there = line[1:]
        else:
            name, _, text = line.partition(":")
            found.setdefault(there, {})[name] = text
    for folder, path in local.items():
        _mirror(path, found[folder])


def _mirror(folder: Path, files: dict[str, str]) -> None:
    """Make `exit_records/` of a run and its tasks, and the claim, here what they are there."""
    for path in (*folder.glob("exit_records/*.json"), *folder.glob("tasks/*/exit_records/*.json")):
        if str(path.relative_to(folder)) not in files:
            path.unlink()
    for name, text in files.items():
        if name == "claim":
            if whole(text) is not None:
                with contextlib.suppress(FileExistsError):
                    (folder / "claim").symlink_to(text)
        elif _END.fullmatch(name):
            path = folder / name
            private.make(path.parent)
            private.write(path, text + "\n")


def fetch_logs(place: Place, folder: Path) -> None:
    """Append to the logs here what has been written there since the last call."""
    while _fetch_some(place, folder):
        pass


def _fetch_some(place: Place, folder: Path) -> bool:
    """One call; whether there may be more. A file that has not grown costs no process there."""
    have = "".join(
        f"{shlex.quote(str(path.relative_to(folder)))}) at={path.stat().st_size};; "
        for pattern in LOGS
        for path in folder.glob(pattern)
    )
    script = (
        f"cd {shlex.quote(place.folder)} 2>/dev/null || exit 0; "
        f"stat -c '%s %n' {' '.join(LOGS)} 2>/dev/null | {{ t=0; while read -r n f; do "
        '[ -f "$f" ] || continue; '  # half a name that holds a line end
        f'case "$f" in {have}*) at=0;; esac; n=$((n - at)); [ "$n" -gt 0 ] || continue; '
        f'[ "$n" -le {_MOST} ] || n={_MOST}; '
        f't=$((t + n)); [ "$t" -le {_MOST_AT_ONCE} ] || break; printf "%s %s\\n" "$f" "$n"; '
        'tail -c "+$((at + 1))" "$f" | head -c "$n"; done; }; exit 0'
    )
    out = _run(place.host, script)
    more = len(out) > _MOST_AT_ONCE - _MOST
    stream = io.BytesIO(out)
    while head := stream.readline():
        name, _, count = head.decode(errors="replace").rstrip("\n").rpartition(" ")
        size = whole(count)
        if size is None:
            raise BackendUnavailable(f"{place.host} does not send logs, but {name[:80]!r}")
        text = stream.read(size)
        if _LOG.fullmatch(name) and name.isprintable():
            private.make((folder / name).parent)
            with open(folder / name, "ab", opener=private.opener) as file:
                file.write(text)
        more = more or size == _MOST
    return more


def _run(host: str, script: str) -> bytes:
    """What a script printed that may be longer than a word on a command line can be."""
    _, out, _ = machine.run(host, "exec sh", script.encode())
    return out


def _relative(place: Place, home: Path) -> str:
    """The run's folder below deploykit's; a run id needs no quotes."""
    return str(Path(place.folder).relative_to(home))


def _upload(host: str, home: Path, path: str, content: bytes, then: str = "true") -> None:
    """Write a file there, whole or not at all; where it is whole, run more of the script."""
    digest = hashlib.sha256(content).hexdigest()
    check = f'[ "$(cat {path}.$$ | {_SHA256})" = {digest} ]'
    _do(host, home, f"cat > {path}.$$ && {check} && mv {path}.$$ {path} && {{ {then}; }}", content)


def _do(host: str, home: Path, script: str, data: bytes | None = None) -> bytes:
    """Run a script in deploykit's folder there, which is the user's alone; what it printed."""
    enter = _ENTER.format(place=shlex.quote(str(home)))
    code, out, err = machine.run(host, f"{enter} && {script}", data)
    if _NARROWED in err:
        logging.getLogger(__name__).warning("warning: %s: %s: %s", host, home, _NARROWED)
    if code == 0:
        return out
    if code == _NOT_MINE:
        raise CannotWrite(
            f"{host}: {home} belongs to another user, who could change what runs as you",
            hint="choose a slurm.folder of your own",
        )
    said = f"{host}: {err.strip() or f'a step of the submit ended with exit code {code}'}"
    if "denied" in err:
        raise NotPermitted(said, hint="choose a slurm.folder that you may write to")
    raise TryAgain(said, hint="submit again; if that does not help, look at slurm.folder there")
