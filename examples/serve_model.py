"""Serve a model over HTTP: compile it for 1 to 32 rows, save it, start the server, send a request.

    python examples/serve_model.py

Needs `pip install 'intarsia[serve,onnxruntime]'`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request

import torch
from torch import nn

import intarsia

model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2), nn.Softmax(-1)).eval()
rows = intarsia.Input(min_shape=(1, 4), opt_shape=(8, 4), max_shape=(32, 4))
intarsia.save(intarsia.compile(model, (rows,)), "model.intarsia")

command = [sys.executable, "-m", "intarsia.serve", "model.intarsia", "--port", "0"]
with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
    try:
        address = next(found[0] for line in server.stdout if (found := re.search(r"http://\S+", line)))
        body = json.dumps({"inputs": {"input": [[1.0, 2.0, 3.0, 4.0]] * 3}}).encode()
        request = urllib.request.Request(f"{address}/predict", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as response:
            answer = torch.tensor(json.load(response)["outputs"]["output"])
    finally:
        server.terminate()
print(f"the server answers {answer.tolist()}")
torch.testing.assert_close(answer, model(torch.tensor([[1.0, 2.0, 3.0, 4.0]] * 3)))
