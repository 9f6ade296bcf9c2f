# shellcheck shell=sh disable=SC2154
# Activates the virtual environment in the folder $environment.
python=$environment/bin/python
if ! [ -x "$python" ]; then
    echo "deploykit: the job cannot start: $python was not found on $(uname -n) (environment.venv)"
    exit 78
fi
export VIRTUAL_ENV="$environment" PATH="$environment/bin:$PATH"
unset PYTHONHOME
