"""Models that cannot be exported are cut between their modules, and the reason is told."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

from intarsia.errors import CaptureError, InputError, PartitionError
from intarsia.pipeline.split import split


class Moody(nn.Module):
    """Decides by its data: no graph holds it."""

    def __init__(self, width):
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return self.a(x) if float(x.detach().sum()) > 0 else self.b(x)


class Deep(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList([nn.Sequential(Moody(width), nn.Tanh()) for _ in range(4)])
        self.last = nn.Linear(width, 2)
        self.spare = nn.Linear(1, 1)

    def forward(self, x, scale=1.0):
        x = skip = self.first(x)
        for block in self.blocks:
            x = block(x)
        return {"y": self.last(x + skip) * scale, "skip": skip}


@pytest.mark.parametrize("by", ["time", "memory"])
def test_cut_between_modules(by):
    torch.manual_seed(0)
    model, x = Deep(), torch.randn(4, 6)
    whole = copy.deepcopy(model)
    parts = split(model, (x,), stages=3, by=by)
    assert parts.report.way == "modules"
    assert "Could not" in parts.report.reason or "data" in parts.report.reason.lower(), parts.report.reason
    assert len(parts) == 3
    for batch in (x, -x, torch.randn(9, 6)):
        model.zero_grad(), whole.zero_grad()
        got, want = parts(batch), whole(batch)
        assert torch.equal(got["y"], want["y"]) and torch.equal(got["skip"], want["skip"])
        (got["y"].sum() + got["skip"].sum()).backward()
        (want["y"].sum() + want["skip"].sum()).backward()
        for (n, p), (_, q) in zip(model.named_parameters(), whole.named_parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), n
            assert p.grad is None or torch.equal(p.grad, q.grad), n
    assert list(parts.state_dict()) == list(model.state_dict())
    assert all(p is q for p, q in zip(parts.parameters(), model.parameters(), strict=True))


def test_modes_and_shapes_are_checked():
    model, x = Deep(), torch.randn(4, 6)
    parts = split(model, (x,), stages=2, by="memory")
    with pytest.raises(InputError, match="shape"):
        parts(torch.randn(4, 7))
    parts.eval()
    with pytest.raises(InputError, match="other mode"):
        parts(x)


def test_pipelined_in_one_process():
    model, x = Deep(), torch.randn(6, 6).abs()
    pipe = split(model, (x,), stages=2, by="memory").gpipe(chunks=2)
    got = [pipe(x)["y"], torch.cat([model(h)["y"] for h in x.chunk(2)])]
    torch.testing.assert_close(*got)


class TiedTree(nn.Module):
    """A tied head, and a block that is called in both halves, in a model that no graph holds."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(16, 6)
        self.block = nn.Sequential(Moody(6), nn.LayerNorm(6))
        self.middle = Moody(6)
        self.head = nn.Linear(6, 16, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        return self.head(self.block(self.middle(self.block(self.tokens(ids)))))


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_tied_weights_on_two_devices(checkpoint):
    # For torch "cpu" and "cpu:0" are two devices, so that the weight is copied here as between others.
    torch.manual_seed(0)
    model, ids = TiedTree(), torch.randint(0, 16, (4, 3))
    whole = copy.deepcopy(model)
    parts = split(model, (ids,), cuts=["middle"], by="memory")
    assert parts.report.way == "modules" and {t.stages for t in parts.tied} == {(0, 1)}
    pipe = parts.gpipe(chunks=1, checkpoint=checkpoint, devices=[torch.device("cpu"), torch.device("cpu:0")])
    names = [name for name, _ in whole.named_parameters()]
    assert len(pipe.borrowed) == 7 and [name for name, _ in pipe.named_parameters()] == names
    assert list(pipe.state_dict()) == list(whole.state_dict()) == list(model.state_dict())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (pipe, whole)]
    for _ in range(3):
        got, want = pipe(ids), whole(ids)
        torch.testing.assert_close(got, want)
        for weight in pipe.borrowed:
            copied = weight.places[0][0].__dict__[weight.places[0][1]]
            assert copied is not weight.owner and torch.equal(copied, weight.owner)
        for optimizer, answer in zip(optimizers, (got, want), strict=True):
            optimizer.zero_grad()
            answer.square().mean().backward()
        for (name, p), (_, q) in zip(pipe.named_parameters(), whole.named_parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            assert p.grad is None or torch.equal(p.grad, q.grad), name
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(model(ids), whole(ids))  # the model's own modules are as they were
    assert model.head.weight is model.tokens.weight and "weight" in model.head._parameters
    again = parts.gpipe(chunks=1, devices=["cpu", "cpu"])  # what was borrowed is given back
    assert not again.borrowed and again.tied
    assert all(p is q for p, q in zip(again.parameters(), model.parameters(), strict=True))


def test_a_buffer_on_two_devices_is_refused():
    model, ids = TiedTree(), torch.randint(0, 16, (4, 3))
    model.block[1] = nn.BatchNorm1d(3)
    parts = split(model, (ids,), cuts=["middle"], by="memory")
    with pytest.raises(
        PartitionError,
        match=r"stages 0 and 1 both hold the buffer block\.1\.running_mean",
    ):
        parts.gpipe(chunks=1, devices=["cpu", "cpu:0"])


def test_neither_way_is_possible():
    class Whole(nn.Module):
        def forward(self, x):
            return x * 2 if float(x.sum()) > 0 else x

    with pytest.raises(CaptureError, match=r"neither by its graph .* nor by its modules"):
        split(Whole(), (torch.randn(3),), stages=2)


def test_frozen_tensors_are_refused():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.m = Moody(3)

        def forward(self, x):
            return self.m(x) + torch.rand(3)

    with pytest.raises(CaptureError, match="tracing would freeze"):
        split(Noisy(), (torch.randn(2, 3),), stages=2)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls, self.a, self.b = 0, nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        self.calls += 1
        return self.b(torch.tanh(self.a(x))) + self.calls


def test_numbers_that_a_model_counts_in_python_are_not_frozen():
    model = Counting()
    with pytest.raises(CaptureError, match="Counting changes its calls at every call, which tracing would"):
        split(model, (torch.randn(2, 3),), stages=2)
    assert model.calls == 0
    with pytest.raises(CaptureError, match="Counting changes its calls at every call"):
        split(nn.Sequential(nn.Linear(3, 3), model), (torch.randn(2, 3),), stages=2)


def test_what_a_first_call_sets_is_no_count():
    class First(Counting):
        def forward(self, x):
            self.calls = 7
            return self.b(torch.tanh(self.a(x))) + self.calls

    model, x = First(), torch.randn(2, 3)
    parts = split(model, (x,), stages=2)
    assert model.calls == 0 and torch.equal(parts(x), model(x))


def test_too_few_modules():
    with pytest.raises(PartitionError, match="needs 4 cuts"):
        split(nn.Sequential(Moody(2), Moody(2)), (torch.randn(2, 2),), stages=5)


def test_every_option_is_obeyed():
    model, x = Deep(), torch.randn(4, 6)
    parts = split(model, (x,), cuts=["blocks.1", "blocks.3"], by="memory")
    assert parts.report.way == "modules" and len(parts) == 3
    names = [{n.split(".")[1] for n, _ in p.named_parameters() if n.startswith("blocks")} for p in parts]
    assert names == [{"0"}, {"1", "2"}, {"3"}]
    with pytest.raises(PartitionError, match=r"cuts names 'block.1'.*did you mean 'blocks.1'"):
        split(model, (x,), cuts=["block.1"], by="memory")
    fast = split(model, (x,), stages=2, by="memory", speeds=[9.0, 1.0], slack=0.0)
    even = split(model, (x,), stages=2, by="memory", slack=0.0)
    assert len(list(fast[0].parameters())) > len(list(even[0].parameters()))
    with pytest.raises(PartitionError, match="no cut into 2 stages fits"):
        split(model, (x,), stages=2, by="memory", memory=[10, 10])
    with pytest.raises(PartitionError, match="agree=True needs"):
        split(model, (x,), stages=2, by="memory", agree=True)
    whole = split(model, (x,), stages=2, by="memory", batch_dims=(None,))
    assert whole.signature.axes == {"x": None}


def test_numbers_that_mean_nothing_are_refused():
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), torch.randn(2, 3)
    for options, sentence in (
        ({"slack": -1.0}, "slack=-1.0 must be 0 or more"),
        ({"in_flight": 0}, "in_flight=0 must be 1 or more"),
        ({"cuts": "1"}, "cuts='1' is a single cut"),
    ):
        with pytest.raises(PartitionError, match=sentence):
            split(model, (x,), **options)


