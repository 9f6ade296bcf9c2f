#!/bin/sh
# Create the environment in which the tests run SageMaker's real container launcher: the two packages
# of AWS's images, pinned exactly, and PyTorch from .venv. Does nothing if the environment is up to
# date. Requires a C compiler, which one of the packages builds with.
#   environment.sh [FOLDER]     default: .venv-sagemaker beside .venv
set -eu

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../../.." && pwd)
base="$root/.venv/bin/python"
venv="${1:-$root/.venv-sagemaker}"

if cmp -s "$here/requirements.txt" "$venv/requirements.txt"; then
    exit 0
fi

rm -rf "$venv"
"$base" -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check -r "$here/requirements.txt"

# packages installed here take precedence over those of .venv
site='import sysconfig; print(sysconfig.get_path("purelib"))'
"$base" -c "$site" > "$("$venv/bin/python" -c "$site")/base.pth"

# the launcher calls torchrun by name; that of .venv would start the other Python
cat > "$venv/bin/torchrun" <<'EOF'
#!/bin/sh
exec "$(dirname "$0")/python" -m torch.distributed.run "$@"
EOF
chmod +x "$venv/bin/torchrun"
cp "$here/requirements.txt" "$venv/requirements.txt"
