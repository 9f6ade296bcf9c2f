#!/bin/sh
# Make the environment of the examples with Lightning, Accelerate, fastai, DeepSpeed and Hugging
# Face: exactly pinned, with PyTorch and what else is there borrowed from .venv. Does nothing when
# it is there already. Nothing is resolved (--no-deps), so nothing can bring another PyTorch: left
# to itself, fastai's torchvision fetches the newest one, built for CUDA, 5 GB in all.
#   environment.sh [FOLDER]     default: .venv-frameworks beside .venv
set -eu

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
lender="$root/.venv/bin/python"
made="${1:-$root/.venv-frameworks}"

if cmp -s "$here/requirements.txt" "$made/requirements.txt" && [ -x "$made/bin/deploykit" ]; then
    exit 0
fi

rm -rf "$made"
"$lender" -m venv "$made"
site='import sysconfig; print(sysconfig.get_path("purelib"))'
own=$("$made/bin/python" -c "$site")
"$lender" -c "$site" > "$own/borrowed.pth"
install() { "$made/bin/pip" install --quiet --disable-pip-version-check --no-deps "$@"; }
install -r "$here/requirements.txt"
install --no-build-isolation -e "$root"  # so that its deploykit starts its Python

# The usual torchvision is built for CUDA. Beside PyTorch's CPU build its library cannot be loaded,
# and `import torchvision` fails on two operators that nobody here calls: name them.
if ! "$made/bin/python" -W ignore -c 'import torchvision' 2> /dev/null; then
    cat >> "$own/torchvision/extension.py" <<'EOF'

if not _has_ops():
    _named = torch.library.Library("torchvision", "DEF")
    _named.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _named.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
EOF
fi
"$made/bin/python" -m pip --disable-pip-version-check check
cp "$here/requirements.txt" "$made/requirements.txt"