def test_stages_and_cuts_that_disagree():
    with pytest.raises(PartitionError, match=r"stages=7, but cuts=\[1\] make 2 stages"):
        split(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), (torch.randn(2, 2),), stages=7, cuts=[1])


IDS = torch.randint(0, 64, (4, 12))


def opt(**changes):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.OPTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        ffn_dim=32,
        vocab_size=64,
        word_embed_proj_dim=16,
        **changes,
    )
    return transformers.OPTForCausalLM(config)


def test_opt_in_training_draws_a_number_that_decides_nothing():
    """LayerDrop of zero: the graph is the same whatever is drawn; later draws (dropout) are the model's."""
    model = opt(dropout=0.1)
    parts = split(model, (IDS,), {"use_cache": False}, stages=3, by="memory")
    assert parts.report.way == "graph" and len(parts) == 3
    assert list(parts.state_dict()) == list(model.state_dict())
    answers, gradients = [], []
    for call in (model, parts):
        model.zero_grad()
        torch.manual_seed(1)
        answers.append(call(IDS, use_cache=False))
        answers[-1].logits.square().mean().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert type(answers[0]) is type(answers[1]) and torch.equal(answers[0].logits, answers[1].logits)
    for want, got in zip(*gradients, strict=True):
        torch.testing.assert_close(got, want)


