# shellcheck shell=sh
# A run starts only once, even if an interrupted submit was repeated.
set -C
if ! (umask 077; echo "$$" > "$DEPLOYKIT_RUN_DIR/claim") 2>/dev/null; then
    echo "this run has already started" >&2
    exit 0
fi
set +C

cd "$DEPLOYKIT_RUN_DIR/source" || exit 78
