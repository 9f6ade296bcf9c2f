# shellcheck shell=sh disable=SC2154
# The environment of the uv project in the folder $environment, brought up to date.
uv=$(command -v uv || echo "$HOME/.local/bin/uv")
python=$("$uv" run --quiet --project "$environment" python -c 'import sys; print(sys.executable)')
if ! [ -x "$python" ]; then
    echo "deploykit: the job cannot start: environment.uv: uv run --project $environment failed on $(uname -n)"
    exit 78
fi
export VIRTUAL_ENV="${python%/bin/*}" PATH="${python%/*}:$PATH"
