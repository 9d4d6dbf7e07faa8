"""Check an ONNX file that somebody else exported: is it the model, and if not, which node differs first?

    python examples/check_onnx.py

Needs `pip install 'intarsia[onnxruntime]' onnxscript`.
"""

from __future__ import annotations

import onnx
import torch
from torch import nn

import intarsia

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4)).eval()
x = torch.randn(3, 16)

torch.onnx.export(model, (x,), "model.onnx", dynamo=True, verbose=False)
print(intarsia.check(model, (x,), "model.onnx"))

# An exporter that forgets the epsilon of a norm writes a file like this one.
file = onnx.load("model.onnx")
for node in file.graph.node:
    for attribute in node.attribute:
        if attribute.name == "epsilon":
            attribute.f = 0.1
onnx.save(file, "wrong.onnx")
report = intarsia.check(model, (x,), "wrong.onnx")
print(report)
assert report.difference is not None and report.difference.op == "aten.layer_norm.default"
