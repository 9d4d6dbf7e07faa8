"""A compiled module and one of torch.compile in one process, both run by CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import intarsia

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_torch_compile_records_graphs_beside_ours() -> None:
    """It gives the working memory of products back while it records, for all streams."""
    model = nn.Linear(4096, 64).half().eval().cuda()  # long sums of few results: summed in working memory
    x = torch.randn(8, 4096, device="cuda", dtype=torch.float16)
    fast = intarsia.compile(model, (x,), engines=["pytorch"])
    other = torch.compile(nn.Linear(64, 64).eval().cuda(), mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(4):
            other(torch.randn(4, 64, device="cuda"))
        torch.cuda.empty_cache()
        taken = torch.zeros(2**26, device="cuda")  # what was given back is somebody else's
        torch.testing.assert_close(fast(x), model(x))
    assert not taken.any()
