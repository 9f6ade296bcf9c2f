"""Private keys that are left out, tokens that are warned of, and text that is neither."""

from __future__ import annotations

import base64
import io
import json
import random
import subprocess

import pytest

from deploykit.bundle import archive as bundle
from deploykit.bundle.secret_scan import find
from tests.bundle.test_bundle import LIMIT, names, tree
from tests.bundle.test_secret_scan_job import HEX, RANDOM, SHAPES


def openssl(*argv, data=None):
    done = subprocess.run(["openssl", *argv], check=True, capture_output=True, input=data)
    return done.stdout


@pytest.fixture(scope="module")
def key():
    return openssl("genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256")


@pytest.fixture(scope="module")
def certificate(key, tmp_path_factory):
    path = tmp_path_factory.mktemp("key") / "key"
    path.write_bytes(key)
    return openssl("req", "-x509", "-new", "-key", str(path), "-subj", "/CN=x")


def escaped(key):
    return key.decode().replace("\n", "\\n")


def each_line(key, form):
    return b"".join(form % line for line in key.splitlines())


DISGUISES = {
    "plain": lambda key, _: key,
    "encrypted": lambda key, _: openssl("pkcs8", "-topk8", "-passout", "pass:x", data=key),
    "legacy": lambda key, _: openssl("ec", "-aes128", "-passout", "pass:x", data=key),
    "ed25519": lambda *_: openssl("genpkey", "-algorithm", "ED25519"),
    "bag attributes": lambda key, _: (
        b"Bag Attributes\n  friendlyName: x\nKey Attributes: <none>\n" + key
    ),
    "certificate then key": lambda key, certificate: certificate + key,
    "parameters then key": lambda key, _: (
        b"-----BEGIN EC PARAMETERS-----\nBggq\n-----END EC-----\n" + key
    ),
    "comment": lambda key, _: b"# the deploy key\n\n" + key,
    "BOM": lambda key, _: b"\xef\xbb\xbf" + key,
    "CRLF": lambda key, _: key.replace(b"\n", b"\r\n"),
    "CR": lambda key, _: key.replace(b"\n", b"\r"),
    "YAML": lambda key, _: b"tls:\n  key: |\n" + each_line(key, b"      %b\n"),
    "JSON": lambda key, _: json.dumps({"private_key": key.decode()}).encode(),
    "JSON in JSON": lambda key, _: json.dumps(json.dumps({"private_key": key.decode()})).encode(),
    "dotenv": lambda key, _: f'KEY="{escaped(key)}"\n'.encode(),
    "Python": lambda key, _: f"KEY = '''{key.decode()}'''\n".encode(),
    "joined lines": lambda key, _: each_line(key, b'  "%b\\n" +\n'),
    "one line": lambda key, _: key.replace(b"\n", b" "),
    "commented out": lambda key, _: each_line(key, b"# %b\n"),
    "after 64 KiB": lambda key, _: b"x = 1\n" * 20_000 + key,
    "after 3 MiB": lambda key, _: b"x = 1\n" * 500_000 + key + b"y = 2\n" * 500_000,
    "in a binary": lambda key, _: random.Random(1).randbytes(100_000) + key + b"\0\1\2" * 1000,
    "a header and one line": lambda *_: b"-----BEGIN OPENSSH PRIVATE KEY-----\nabc\n",
    "PGP": lambda key, _: (
        b"-----BEGIN PGP PRIVATE KEY BLOCK-----\nVersion: GnuPG v2.0.22 (GNU/Linux)\n\n%b\n%b\n"
        b"=abcd\n-----END PGP PRIVATE KEY BLOCK-----\n"
        % (base64.b64encode(key)[:64], base64.b64encode(key)[64:128])
    ),
    "SSH2": lambda key, _: (
        b'---- BEGIN SSH2 PRIVATE KEY ----\nComment: "x"\n%b\n' % base64.b64encode(key)[:70]
    ),
    "PuTTY": lambda key, _: (
        b"PuTTY-User-Key-File-3: ssh-ed25519\nEncryption: none\nPublic-Lines: 2\n%b\n"
        b"Private-Lines: 1\n%b\n" % (base64.b64encode(key)[:64], base64.b64encode(key)[:44])
    ),
    "age": lambda *_: b"# created\nAGE-SECRET-KEY-1" + b"QPZRY9X8GF2TVDW0" * 4,
}
"""Real private keys in common formats, from a key and its certificate."""


