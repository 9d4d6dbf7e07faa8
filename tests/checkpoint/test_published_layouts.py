"""The tests' own checkpoints are what the libraries that define the layouts read from them."""

from __future__ import annotations

import pytest
import torch
from tests.quantized_checkpoints import LAYOUTS, quantization_config, quantize

# compressed-tensors 0.20 has removed the groups that `g_idx` names; its older checkpoints have them.
COMPRESSED = [
    name for name, layout in LAYOUTS.items() if layout.method == "compressed-tensors" and not layout.act_order
]


def _weight() -> torch.Tensor:
    return torch.randn(96, 64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_tensors_decompresses_to_the_same_weight(name: str) -> None:
    compressors = pytest.importorskip("compressed_tensors.compressors")
    from compressed_tensors.quantization import QuantizationScheme

    layout = LAYOUTS[name]
    tensors, dense = quantize(layout, _weight())
    scheme = QuantizationScheme(**quantization_config(layout)["config_groups"]["group_0"])
    compressor = compressors.BaseCompressor.get_value_from_registry(layout.format)
    assert torch.equal(compressor.decompress(dict(tensors), scheme)["weight"], dense)


def test_compressed_tensors_reads_the_order_of_awq() -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter

    tensors, dense = quantize(LAYOUTS["awq"], _weight())
    parts = AutoAWQConverter.unpack_awq(tensors["qweight"], tensors["qzeros"], 4)
    numbers, zeros = (part & 15 for part in AutoAWQConverter.reverse_awq_order(*parts, 4))
    scales = tensors["scales"].float().repeat_interleave(32, 0)
    assert torch.equal((numbers - zeros.repeat_interleave(32, 0)).float().mul(scales).t(), dense)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_dense_weight_is_near_the_one_that_was_quantized(name: str) -> None:
    layout, weight = LAYOUTS[name], _weight()
    _, dense = quantize(layout, weight)
    bits = 4 if layout.format == "float-quantized" else layout.bits
    assert (dense - weight).abs().max() <= 1.1 * weight.abs().max() / (2**bits - 1)
