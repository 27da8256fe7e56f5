# Sourced by the job scripts of this folder, from the root of the source tree.
if command -v module >/dev/null; then
    module load frameworks # torch with XPU, oneCCL, mpi4py; never in a pipe: there it changes nothing
fi
if [ -f .venv/bin/activate ]; then
    source .venv/bin/activate # made once on a login node: python -m venv --system-site-packages .venv; pip install -e .
fi
# The job's knobs. Everything else is an option: OPTIONS="--lr 2e-4" qsub -v OPTIONS ..., or after the script's name.
if ! eval "options=(${OPTIONS:-})" 2>/dev/null; then # quotes in it count: OPTIONS="--run-dir 'my runs/first'"
    echo "error: OPTIONS=$OPTIONS is not a list of words for the shell; close its quotes" >&2
    exit 2
fi
knobs=(${DATA_FILE_LIST:+--data-file-list "$DATA_FILE_LIST"} ${TOKENIZER_MODEL:+--tokenizer-model "$TOKENIZER_MODEL"} "${options[@]}")