def test_opt_that_skips_layers_is_cut_around_its_decoder():
    """What is drawn decides, so that no graph holds it; a long signature is cut between modules."""
    model = opt(dropout=0.0, layerdrop=0.5)
    parts = split(model, (IDS,), {"use_cache": False}, stages=2, by="memory")
    assert parts.report.way == "modules" and "Eq(u0, 1)" in parts.report.reason
    answers = []
    for seed in range(8):
        for call in (model, parts):
            torch.manual_seed(seed)
            answers.append(call(IDS, use_cache=False).logits)
        assert torch.equal(*answers[-2:])
    assert len({float(a.detach().sum()) for a in answers}) > 1  # layers were skipped by chance


class Skips(nn.Module):
    """LayerDrop by one kind of dice or another."""

    def __init__(self, draw):
        super().__init__()
        self.first, self.draw = Moody(3), draw
        self.blocks = nn.ModuleList([Moody(3) for _ in range(4)])

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            if self.draw() < 0.5:
                x = block(x)
        return x


@pytest.mark.parametrize("draw", [lambda: torch.rand([]), random.random, np.random.uniform])
def test_layers_skipped_by_chance_are_not_frozen(draw):
    with pytest.raises(CaptureError, match=r"nor by its modules .*random numbers.*, which tracing would"):
        split(Skips(draw), (torch.randn(2, 3),), stages=2, by="memory")
    assert split(Skips(lambda: torch.rand([]) - 1), (torch.randn(2, 3),), stages=2, by="memory")


@pytest.mark.parametrize("draw", [random.random, np.random.uniform])
def test_numbers_drawn_in_python_are_not_frozen_into_a_graph(draw):
    model = Skips(draw)
    model.first, model.blocks = nn.Linear(3, 3), nn.ModuleList([nn.Linear(3, 3) for _ in range(4)])
    with pytest.raises(CaptureError, match=r"by its graph \(it draws random numbers in Python"):
        split(model, (torch.randn(2, 3),), stages=2, by="memory")


def test_a_number_that_is_computed_with_is_not_frozen():
    class Shifts(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            drawn = torch.rand([])
            return self.b(self.a(x) + drawn) if drawn < 2 else x

    with pytest.raises(CaptureError, match=r"by its graph \(GuardOnData.*tracing would freeze"):
        split(Shifts(), (torch.randn(2, 3),), stages=2, by="memory")


class Answers(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = Moody(3), Moody(3)

    def forward(self, x, mask=None, bias=None):
        y = self.b(self.a(x) * mask + bias)
        return {"none": None, "y": y, "rows": x.shape[0], "both": (y, x)}


def test_the_order_of_keywords_and_answers_that_are_no_tensors():
    model, x = Answers(), torch.randn(4, 3)
    mask, bias = torch.rand(4, 3), torch.rand(4, 3)
    parts = split(model, (x,), {"bias": bias, "mask": mask}, stages=2, by="memory")
    want, got = model(x, mask, bias), parts(x, bias=bias, mask=mask)
    assert got["none"] is None and got["rows"] == 4 and torch.equal(got["y"], want["y"])
    assert all(torch.equal(a, b) for a, b in zip(got["both"], want["both"], strict=True))
    with pytest.raises(InputError, match=r"returns 3; for the example, it returned 4"):
        parts(x[:3], bias=bias[:3], mask=mask[:3])


def test_a_mean_over_tokens_is_seen_inside_a_module():
    class Loss(nn.Module):
        def forward(self, logits, labels):
            return torch.nn.functional.cross_entropy(logits, labels)

    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.loss = Moody(3), Moody(3), Loss()

        def forward(self, x, labels):
            return self.loss(self.b(self.a(x)), labels)

    parts = split(WithLoss(), (torch.randn(4, 3), torch.arange(4) % 3), stages=2, by="memory")
    assert [p.mean_node for p in parts] == [None, "loss"]


def test_gpt2_with_its_cache():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=64, n_positions=16)
    model = transformers.GPT2LMHeadModel(config).eval()
    parts = split(model, (IDS,), stages=2, by="memory")
    want, got = model(IDS), parts(IDS)
    assert parts.report.way == "graph" and torch.equal(got.logits, want.logits)
    keys = [layer.keys for layer in want.past_key_values.layers]
    assert all(torch.equal(a.keys, b) for a, b in zip(got.past_key_values.layers, keys, strict=True))


def test_a_sliding_cache_knows_how_many_tokens_it_has_seen():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 4}
    model = transformers.MistralForCausalLM(transformers.MistralConfig(**sizes, **heads)).eval()
    parts = split(model, (IDS,), stages=2, by="memory")
    want, got = model(IDS).past_key_values, parts(IDS).past_key_values
    assert parts.report.way == "graph" and IDS.shape[1] > 4
    assert [layer.cumulative_length for layer in got.layers] == [IDS.shape[1]] * 2
    assert got.get_seq_length() == want.get_seq_length()


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
        self.branch = Branch()

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.branch(x)


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x) if bool(x.detach().sum() > -1e9) else x


