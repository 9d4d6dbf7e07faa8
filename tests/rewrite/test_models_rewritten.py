"""All shipped patterns on, over whole models: the answers stay those of PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from intarsia.capture.export import capture
from intarsia.cli import zoo
from intarsia.convert import registry
from intarsia.convert.interpreter import convert
from intarsia.engines import OnnxRuntime, OpenVINO
from intarsia.lower.lowering import lower
from intarsia.rewrite import apply

pytest.importorskip("transformers")

pytestmark = pytest.mark.openvino

ENGINES = (OnnxRuntime(threads=1), OpenVINO(threads=1))
QUICK = {
    "bert": {"reshape_reshape", "merged_projections"},
    "llama": {"rotary_embedding", "grouped_heads", "rms_norm"},
    "gpt2": {"gelu_tanh"},
    "mobilevit": {"attention", "conv_batch_norm"},
}


def flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if hasattr(value, "to_tuple"):
        value = value.to_tuple()
    if isinstance(value, dict):
        value = list(value.values())
    return [x for item in value for x in flat(item)] if isinstance(value, list | tuple) else []


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in zoo.names()]
)
def test_all_patterns_on(name: str) -> None:
    torch.manual_seed(0)
    specimen = zoo.specimen(name)
    model = specimen.model.eval()
    args = flat([*specimen.args, *specimen.kwargs.values()])
    lowered = lower(capture(model, specimen.args, specimen.kwargs), lambda target: target in registry)
    with torch.no_grad():
        expected = flat(model(*specimen.args, **specimen.kwargs))
    for engine in ENGINES:
        net = convert(lowered.module)
        log = apply(net, engine=engine, patterns=True)
        assert not log.broken
        assert set(log.counts()) >= QUICK.get(name, set())
        net.verify()
        made = engine.build(net)(*args[: len(net.get_inputs())])
        for one, other in zip(made, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
