"""A case of ranks: models cut on the meta device."""

from __future__ import annotations

import pytest
import torch
from pipeline_zoo import make
from rank_training import check_gradients, gradients
from rank_worker import loss_of

from intarsia.errors import InputError
from intarsia.pipeline.split import split
from intarsia.pipeline.stages.weights import Weights


def meta(folder, saved):
    """Every rank gives memory to its own stages, and trains as the plain model does."""
    model, args, kwargs = make("gpt2")
    model.eval()
    target = torch.arange(args[0].shape[0])
    with torch.device("meta"):
        empty = type(model)(model.config).eval()
    loss_of(model(*args, **kwargs), target).backward()
    parts = split(empty, args, kwargs, stages=2, by="memory")
    with pytest.raises(InputError, match=r"is on the meta device: load weights by load\(path\)"):
        parts.distributed("1F1B", 2, loss_fn=loss_of)
    lost = Weights(folder, rename=lambda name: "x." + name)
    with pytest.raises(InputError, match=r"lacks x\."):
        parts.distributed("1F1B", 2, loss_fn=loss_of, weights=lost)
    pipe = parts.distributed("1F1B", 2, loss_fn=loss_of, weights=folder)
    other = parts[1 - pipe.rank]
    assert all(p.is_meta for p in other.parameters())
    with torch.autocast("cpu", torch.bfloat16):  # the other rank's stages stay there
        pipe.step(*args, target=target, **kwargs)
    pipe.zero_grad()
    pipe.step(*args, target=target, **kwargs)
    check_gradients(pipe, gradients(model), "meta")
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    optimizer.step()
    pipe.save(saved, optimizer)
    with torch.device("meta"):
        empty = type(model)(model.config).eval()
    again = split(empty, args, kwargs, stages=4, by="memory").distributed(
        "Interleaved1F1B", 2, loss_fn=loss_of, weights=saved
    )
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2)
    plain.step()
    for n, p in again.named_parameters():
        torch.testing.assert_close(
            p, dict(model.named_parameters(remove_duplicate=False))[n], rtol=1e-3, atol=1e-4
        )
    print("meta ok", flush=True)
