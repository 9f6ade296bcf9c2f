# shellcheck shell=sh
# A run starts once, even if its submit was interrupted and repeated.
set -C
if ! (umask 077; echo "$$" > "$DEPLOYKIT_RUN_DIR/claim") 2>/dev/null; then
    echo "this run was already started" >&2
    exit 0
fi
set +C

cd "$DEPLOYKIT_RUN_DIR/source" || exit 78
