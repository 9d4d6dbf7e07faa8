"""Fourier transforms run on engines: spelled out over pairs of real numbers, equal to eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.convert import drivers
from tests.convert.samples import OPINFO_MISSING, op_infos, samples
from tests.functions import Function
from torch.export import Dim, export

from intarsia.convert import convert, registry
from intarsia.lower import lower
from intarsia.lower.fourier import feasible

aten = torch.ops.aten
G = torch.Generator().manual_seed(0)
X = torch.randn(3, 12, generator=G)
LONG = torch.randn(2, 3000, generator=G)
WINDOW, WIDE = torch.hann_window(8), torch.hann_window(400)
TRANSFORMS = [name for name in op_infos() if name.startswith("fft.")]


def pair(x: torch.Tensor) -> torch.Tensor:
    """A complex result as engines hold it."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def check(function: Callable[..., torch.Tensor], *calls: torch.Tensor, dynamic: Any = None) -> None:
    """Lowered at the first call's size: nothing is left to PyTorch, and every call equals eager's."""
    shapes = None if dynamic is None else ((dynamic,),)
    program = export(Function(function), calls[:1], dynamic_shapes=shapes, strict=False)
    net = convert(lower(program, registry.__contains__).module)
    for engine in drivers.ENGINES:
        run = drivers.build(engine, net)
        for x in calls:
            want = function(x)
            (have,) = run(x)
            scale = float(want.float().abs().max())
            torch.testing.assert_close(have, want, rtol=1e-5, atol=2e-6 * max(scale, 1.0))


def _sample_call(name: str, sample: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    op = op_infos()[name]

    def call(x: torch.Tensor) -> torch.Tensor:
        given = torch.view_as_complex(x) if sample.input.is_complex() else x
        return pair(op(given, *sample.args, **sample.kwargs))

    return call


def _check_samples(name: str, dtype: torch.dtype, limit: int) -> None:
    if dtype not in op_infos()[name].dtypes:
        return
    for sample in samples(op_infos()[name], dtype, limit):
        if sample.input.numel():
            check(_sample_call(name, sample), pair(sample.input))


@pytest.mark.skipif(bool(OPINFO_MISSING), reason=OPINFO_MISSING)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_sample_of_every_transform(name: str) -> None:
    """Of complex numbers where it takes them, of real ones otherwise."""
    takes_complex = torch.complex64 in op_infos()[name].dtypes
    _check_samples(name, torch.complex64 if takes_complex else torch.float32, 1)


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.int64, torch.bool])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_every_sample_of_every_transform(name: str, dtype: torch.dtype) -> None:
    _check_samples(name, dtype, 1000)


@pytest.mark.parametrize("norm", ["backward", "ortho", "forward"])
@pytest.mark.parametrize("length", [1, 2, 11, 12])
def test_there_and_back(norm: str, length: int) -> None:
    check(lambda x: torch.fft.irfft(torch.fft.rfft(x, n=length, norm=norm) * 2, n=length, norm=norm), X)


@pytest.mark.parametrize("length", [256, 400, 675, 3000])
def test_long_ones_are_split(length: int) -> None:
    check(lambda x: pair(torch.fft.rfft(x, n=length)), LONG)
    check(lambda x: torch.fft.irfft(torch.fft.rfft(x, n=length), n=length), LONG)


def test_spectrogram() -> None:
    waves = torch.randn(1, 3200, generator=G)
    check(lambda x: torch.stft(x, 400, 160, window=WIDE, return_complex=True).abs(), waves)
    check(
        lambda x: torch.istft(torch.stft(x, 8, 2, window=WINDOW, return_complex=True), 8, 2, window=WINDOW), X
    )


def test_mixing_tokens_with_any_batch() -> None:
    calls = [torch.randn(batch, 12, 6, generator=G) for batch in (3, 1, 7)]
    check(lambda x: torch.fft.fftn(x, dim=(1, 2)).real, *calls, dynamic={0: Dim("batch", max=64)})


@pytest.mark.parametrize("length", [257, 2 * 257, 0, "any"])
def test_what_has_no_small_matrices_stays_in_pytorch(length: int | str) -> None:
    assert not feasible(length)


def test_a_length_known_only_at_run_time_stays_in_pytorch() -> None:
    function = Function(lambda x: torch.fft.rfft(x).abs())
    program = export(function, (X,), dynamic_shapes=(({1: Dim("length", max=64)},),), strict=False)
    lowered = lower(program, registry.__contains__)
    assert aten._fft_r2c.default in {node.target for node in lowered.module.graph.nodes}
    torch.testing.assert_close(lowered.module(X[:, :9])[0], torch.fft.rfft(X[:, :9]).abs())
