"""Views, slices, joins, look-ups, scatters, windows, borders: one conversion, three shapes, as eager."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as TF
from tests.convert.drivers import ENGINES, build
from tests.convert.programs import lowered_program, program_of
from torch import Tensor
from torch.export import Dim

from intarsia.convert import convert
from intarsia.network import Network

N, M = Dim("n", min=3, max=64), Dim("m", min=4, max=64)
Spec = tuple[Any, ...]  # sizes (N and M open), then perhaps a dtype, or (dtype, bound) for numbers below it
F32, I64, BOOL = torch.float32, torch.int64, torch.bool

X: Spec = (N, 4, M)
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Spec, ...]]] = {
    "view": (lambda x: x.view(x.shape[0], 2, 2, x.shape[2]), (X,)),
    "view_joined": (lambda x: x.contiguous().view(-1, x.shape[2]), (X,)),
    "reshape_open": (lambda x: x.permute(2, 0, 1).reshape(x.shape[2], -1), (X,)),
    "reshape_two": (lambda x: x.reshape(x.shape[2], x.shape[0], 4), (X,)),
    "flatten": (lambda x: x.flatten(1), (X,)),
    "unflatten": (lambda x: x.unflatten(1, (2, -1)), (X,)),
    "squeeze": (lambda x: x.unsqueeze(1).squeeze(1).unsqueeze(-1).squeeze(), (X,)),
    "movedim": (lambda x: x.movedim(0, 2).mT, (X,)),
    "expand": (lambda x, y: x.expand(y.shape[0], -1, y.shape[2]), ((1, 4, 1), X)),
    "expand_as": (lambda x, y: x.expand_as(y) + 1, ((4, 1), X)),
    "broadcast": (lambda x, y: torch.broadcast_tensors(x, y), ((N, 1), (1, M))),
    "repeat": (lambda x: x.repeat(2, 1, 1, 3), (X,)),
    "repeat_open": (lambda x: x[:, :1, :1].repeat(1, x.shape[0], x.shape[2]), (X,)),
    "tile": (lambda x: x.tile(2), (X,)),
    "interleave": (lambda x: x.repeat_interleave(3, 0), (X,)),
    "interleave_flat": (lambda x: x.repeat_interleave(2), (X,)),
    "slice": (lambda x: x[1:, ::2, :-1], (X,)),
    "slice_open": (lambda x, y: x[:, :, y.shape[0] - 2 :] + 1, ((4, 5, 70), X)),
    "select": (lambda x: x[-1] + x[0], (X,)),
    "narrow": (lambda x: x.narrow(2, 1, x.shape[2] - 1), (X,)),
    "slice_scatter": (lambda x: x.slice_scatter(x[1:] * 2, 0, 1), (X,)),
    "slice_scatter_step": (lambda x: x.slice_scatter(x[:, ::2] * 2, 1, 0, 4, 2), (X,)),
    "select_scatter": (lambda x: x.select_scatter(x[0] * 2, 0, -1), (X,)),
    "split": (lambda x: x.split([1, 3], 1), (X,)),
    "split_rest": (lambda x: x.split((1, x.shape[0] - 1), 0), (X,)),
    "chunk": (lambda x: x.chunk(2, 1), (X,)),
    "unbind": (lambda x: x.unbind(1), (X,)),
    "cat": (lambda x, y: torch.cat([x, y, x], 0), (X, (5, 4, M))),
    "stack": (lambda x: torch.stack([x, x * 2], 1), (X,)),
    "meshgrid": (lambda a, b: torch.meshgrid(a, b, indexing="xy"), ((N,), (M,))),
    "index": (lambda x, i: x[i], (X, (N, 3, (I64, 2)))),
    "index_two": (lambda x, i, j: x[:, i, j], (X, (3, (I64, 4)), (3, (I64, 2)))),
    "index_apart": (lambda x, i, j: x[i, :, j], (X, (3, (I64, 2)), (2, 1, (I64, 2)))),
    "index_negative": (lambda x, i: x[..., i - 2], (X, (3, (I64, 2)))),
    "index_put": (lambda x, i, v: x.index_put((i,), v), (X, (2, (I64, 1)), (4, M))),
    "index_add": (lambda x, i, v: x.index_put((i,), v, accumulate=True), (X, (6, (I64, 2)), (6, 4, M))),
    "mask_put": (lambda x, v: x.index_put((x[:, 0, 0] > 0,), v), (X, (4, M))),
    "gather": (lambda x, i: x.gather(2, i), (X, (N, 4, 3, (I64, 2)))),
    "take": (lambda x, i: torch.take(x, i - 3), (X, (N, (I64, 6)))),
    "embedding": (lambda w, i: TF.embedding(i, w), ((7, M), (N, 3, (I64, 7)))),
    "scatter": (lambda x, i, v: x.scatter(2, i, v), (X, (N, 4, 1, (I64, 2)), X)),
    "scatter_add": (lambda x, i, v: x.scatter_add(0, i, v), (X, (6, 4, M, (I64, 2)), (6, 4, M))),
    "scatter_mean": (lambda x, i, v: x.scatter_reduce(2, i, v, "mean"), (X, (N, 4, M, (I64, 2)), X)),
    "index_copy": (lambda x, i, v: x.index_copy(1, i, v), (X, (1, (I64, 4)), (N, 1, M))),
    "index_fill": (lambda x, i: x.index_fill(2, i, 1.0), (X, (1, (I64, 2)))),
    "flip": (lambda x: x.flip(0, 2), (X,)),
    "roll": (lambda x: x.roll((5, -1), (0, 2)), (X,)),
    "roll_flat": (lambda x: x.roll(7), (X,)),
    "rot90": (lambda x: x.rot90(3, (0, 2)), (X,)),
    "tril": (lambda x: x.tril(-1) + x.triu(1), (X,)),
    "diagonal": (lambda x: x.diagonal(1, 0, 2), (X,)),
    "diagonal_below": (lambda x: x.diagonal(-1, 0, 2), (X,)),
    "diag_embed": (lambda x: torch.diag_embed(x, 1), ((N, M),)),
    "diag_embed_below": (lambda x: torch.diag_embed(x, -2, 0, 2), ((N, M),)),
    "diagonal_scatter": (lambda x: x.diagonal_scatter(x.diagonal(1) * 2, 1), ((N, N),)),
    "pixel_shuffle": (lambda x: TF.pixel_shuffle(x, 2), ((N, 8, M, 3),)),
    "pixel_unshuffle": (lambda x: TF.pixel_unshuffle(x, 2), ((N, 3, 4, 6),)),
    "channel_shuffle": (lambda x: TF.channel_shuffle(x, 2), ((N, 4, M, 3),)),
    "windows": (lambda x: x.unfold(2, 2, 1), (X,)),
    "im2col": (lambda x: TF.unfold(x, (2, 3), dilation=(2, 1)), ((N, 3, 6, M),)),
    "col2im": (lambda x: TF.fold(x, (4, 5), (2, 2)), ((N, 8, 12),)),
    "pad": (lambda x: TF.pad(x, (1, 2, 0, 3), value=1.5), (X,)),
    "pad_negative": (lambda x: TF.pad(x, (-1, 2)), (X,)),
    "pad_reflect": (lambda x: TF.pad(x, (1, 1), mode="reflect"), (X,)),
    "pad_replicate": (lambda x: TF.pad(x, (3, 1), mode="replicate"), (X,)),
    "pad_circular": (lambda x: TF.pad(x, (1, 2), mode="circular"), (X,)),
    "pad_open": (lambda x: TF.pad(x, (0, 64 - x.shape[2])), (X,)),
    "masked_scatter": (lambda x: x.masked_scatter(x > 0, x * 2), (X,)),
    "bucketize": (lambda x, b: torch.bucketize(x, b.sort().values, right=True), (X, (5,))),
    "isin": (lambda x, y: torch.isin(x, y), ((N, M, (I64, 9)), (3, (I64, 9)))),
    "one_hot": (lambda i: TF.one_hot(i, 5), ((N, M, (I64, 5)),)),
}
# They have no converter: lowering puts smaller operators in their place.
TAKEN_APART = ("broadcast", "rot90", "channel_shuffle")
# Sizes that depend on the data: one result has several.
PICKS: dict[str, tuple[Callable[..., Any], tuple[Spec, ...]]] = {
    "nonzero": (lambda x: x.nonzero(), ((N, M, BOOL),)),
    "mask": (lambda x, m: x[m], (X, (N, BOOL))),
    "mask_inner": (lambda x, m: x[:, m], (X, (4, BOOL))),
    "mask_two": (lambda x, m: x[m], (X, (N, 4, BOOL))),
    "masked_select": (lambda x: torch.masked_select(x, x > 0), (X,)),
    "interleave_counts": (lambda x, r: x.repeat_interleave(r, 0), (X, (N, (I64, 4)))),
}


def make(spec: Spec, n: int, m: int) -> Tensor:
    """Data for a spec, with sizes given to N and M."""
    *sizes, last = spec
    if isinstance(last, int | Dim):
        sizes, last = [*sizes, last], F32
    shape = [n if size is N else m if size is M else size for size in sizes]
    if isinstance(last, tuple):
        return torch.randint(0, last[1], shape, dtype=last[0])
    return torch.randn(shape) > 0 if last == BOOL else torch.randn(shape)


def dynamic(spec: Spec) -> dict[int, Dim]:
    return {axis: size for axis, size in enumerate(spec) if size is N or size is M}


@functools.lru_cache(maxsize=1)  # the engines of a program follow each other
def network(name: str) -> Network:
    torch.manual_seed(0)
    function, specs = (PROGRAMS | PICKS)[name]
    first = [make(spec, 5, 7) for spec in specs]
    graph_of = lowered_program if name in TAKEN_APART else program_of
    return convert(graph_of(function, *first, dynamic=tuple(dynamic(spec) for spec in specs)))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", [*PROGRAMS, *PICKS])
def test_three_shapes(name: str, engine: str) -> None:
    function, specs = (PROGRAMS | PICKS)[name]
    program = build(engine, network(name))
    torch.manual_seed(1)
    for n, m in ((5, 7), (3, 4), (9, 6)):
        inputs = [make(spec, n, m) for spec in specs]
        expected = function(*inputs)
        results = program(*inputs)
        wanted = list(expected) if isinstance(expected, list | tuple) else [expected]
        assert len(results) == len(wanted)
        for have, want in zip(results, wanted, strict=True):
            torch.testing.assert_close(have, want)