@pytest.mark.parametrize("name", DISGUISES)
def test_a_private_key_stays_behind(key, certificate, tmp_path, name):
    source = tree(tmp_path / "src", {"train.py": ""})
    (source / "settings").write_bytes(DISGUISES[name](key, certificate))
    scanned = bundle.scan(source, 10**8)
    assert scanned.kept_back == ("settings",)
    assert "settings" not in names(source, 10**8)
    (warning,) = scanned.warnings
    assert "contain private keys: settings (line " in warning.message
    tree(source, {".deploykitignore": "!settings\n"})
    scanned = bundle.scan(source, 10**8)
    assert "settings" in names(source, 10**8)
    assert (scanned.kept_back, scanned.warnings) == ((), ())


def test_the_line_of_a_key_is_that_of_its_header(key, tmp_path):
    for count in (0, 9, 400_000):
        source = tree(tmp_path / str(count), {})
        source.mkdir(exist_ok=True)
        (source / "x").write_bytes(b"a = 1\n" * count + key)
        assert f"x (line {count + 1})" in bundle.scan(source, 10**8).warnings[0].message


NO_KEY = {
    "certificate": "-----BEGIN CERTIFICATE-----\n" + RANDOM[:64] + "\n-----END CERTIFICATE-----\n",
    "public key": "-----BEGIN PUBLIC KEY-----\n" + RANDOM[:64] + "\n-----END PUBLIC KEY-----\n",
    "code that looks for one": 'if "-----BEGIN RSA PRIVATE KEY-----" in text:\n    raise X\n',
    "both marks": 'BEGIN = "-----BEGIN PRIVATE KEY-----"\nEND = "-----END PRIVATE KEY-----"\n',
    "a manual": "-----BEGIN PRIVATE KEY-----\n...\n-----END PRIVATE KEY-----\n",
    "a manual in words": "-----BEGIN PRIVATE KEY-----\n<your key here>\n-----END-----\n",
    "a sentence": "it begins with -----BEGIN PRIVATE KEY----- and goes on in base64, such as MIIE",
    "code, and a hash": 'x = b"-----BEGIN PRIVATE KEY-----"\n' + "a = b + c\n" * 9 + HEX[:64],
}


@pytest.mark.parametrize("name", NO_KEY)
def test_what_is_no_private_key_travels(tmp_path, name):
    source = tree(tmp_path / "src", {"file": NO_KEY[name]})
    assert names(source) == {"file"}
    assert bundle.scan(source, LIMIT).warnings == ()


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "private key"])
def test_a_token_travels_with_a_warning(tmp_path, name):
    source = tree(tmp_path / "src", {"conf.py": f"a = 1\n\nx = '{SHAPES[name]}'\n"})
    (warning,) = bundle.scan(source, LIMIT).warnings
    assert warning.message.startswith("conf.py, line 3: looks like a")
    assert warning.severity == "warning"
    assert SHAPES[name][-12:] not in warning.message
    assert names(source) == {"conf.py"}
    tree(source, {".deploykitignore": "!/conf.py\n"})
    assert bundle.scan(source, LIMIT).warnings == ()


@pytest.mark.parametrize("place", ["far", "twice", "across pieces"])
def test_a_token_in_an_odd_place(tmp_path, place):
    token = SHAPES["Hugging Face token"].encode()
    content = {
        "far": b"\n" * 1_500_000 + token + b"\n",
        "twice": token + b"\n\n" + token,
        "across pieces": b"\n" + b"#" * ((1 << 20) - 20) + b" " + token,
    }[place]
    source = tree(tmp_path / "src", {})
    source.mkdir()
    (source / "a").write_bytes(content)
    (warning,) = bundle.scan(source, 10**8).warnings
    lines = {"far": "line 1500001", "twice": "lines 1, 3"}
    assert f"a, {lines.get(place, 'line 2')}: looks like a Hugging Face token" in warning.message


