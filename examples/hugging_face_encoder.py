"""Speed up a Hugging Face encoder: compile, look at the plan, compare, save, load, time.

    python examples/hugging_face_encoder.py

Needs `pip install 'intarsia[all]'`. The weights are random, so nothing is downloaded; with
`BertModel.from_pretrained(...)` the rest stays as it is.
"""

from __future__ import annotations

import torch
from transformers import BertConfig, BertModel

import intarsia
from intarsia.timing import race

torch.manual_seed(0)
config = BertConfig(hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512)
model = BertModel(config).eval()
ids = torch.randint(0, config.vocab_size, (1, 64))
call = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

fast = intarsia.compile(model, (), call)
print(fast.plan)
with torch.no_grad():
    torch.testing.assert_close(fast(**call)[0], model(**call)[0], rtol=1e-4, atol=1e-5)

intarsia.save(fast, "encoder.intarsia")
again = intarsia.load("encoder.intarsia")  # elsewhere: neither transformers' model nor a compile is needed
with torch.no_grad():
    times = race({"eager": lambda: model(**call), "intarsia": lambda: again(**call)}, rounds=20)
for name, timing in times.items():
    print(f"{name:9} {timing.median * 1e3:6.2f} ms")
