"""Pipeline a model: cut it into two balanced stages, and train it with micro-batches.

    python examples/pipeline_model.py

Both stages run on the CPU here. On two GPUs, pass `devices=["cuda:0", "cuda:1"]` to `stages.gpipe`.
`examples/train_gpt2_pipeline.py` runs the stages in processes of their own.
"""

from __future__ import annotations

import torch
from torch import nn

import intarsia
from intarsia.pipeline import split

torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(6)]
model = nn.Sequential(*layers, nn.Linear(32, 4))
x, target = torch.randn(64, 32), torch.randint(0, 4, (64,))

stages = split(model, (x,), stages=2)  # measures the nodes and balances their time
print(stages.report)
pipe = stages.gpipe(chunks=4)  # four micro-batches
optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
losses = []
with intarsia.profile() as profile:
    for _ in range(10):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(pipe(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
profile.to_chrome("pipeline.json")  # a track for each stage; https://ui.perfetto.dev opens it
print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}")
assert losses[-1] < losses[0]
