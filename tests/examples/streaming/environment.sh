#!/bin/sh
# Make the environment of examples/streaming: exactly pinned, with PyTorch and boto3 borrowed from .venv.
# Nothing is resolved (--no-deps): LitData requires torchvision, built for CUDA, 5 GB in all, and
# obstore, which speaks HTTPS only; without it, LitData reads with boto3, as from the tests' server.
#   environment.sh [FOLDER]     default: .venv-streaming beside .venv
set -eu

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../.." && pwd)
lender="$root/.venv/bin/python"
made="${1:-$root/.venv-streaming}"

if cmp -s "$here/requirements.txt" "$made/requirements.txt"; then
    exit 0
fi

rm -rf "$made"
"$lender" -m venv "$made"
site='import sysconfig; print(sysconfig.get_path("purelib"))'
"$lender" -c "$site" > "$("$made/bin/python" -c "$site")/borrowed.pth"
"$made/bin/pip" install --quiet --disable-pip-version-check --no-deps -r "$here/requirements.txt"
cp "$here/requirements.txt" "$made/requirements.txt"
