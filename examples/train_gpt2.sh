#!/usr/bin/env bash
# Train a GPT-2 of any size on two processes: progress, loss curve, checkpoints; run it again with --resume to go on.
#
#     examples/train_gpt2.sh n_layer=6,n_embd=192,n_head=6 --text my.txt --steps 500
#     examples/train_gpt2.sh n_layer=6,n_embd=192,n_head=6 --text my.txt --steps 1000 --resume
#
# The first argument changes Hugging Face's GPT2Config; everything behind it goes to `intarsia pipeline run`.
set -euo pipefail
sizes=${1:-n_layer=4,n_embd=64,n_head=4,n_positions=64}
exec intarsia pipeline run "gpt2:$sizes" --ranks 2 --microbatches 4 --steps 200 --save gpt2-run --curve gpt2-loss.svg "${@:2}"
