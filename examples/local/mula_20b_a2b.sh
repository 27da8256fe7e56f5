#!/bin/bash
# One machine with 8 GPUs of 141 GB.
#   bash examples/local/mula_20b_a2b.sh --data-path data/corpus_text_document --tokenizer-model tokenizer
#   bash examples/local/mula_20b_a2b.sh --dry-run
cd "$(dirname "$0")/../.." || exit
[ -d examples/local ] || { echo "error: $PWD is not the root of the source tree; start $0 where it lies" >&2; exit 2; }
exec python -m megatron.optimus.launch --nproc-per-node 8 --preset mula-20b-a2b \
    --expert-model-parallel-size 8 --micro-batch-size 2 --run-dir runs/mula-20b-a2b "$@"
