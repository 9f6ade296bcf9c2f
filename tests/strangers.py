"""Another user of this machine, for attacks; and the modes of what a run leaves."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import traceback
from pathlib import Path

import pytest

STRANGER = 65534
"""The user and group `nobody`."""


def as_stranger(attack, *, group=STRANGER):
    """Run `attack()` in a child process of another user; returns whether it succeeded.

    With `group`, as a member of that group.
    """
    if os.getuid():
        pytest.skip("only root can become another user")
    child = os.fork()
    if not child:
        code = 1
        try:
            os.setgroups([])
            os.setgid(group)
            os.setuid(STRANGER)
            attack()
            code = 0
        except PermissionError:
            code = 2
        except BaseException:  # noqa: BLE001 - it must not come back into the tests
            traceback.print_exc()
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code != 1, "the attack itself is broken"
    return code == 0


@pytest.fixture
def open_place():
    """A folder that everybody may enter; those of pytest are closed."""
    folder = Path(tempfile.mkdtemp(prefix="open-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def modes(folder):
    """The mode of each folder and file, by its path in `folder`; links have none of their own."""
    found = {".": stat.S_IMODE(folder.stat().st_mode)}
    for path in sorted(folder.rglob("*")):
        if not path.is_symlink():
            found[str(path.relative_to(folder))] = stat.S_IMODE(path.stat().st_mode)
    return found


def too_wide(found):
    """The modes that are open to other users."""
    return {path: f"{mode:04o}" for path, mode in found.items() if mode & 0o077}
