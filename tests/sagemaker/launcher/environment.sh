#!/bin/sh
# Make the environment in which the tests run SageMaker's real container launcher: the two packages
# that AWS's images hold, exactly pinned, and PyTorch borrowed from .venv. Does nothing when it is
# there already. Needs a C compiler (one of the packages builds with it).
#   environment.sh [FOLDER]     default: .venv-sagemaker beside .venv
set -eu

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../.." && pwd)
lender="$root/.venv/bin/python"
made="${1:-$root/.venv-sagemaker}"

if cmp -s "$here/requirements.txt" "$made/requirements.txt"; then
    exit 0
fi

rm -rf "$made"
"$lender" -m venv "$made"
"$made/bin/pip" install --quiet --disable-pip-version-check -r "$here/requirements.txt"

# what is installed here comes first, so nothing of the launcher is replaced
site='import sysconfig; print(sysconfig.get_path("purelib"))'
"$lender" -c "$site" > "$("$made/bin/python" -c "$site")/borrowed.pth"

# the launcher calls torchrun by name; the borrowed one would start the other Python
cat > "$made/bin/torchrun" <<'EOF'
#!/bin/sh
exec "$(dirname "$0")/python" -m torch.distributed.run "$@"
EOF
chmod +x "$made/bin/torchrun"
cp "$here/requirements.txt" "$made/requirements.txt"
