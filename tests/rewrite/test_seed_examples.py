"""The two worked examples of classical graph rewriting, as they stand in the documentation."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from intarsia.network import (
    FLayerInfoMemo,
    Layer,
    Network,
    Tensor,
    infers,
    net_guard,
    record_signature,
)
from intarsia.network import functional as F
from intarsia.rewrite import AnalysisPatternManager, PatternAnalyzer, PatternRewriter, RewritePatternManager


class ReplaceAddWithSub(PatternRewriter):
    def __init__(self) -> None:
        super().__init__("replace_add_with_sub", root_layer={"Add"}, separate_match_rewrite=True)

    def match(self, layer: Layer) -> bool:
        return layer.as_layer().op_type == "Add"

    def rewrite(self, layer: Layer) -> None:
        with net_guard(layer.network):
            a, b = layer.get_inputs(0, 1)
            o = layer.get_outputs(0)[0]
            c = a - b
            o.replace_all_uses_with(c)
            layer.mark_as_removed()


def test_sum_becomes_subtract() -> None:
    net = Network()
    with net_guard(net):
        a, b = Tensor("a", torch.float32, (2, 3)), Tensor("b", torch.float32, (2, 3))
        (a + b).mark_output("y")
    old = net.get_layer_by_name("add")
    assert old is not None
    manager = RewritePatternManager()
    manager.add("add_to_sub", ReplaceAddWithSub())
    log = manager.rewrite(net)
    assert len(log) == 1
    assert old.is_removed() and old.get_outputs()[0].get_users() == []
    assert str(net) == "network(a: f32[2, 3], b: f32[2, 3]) -> (y: f32[2, 3])\n  y = Sub(a, b)"


@infers("GPTAttention", domain="plugins")
def _attention_shape(inputs: Sequence[Tensor | None], attributes: object, outputs: int) -> list[object]:
    qkv = inputs[0]
    assert qkv is not None
    return [(qkv.dtype, (*qkv.shape[:2], 8))]


@record_signature
def gpt_attention(qkv: Tensor, heads: int, *, remove_padding: bool = False) -> dict[str, Tensor]:
    made = F.op("GPTAttention", qkv, domain="plugins", heads=heads, remove_padding=remove_padding)
    return {"context": made}


class RemovePadding(PatternRewriter):
    def __init__(self) -> None:
        super().__init__("remove_padding", root_layer={"plugins::GPTAttention"}, keep_types=False)

    def match_and_rewrite(self, layer: Layer) -> bool:
        flayer = FLayerInfoMemo.instance().get(layer.name)
        assert flayer
        if flayer.get_input("qkv").shape[0] == 1:  # it has no padding already
            return False
        batch, length, hidden = (self.args[name] for name in ("batch_size", "in_len", "hidden_size"))
        with net_guard(layer.network):
            new_inputs = flayer.clone_inputs()
            new_inputs["qkv"] = Tensor("qkv", torch.float16, (1, batch * length, hidden))
            new_inputs["remove_padding"] = True
            flayer.replace_outputs_uses_with(layer.network, gpt_attention(**new_inputs))
            layer.mark_as_removed()
        return True


def test_attention_without_padding_ends_after_one_rewrite() -> None:
    net = Network()
    with net_guard(net):
        qkv = Tensor("qkv", torch.float16, (4, 16, 24))
        F.relu(gpt_attention(qkv, heads=2)["context"]).mark_output("y")
    manager = RewritePatternManager()
    manager.add("remove_padding", RemovePadding())
    log = manager.rewrite(net, args={"batch_size": 4, "in_len": 16, "hidden_size": 24})
    assert log.counts() == {"remove_padding": 1}
    assert str(net) == (
        "network(qkv: f16[4, 16, 24], qkv_1: f16[1, 64, 24]) -> (y: f16[1, 64, 8])\n"
        "  gptattention_1 = plugins::GPTAttention(qkv_1) {heads=2, remove_padding=1}\n"
        "  y = Relu(gptattention_1)"
    )


class CountAdds(PatternAnalyzer):
    def __init__(self) -> None:
        super().__init__("count_adds", root_layer={"Add"})
        self.asked: list[str] = []
        self.found: list[str] = []

    def match(self, layer: Layer) -> bool:
        self.asked.append(layer.name)
        return layer.get_inputs(0) != layer.get_inputs(1)

    def analyze(self, subgraph: list[Layer]) -> None:
        self.found += [layer.name for layer in subgraph]


def test_analysis_asks_about_each_layer_once() -> None:
    net = Network()
    with net_guard(net):
        a, b = Tensor("a", torch.float32, (2,)), Tensor("b", torch.float32, (2,))
        F.relu((a + b) + (a + a)).mark_output("y")
    pattern = CountAdds()
    manager = AnalysisPatternManager()
    manager.add("count", pattern)
    manager.analyze(net)
    assert pattern.asked == ["add", "add_1", "add_2"]
    assert pattern.found == ["add", "add_2"]
    assert manager.get("count") is pattern