def test_an_export_that_fails_is_told_once(capfd):
    """Torch writes the whole graph, and warnings, at every attempt to export it."""
    parts = split(Branching(), (torch.randn(4, 4),), stages=2)
    assert parts.report.way == "modules" and "data-dependent" in parts.report.reason
    written = capfd.readouterr()
    assert written.out == "" and written.err == ""


def test_arguments_without_effect_are_told():
    x = torch.randn(4, 4)
    shapes = {"x": {0: torch.export.Dim("n", min=2)}}
    with pytest.warns(UserWarning, match="costs= and dynamic_shapes= have no effect: the model is cut along"):
        split(Branching(), (x,), stages=2, costs="analytic", dynamic_shapes=shapes)
    with pytest.raises(PartitionError, match="in_flight=4 has no effect"):
        split(Branching(), (x,), stages=2, in_flight=4)
    with pytest.raises(PartitionError, match="in_flight=4 has no effect"):
        split(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), (x,), stages=2, in_flight=4)


class LengthByData(nn.Module):
    """A length that depends on data, or no formula for backward: nodes that cannot be measured alone."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.layers = kind, nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x + (x[x > 2].sum() if self.kind == "mask" else 0 * x.sum(1).unique().numel())


@pytest.mark.parametrize("kind", ["mask", "unique"])
def test_nodes_that_cannot_be_measured_alone_leave_the_cut_to_modules(kind):
    model, x = LengthByData(kind).eval(), torch.randn(4, 4)
    stages = split(model, (x,), stages=2)
    assert "cannot be measured one by one" in str(stages.report)
    torch.testing.assert_close(stages(x), model(x))


def test_a_number_of_stages_that_is_none_is_refused():
    with pytest.raises(PartitionError, match="stages='2' must be a whole number"):
        split(nn.Linear(4, 4), (torch.ones(2, 4),), stages="2")


class Line(nn.Module):
    """Layers, and one in which something happens that a graph does not hold."""

    def __init__(self, last):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
        self.last = last

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


class Vectorised(nn.Module):
    def forward(self, x):
        return torch.vmap(lambda row: row / row.norm())(x)


class Forking(nn.Module):
    def forward(self, x):
        with torch.random.fork_rng():
            y = nn.functional.dropout(x, 0.5)
        return y + nn.functional.dropout(x, 0.5)


class Scaled(nn.Module):
    def forward(self, x):
        return x * x.sum().item()


@pytest.mark.parametrize(
    ("last", "reason"),
    [(Vectorised(), "torch.vmap"), (Forking(), "fork_rng"), (Scaled(), "cannot be measured one by one")],
)
def test_what_a_graph_does_not_hold_is_left_to_modules(last, reason):
    """Nodes of vmap crash alone; what fork_rng drew is drawn again behind it; a number has no range."""
    model, x = Line(last), torch.randn(6, 4)
    stages = split(model, (x,), stages=2, by="time")
    assert stages.report.way == "modules" and reason in stages.report.reason
    torch.manual_seed(0)
    want = model(x)
    torch.manual_seed(0)
    torch.testing.assert_close(stages(x), want)


def test_a_generator_of_its_own_is_refused():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(1))
            return self.b(self.a(x) + noise)

    with pytest.raises(CaptureError, match="it creates a Generator that tracing would freeze"):
        split(Own(), (torch.randn(4, 4),), stages=2, by="memory")


def test_a_model_whose_graph_is_known_is_cut_along_its_modules_if_asked():
    model, x = Line(nn.Tanh()), torch.randn(6, 4)
    assert split(model, (x,), stages=2, by="memory").report.way == "graph"
    stages = split(model, (x,), stages=2, by="memory", way="modules")
    assert stages.report.way == "modules" and stages.report.reason == "way='modules' was requested"
    torch.testing.assert_close(stages(x), model(x))
    with pytest.raises(PartitionError, match="way='tree' is neither 'graph' nor 'modules'"):
        split(model, (x,), way="tree")
