#!/bin/sh
# Make the environment of the MLflow server, trackio and wandb for the tests: exactly pinned, with what .venv has
# borrowed from there. Nothing is resolved (--no-deps): whole, MLflow brings 400 MB more.
#   environment.sh [FOLDER]     default: .venv-trackers beside .venv
set -eu

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../.." && pwd)
lender="$root/.venv/bin/python"
made="${1:-$root/.venv-trackers}"

if cmp -s "$here/requirements.txt" "$made/requirements.txt"; then
    exit 0
fi

rm -rf "$made"
"$lender" -m venv "$made"
site='import sysconfig; print(sysconfig.get_path("purelib"))'
own=$("$made/bin/python" -c "$site")
"$lender" -c "$site" > "$own/borrowed.pth"
"$made/bin/pip" install --quiet --disable-pip-version-check --no-deps -r "$here/requirements.txt"
"$made/bin/python" -c 'import mlflow.server, trackio, wandb'
cp "$here/requirements.txt" "$made/requirements.txt"
