# shellcheck shell=sh disable=SC2154
# Activates the conda environment $environment, a name or a folder. `conda init` sets CONDA_EXE and
# micromamba sets MAMBA_EXE, but only in interactive shells.
conda=
for candidate in \
    "$CONDA_EXE" "$(command -v conda)" "$MAMBA_EXE" "$(command -v micromamba)" \
    "$HOME/miniforge3/bin/conda" "$HOME/miniconda3/bin/conda" "$HOME/anaconda3/bin/conda" \
    /opt/conda/bin/conda; do
    if [ -f "$candidate" ] && [ -x "$candidate" ]; then
        conda=$candidate
        break
    fi
done
case ${conda##*/} in
    '')
        echo "deploykit: the job cannot start: conda was not found on $(uname -n) (environment.conda)"
        exit 78
        ;;
    conda) hook=$("$conda" shell.posix hook) ;;
    *) hook=$("$conda" shell hook --shell posix) ;;
esac
if eval "$hook" && "${conda##*/}" activate "$environment"; then
    python=$CONDA_PREFIX/bin/python
else
    python=
fi
if ! [ -x "$python" ]; then
    echo "deploykit: the job cannot start: the conda environment $environment has no Python or cannot be activated on $(uname -n)"
    exit 78
fi
