#!/usr/bin/env bash
# From an empty environment to a served model of one's own. Run it in an empty folder, after
#     python -m venv env && source env/bin/activate && pip install 'intarsia[all]'
# What it prints is in docs/newcomer.md.
set -euo pipefail

run() {
    echo "\$ $*"
    "$@"
    echo
}

cat > my_model.py <<'PYTHON'
import torch
from torch import nn


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 10), nn.Softmax(-1))
    return model.eval(), (torch.randn(8, 64),)
PYTHON
cat > load.py <<'PYTHON'
import intarsia
from my_model import make

model, args = make()
fast = intarsia.load("my_model.intarsia")
print("largest difference below 1e-5:", bool((fast(*args) - model(*args)).abs().max() < 1e-5))
PYTHON
cat > ask.py <<'PYTHON'
import json
import re
import subprocess
import urllib.request

command = ["intarsia", "serve", "my_model.intarsia", "--port", "0"]
with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
    try:
        address = next(found[0] for line in server.stdout if (found := re.search(r"http://\S+", line)))
        body = json.dumps({"inputs": {"input": [[0.0] * 64] * 8}}).encode()
        request = urllib.request.Request(f"{address}/predict", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            outputs = json.load(answer)["outputs"]["output"]
    finally:
        server.terminate()
print(f"{len(outputs)} rows of {len(outputs[0])} probabilities")
PYTHON

run intarsia engines
run intarsia demo resnet50 --no-full
run intarsia explain my_model.py:make --html report.html
run intarsia compile my_model.py:make -o my_model.intarsia
run intarsia run my_model.intarsia
run python load.py
run python ask.py
run intarsia check my_model.py:make --against my_model.intarsia
run intarsia export my_model.py:make --to onnx -O min_block_size=1
run intarsia check my_model.py:make --against make.onnx
