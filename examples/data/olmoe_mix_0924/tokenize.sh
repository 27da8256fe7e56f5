#!/bin/bash
# Tokenizes a downloaded OLMoE-mix-0924, a pair of token files per source file. Start it with a launcher, one process
# per node or per few cores; it goes on where it stopped when it is started again:
#     mpiexec -n 32 --ppn 4 examples/data/olmoe_mix_0924/tokenize.sh RAW TOKENS TOKENIZER
#     sbatch --array=0-31 ...   or   srun -n 32 ...
set -euo pipefail
if [[ ${1:-} == --help ]]; then sed -n '2,5s/^# \?//p' "$0"; exit; fi
raw=${1:?folder of the download} tokens=${2:?folder to write} tokenizer=${3:?folder of the tokenizer}
here=$(cd "$(dirname "$0")" && pwd)
workers=${WORKERS:-$(nproc)}
failed=0
[[ -d $raw ]] || { echo "$raw: no such folder; name that of the download" >&2; exit 1; }
mkdir -p "$tokens"
for corpus in wiki pes2o open-web-math algebraic-stack starcoder dclm; do
    python "$here/../../../tools/preprocess_data.py" --input "$raw/$corpus" --output-prefix "$tokens/$corpus" --per-file \
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$tokenizer" --append-eod --workers "$workers" \
        || { echo "corpus $corpus failed" >&2; failed=1; }
done
[[ -e $tokens/blend.yaml ]] || cp "$here/blend.yaml" "$tokens/"
exit "$failed"
