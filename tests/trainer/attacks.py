"""Checkpoints as an attacker would write them, with valid checksums."""

import codecs
import contextlib
import io
import json
import os
import pickle
import pickletools
import shutil
import struct
import sys
import time
import zipfile
import zlib
from itertools import pairwise
from pathlib import Path

from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

DOTTED = "_strobelight.cli_function_profiler.subprocess.Popen"
"""A path of attributes from the package torch to a function that starts programs."""
SKIPPED = "skipped checkpoint "


def skip_messages(text):
    """The lines that say that a checkpoint was skipped."""
    return [line for line in text.splitlines() if line.startswith(SKIPPED)]


def appears(path, *, tries=6000):
    """Wait until a file exists; False after a minute, or after `tries` hundredths of a second."""
    for _ in range(tries):
        if path.exists():
            return True
        time.sleep(0.01)
    return False


def update_checksums(path):
    """Write the checksums of the current files to a checkpoint's manifest."""
    whole = json.loads((path / "whole.json").read_text())
    for name in whole["files"]:
        data = (path / name).read_bytes()
        whole["files"][name] = [len(data), zlib.crc32(data)]
    write_manifest(path, whole)


def write_manifest(path, whole):
    whole.pop("crc", None)
    crc = zlib.crc32(json.dumps(whole).encode())
    (path / "whole.json").write_text(json.dumps({**whole, "crc": crc}))


def text(word):
    return b"X" + struct.pack("<I", len(word.encode())) + word.encode()


def call(module, name, *arguments):
    """Opcodes of protocol 4 that call a function with strings, in a list if it is Popen."""
    words = b"".join(map(text, arguments))
    given = b"](" + words + b"e\x85" if name.endswith("Popen") else b"(" + words + b"t"
    return text(module) + text(name) + b"\x93" + given + b"R"


def dotted_name(path, canary):
    """Metadata that starts a program through a dotted name below torch."""
    program = call("torch", DOTTED, "touch", str(canary))
    (path / ".metadata").write_bytes(b"\x80\x04" + program + b".")
    update_checksums(path)


def bytes_for_a_tensor(path, canary):
    """A tensor declared as an object, whose bytes are a pickle that starts a program."""
    table = pickle.loads((path / ".metadata").read_bytes())
    name = next(name for name in table.state_dict_metadata if name.startswith("model."))
    tensor, fake = table.state_dict_metadata[name], BytesStorageMetadata()
    fake.size, fake.properties = tensor.size, tensor.properties  # as if it were a tensor
    table.state_dict_metadata[name] = fake
    indices = [index for index in table.storage_data if index.fqn == name]
    stored = next(table.storage_data.pop(index) for index in indices)
    payload = pickle.dumps(Touch(canary))
    file = path / stored.relative_path
    stored.offset, stored.length = file.stat().st_size, len(payload)
    with file.open("ab") as end:
        end.write(payload)
    table.storage_data[MetadataIndex(name)] = stored
    (path / ".metadata").write_bytes(pickle.dumps(table))
    update_checksums(path)


ATTACKS = [dotted_name, bytes_for_a_tensor]


class Touch:
    """Creates a file when its pickle is loaded."""

    def __init__(self, canary):
        self.canary = canary

    def __reduce__(self):
        return os.system, (f"touch {self.canary}",)


