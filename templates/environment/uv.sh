# shellcheck shell=sh disable=SC2154
# Updates the environment of the uv project in the folder $environment, with $options.
uv=$(command -v uv || echo "$HOME/.local/bin/uv")
# shellcheck disable=SC2086 # splits the options into words
python=$("$uv" run --quiet --project "$environment" $options python -c 'import sys; print(sys.executable)')
if ! [ -x "$python" ]; then
    echo "deploykit: the job cannot start: uv run --project $environment failed on $(uname -n) (environment.uv)"
    exit 78
fi
export VIRTUAL_ENV="${python%/bin/*}" PATH="${python%/*}:$PATH"