@pytest.mark.parametrize(
    "text",
    [
        *("AKIAIOSFODNN7EXAMPLE", "hf_" + "x" * 34, "ghp_" + "x" * 36, "ghp_your_token_here"),
        *("sk-" + "your-key", "hf_hub_download(repo_id)", "xoxb-your-token", "npm_config_cache"),
        *(HEX[:40], f"commit {HEX[:40]}", f"sha256:{HEX[:64]}", "_authToken=${NPM_TOKEN}"),
        *("see github.com/wandb/wandb/blob/" + HEX[:40], "a" + SHAPES["GitHub token"]),
        *(
            "wandb.login()",
            "AKIA" + "A" * 30,
            "risk-" + RANDOM[:48],
            "AccountKey=" + "x" * 86 + "==",
        ),
    ],
)
def test_what_is_no_token(tmp_path, text):
    source = tree(tmp_path / "src", {"a": text})
    assert bundle.scan(source, LIMIT).warnings == ()


def test_many_findings_give_few_warnings(tmp_path):
    token = SHAPES["GitHub token"]
    source = tree(tmp_path / "src", {f"{n:02}.py": f"{token}\n" * 500 for n in range(50)})
    warnings = bundle.scan(source, LIMIT * 9).warnings
    assert len(warnings) == 21
    assert "lines 1, 2, 3, 4, 5, ...: looks like" in warnings[0].message
    assert warnings[-1].message == "30 more files may contain tokens"


SECRET_NAMES = (
    *(".ENV", ".env", ".Env.local", ".env.production", ".envrc", ".pgpass", ".huggingface/token"),
    *("kaggle.json", ".kaggle/x", "application_default_credentials.json", "terraform.tfstate"),
    *("prod.tfstate.backup", ".netrc", "_netrc", ".git-credentials", ".docker/config.json"),
    *(
        ".pypirc",
        ".npmrc",
        "id_rsa",
        "ID_ED25519",
        "server.PEM",
        "a.key",
        "a.p12",
        "client_secret_1.json",
    ),
    *(".aws/credentials", ".AWS/credentials", ".ssh/config", ".azure/x", ".s3cfg", "rclone.conf"),
)


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_a_file_that_holds_secrets_by_its_name_stays_behind(tmp_path, name):
    source = tree(tmp_path / "src", {name: "x", f"below/{name}": "x", "train.py": ""})
    assert names(source) == {"train.py"}
    tree(source, {".deploykitignore": f"!{name.split('/')[0]}\n"})
    assert {name, f"below/{name}"} < names(source)


def test_files_that_only_sound_alike_travel(tmp_path):
    files = [".env.example", ".env.sample", "environment.py", "token.py", "keys.py", "kaggle.py"]
    files += [
        "netrc.md",
        "docker/config.json",
        "tokenizer.json",
        "config.json",
        "envrc",
        "env/x.py",
    ]
    source = tree(tmp_path / "src", dict.fromkeys(files, "x"))
    assert names(source) == set(files)


def test_many_tokens_hide_no_key(tmp_path, key):
    source = tree(tmp_path / "src", {"a": f"{SHAPES['GitHub token']}\n" * 500 + key.decode()})
    assert bundle.scan(source, LIMIT).kept_back == ("a",)


@pytest.mark.parametrize("size", [100, 5000, 9000, 20_000])
def test_pieces_of_any_size_find_the_same(size):
    rng = random.Random(3)
    parts = [
        shape.encode() + b" " + rng.randbytes(3000).replace(b"\n", b"") for shape in SHAPES.values()
    ]
    data = b"# \n" + b"\n".join(parts)
    whole = find(io.BytesIO(data), len(data))
    assert [secret.line for secret in whole] == [*range(2, len(SHAPES) + 2)]
    assert find(io.BytesIO(data), size) == whole