def rewritten_zip(data, change):
    """A copy of an archive with each entry replaced by `change(name, content)`."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        for name in old.namelist():
            new.writestr(name, change(name, old.read(name)))
    return out.getvalue()


@contextlib.contextmanager
def watched():
    """Record dangerous audit events in the block as (name, arguments), such as imports."""
    seen = []
    for codec in ("cp437", "raw_unicode_escape"):  # otherwise imported on first use
        codecs.lookup(codec)
    _WATCHING.append(seen)
    if len(_HOOKED) == 0:
        _HOOKED.append(True)
        sys.addaudithook(_hear)  # a hook cannot be removed
    try:
        yield seen
    finally:
        _WATCHING.remove(seen)


_WATCHING, _HOOKED = [], []
_HARM = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "os.startfile")
_HARM += ("subprocess.Popen", "pickle.find_class", "exec", "compile", "import", "os.mkdir")
_HARM += ("os.remove", "os.rename", "os.rmdir", "os.link", "os.symlink", "shutil.rmtree")
_HARM += ("socket.connect", "ctypes.dlopen", "code.__new__", "marshal.loads")


def _hear(event, arguments):
    if _WATCHING and event in _HARM:
        for seen in _WATCHING:
            seen.append((event, arguments))


def mutated(random, path, canary):
    """Change a checkpoint in one or several ways, and update its checksums.

    Changes that unpickle the file themselves come first, while it is harmless.
    """
    ways = (_table_fields, _data, _table_opcodes, _table_bytes, _table_call, _whole)
    chosen = random.choices(range(len(ways)), k=random.choice((1, 1, 1, 2, 5)))
    for number in sorted(chosen):
        ways[number](random, path, canary)


def _table_bytes(random, path, _canary):
    file = path / ".metadata"
    file.write_bytes(_bytes(random, file.read_bytes()))
    update_checksums(path)


def _bytes(random, data):
    """`data` with a few bytes changed, inserted, removed, or truncated."""
    data = bytearray(data)
    for _ in range(random.choice((1, 2, 8, 30))):
        at = random.randrange(len(data) + 1)
        how = random.randrange(5)
        if how == 0:
            data[at : at + 1] = bytes([random.randrange(256)])
        elif how == 1:
            data[at:at] = random.randbytes(random.randrange(1, 9))
        elif how == 2:
            del data[at : at + random.randrange(1, 40)]
        elif how == 3:
            data[at:at] = data[random.randrange(len(data) + 1) :][: random.randrange(200)]
        elif at and random.random() < 0.2:
            del data[at:]
    return bytes(data)


_OPCODES = [opcode.code.encode("latin-1") for opcode in pickletools.opcodes]


def _operations(data):
    """The opcodes in `data`, each as bytes."""
    places = []
    with contextlib.suppress(Exception):
        places.extend(at for _, _, at in pickletools.genops(data))
    return [data[a:b] for a, b in pairwise([*places, len(data)])]


def _table_opcodes(random, path, _canary):
    """Swap, duplicate, remove or replace opcodes."""
    file = path / ".metadata"
    pieces = _operations(file.read_bytes())
    for _ in range(random.choice((1, 2, 6))):
        if not pieces:
            return
        at, other = random.randrange(len(pieces)), random.randrange(len(pieces))
        how = random.randrange(4)
        if how == 0:
            pieces[at], pieces[other] = pieces[other], pieces[at]
        elif how == 1:
            pieces[at:at] = pieces[other : other + random.randrange(1, 20)]
        elif how == 2:
            del pieces[at : at + random.randrange(1, 4)]
        else:
            pieces[at] = random.choice(_OPCODES) + random.randbytes(random.choice((0, 1, 4, 8)))
    file.write_bytes(b"".join(pieces))
    update_checksums(path)


_FUNCTIONS = [
    *(("os", "system"), ("posix", "system"), ("subprocess", "Popen"), ("os", "mkdir")),
    *(("builtins", "exec"), ("builtins", "eval"), ("builtins", "__import__"), ("io", "open")),
    *(("torch", DOTTED), ("torch", "load"), ("torch", "os.system"), ("torch", "Size.__class__")),
    *(("torch.serialization", "os.system"), ("torch.distributed.checkpoint.metadata", "os.system")),
    ("torch.serialization", "_get_layout.__globals__"),
    *(("pathlib", "PosixPath.write_text"), ("pathlib", "io.open"), ("functools", "partial")),
    *(("torch._utils", "_rebuild_tensor_v2"), ("operator", "attrgetter"), ("runpy", "run_path")),
]


def _table_call(random, path, canary):
    """Insert a call where it would be executed, and keep or drop its result."""
    file = path / ".metadata"
    pieces = _operations(file.read_bytes())
    if not pieces:
        return
    module, name = random.choice(_FUNCTIONS)
    program = f"touch {canary}" if "system" in name else f"open({str(canary)!r}, 'w')"
    words = ["touch", str(canary)] if name.endswith("Popen") else [program]
    words = [str(canary)] if name in ("mkdir", "PosixPath.write_text", "open", "io.open") else words
    made = call(module, name, *words)
    if random.random() < 0.3 and "." not in module + name:
        made = b"c" + f"{module}\n{name}\n".encode() + b"(" + text(words[-1]) + b"tR"
    pieces.insert(random.randrange(1, len(pieces) + 1), made + random.choice((b"0", b"")))
    file.write_bytes(b"".join(pieces))
    update_checksums(path)


_NUMBERS = (-1, 0, 1, 2, 3, 7, 2**31, 2**40, 2**62, 2**63, 2**64, 10**400, True, None, 0.5)
_ODD = (float("nan"), float("inf"), "1", (), [], {}, b"x", "x\x1b]52;c;aGk=\x07", "x" * 5000)
_PATHS = (
    *("../../x", "/nowhere/at/all", "", ".", "..", "\0"),
    *(".metadata", "whole.json", "__9_9.distcp"),
)


def _table_fields(random, path, _canary):
    """Change fields of the metadata objects."""
    file = path / ".metadata"
    try:
        table = pickle.loads(file.read_bytes())
        name = random.choice(list(table.state_dict_metadata))
        location = random.choice(list(table.storage_data.values()))
        tensor = table.state_dict_metadata[name]
        value = random.choice(_NUMBERS + _ODD)
        size = tuple(random.choice(_NUMBERS[:9]) for _ in range(random.randrange(5)))
        target, field, new = random.choice(
            (
                *((location, field, value) for field in ("offset", "length")),
                (location, "relative_path", random.choice(_PATHS)),
                (location, "transform_descriptors", [value]),
                (tensor, "size", _Size(size)),
                (tensor, "chunks", tensor.chunks * random.randrange(3)),
                *((tensor.chunks[0], field, _Size(size)) for field in ("sizes", "offsets")),
                (tensor.properties, "dtype", value),
                *((table.state_dict_metadata, name, each) for each in (BytesStorageMetadata(), 1)),
                (table.state_dict_metadata, str(value), tensor),
                (table.storage_data, MetadataIndex(name, (5, 5)), location),
                *((table, field, value) for field in ("storage_data", "planner_data")),
                (table, "state_dict_metadata", value),
            )
        )
        if isinstance(target, dict):
            target[field] = new
        else:
            setattr(target, field, new)
        file.write_bytes(pickle.dumps(table, protocol=random.choice((2, 4, 5))))
    except Exception:  # noqa: BLE001 - it was changed before and is no such table any more
        return
    update_checksums(path)


class _Size:
    """Pickled as a torch.Size of any numbers."""

    def __init__(self, numbers):
        self.numbers = numbers

    def __reduce__(self):
        import torch

        return torch.Size, (self.numbers,)


def _data(random, path, canary):
    """Change the bytes of tensors, or the pickle in an archive."""
    file = path / "__0_0.distcp"
    data = file.read_bytes()
    if random.random() < 0.5:
        file.write_bytes(_bytes(random, data))
        update_checksums(path)
        return
    with contextlib.suppress(Exception):
        table = pickle.loads((path / ".metadata").read_bytes())
        location = random.choice(list(table.storage_data.values()))
        archive = data[location.offset : location.offset + location.length]
        payload = random.choice(
            (
                pickle.dumps(Touch(canary)),
                b"\x80\x04" + call(*random.choice(_FUNCTIONS), f"touch {canary}") + b".",
            )
        )

        def change(name, content):
            if not name.endswith("data.pkl"):
                return content
            return payload if random.random() < 0.5 else _bytes(random, content)

        archive = rewritten_zip(archive, change)
        location.offset, location.length = len(data), len(archive)
        file.write_bytes(data + archive)
        (path / ".metadata").write_bytes(pickle.dumps(table))
    update_checksums(path)


def _whole(random, path, _canary):
    """Change values of the manifest, and update its checksum."""
    try:
        whole = json.loads((path / "whole.json").read_text())
        part = random.choice((whole, whole["progress"], whole["files"]))
        key = random.choice([*part, *_PATHS])
        value = random.choice((*_NUMBERS, *_ODD[:6], *_PATHS, [1, 2, 3], [None, "x"]))
        if random.random() < 0.2:
            part.pop(key, None)
        else:
            part[key] = value if random.random() < 0.7 else [value, value]
        write_manifest(path, whole)
    except (ValueError, LookupError, TypeError, AttributeError):
        return


def copied(folder, target):
    """A copy of a checkpoint folder, for a test to damage."""
    return Path(shutil.copytree(folder, target))
