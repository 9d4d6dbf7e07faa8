"""Any model, cut anywhere, answers and learns as it did whole."""

from __future__ import annotations

import copy
import functools
import itertools

import pytest
import torch
from pipeline_zoo import ZOO, make
from torch import nn
from torch.utils import _pytree as pytree

from intarsia.errors import InputError, PartitionError
from intarsia.pipeline.split import split
from intarsia.pipeline.stages.stage import build_stages
from intarsia.pipeline.stages.trace import trace


def scalar(output):
    return sum(t.float().square().mean() for t in pytree.tree_leaves(output) if t.is_floating_point())


def learn(module, args, kwargs):
    torch.manual_seed(7)
    output = module(*args, **kwargs)
    scalar(output).backward()
    return output


def assert_same(model, whole, parts, args, kwargs):
    want, got = learn(whole, args, kwargs), learn(parts, args, kwargs)
    assert type(got) is type(want)
    for a, b in zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True):
        assert torch.equal(a, b)
    for (name, p), (_, q) in zip(model.named_parameters(), whole.named_parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, msg=lambda m, name=name: f"{name}: {m}")
    for (name, p), (_, q) in zip(model.named_buffers(), whole.named_buffers(), strict=True):
        assert torch.equal(p, q), name


@functools.cache
def cut_in_three(name):
    """A model of the zoo, a copy from before, three stages, and a call; nobody changes its mode."""
    model, args, kwargs = make(name)
    whole = copy.deepcopy(model)
    return model, whole, split(model, args, kwargs, stages=3), args, kwargs


@pytest.mark.parametrize("name", ZOO)
def test_three_stages_equal_the_model(name):
    model, whole, parts, args, kwargs = cut_in_three(name)
    model.zero_grad(), whole.zero_grad()
    assert len(parts) == 3
    held = {p.data_ptr() for stage in parts for p in stage.parameters()}
    assert held == {p.data_ptr() for p in model.parameters()}
    assert_same(model, whole, parts, args, kwargs)


@pytest.mark.parametrize("name", ["resnet", "unet", "gpt2", "t5"])
def test_every_allowed_cut_is_right(name):
    model, args, kwargs = make(name)
    captured = trace(model, args, kwargs)
    allowed = captured.line.allowed
    torch.manual_seed(7)
    saved = {k: v.clone() for k, v in model.state_dict().items()}
    want = pytree.tree_leaves(model(*args, **kwargs))
    stride = max(1, len(allowed) // 25)
    for cut in allowed[::stride]:
        stages = build_stages(captured, [cut])
        model.load_state_dict(saved)
        torch.manual_seed(7)
        values = captured.signature.flatten(args, kwargs)
        for stage in stages:
            values = stage(*values)
        got = pytree.tree_leaves(captured.signature.unflatten(values))
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), cut


@pytest.mark.parametrize("name", ["resnet", "gpt2", "llama"])
def test_names_and_objects_are_the_models(name):
    model, _, parts, _, _ = cut_in_three(name)
    assert list(parts.state_dict()) == list(model.state_dict())
    assert [n for n, _ in parts.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert all(p is q for p, q in zip(parts.parameters(), model.parameters(), strict=True))
    assert {n for n, _ in parts.named_buffers()} == {n for n, _ in model.named_buffers()}


def test_state_travels_between_cuts():
    model, _, three, args, kwargs = cut_in_three("gpt2")
    other = make("gpt2")[0]
    with torch.no_grad():
        for p in other.parameters():
            p.add_(1.0)
    two = split(other, args, kwargs, stages=2)
    two.load_state_dict(three.state_dict())
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
    plain = make("gpt2")[0]
    plain.load_state_dict(two.state_dict())
    with pytest.raises(InputError, match=r"unexpected \['no\.such'\]"):
        two.load_state_dict(three.state_dict() | {"no.such": torch.zeros(1)})


def test_tied_weights_are_one_parameter():
    model, _, parts, _, _ = cut_in_three("gpt2")
    assert [str(t) for t in parts.tied] == ["transformer.wte.weight is held by stages 0, 2"]
    weights = [dict(parts[i].named_parameters(remove_duplicate=False))["lm_head.weight"] for i in (0, 2)]
    assert weights[0] is weights[1] is model.lm_head.weight


def test_tied_weights_stay_together_where_balance_lets_them():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)
            self.c, self.d = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x):
            return self.d(self.c(self.b(self.a(self.a(x)))))

    parts = split(Twice(), (torch.randn(4, 64),), stages=2, by="memory")
    assert parts.tied == ()


def test_rotary_tables_are_replayed_not_sent():
    parts = cut_in_three("llama")[2]
    for border in parts.report.borders:
        assert all(spec.shape[0] == parts.signature.batch for spec in border), border
        assert not any(spec.dtype == torch.bool for spec in border), border


def test_batch_length_stays_open():
    model, _, parts, _, _ = cut_in_three("llama")
    tokens = torch.randint(0, 64, (7, 12))
    assert torch.equal(parts(tokens, use_cache=False).logits, model(tokens, use_cache=False).logits)
    with pytest.raises(InputError, match="length of 1, but the stages were cut for 2 or more"):
        parts(tokens[:1], use_cache=False)
    with pytest.raises(InputError, match=r"input_ids has shape \(7, 5\)"):
        parts(tokens[:, :5], use_cache=False)
    with pytest.raises(InputError, match="use_cache=True, but the stages were cut for False"):
        parts(tokens, use_cache=True)
    with pytest.raises(InputError, match="is float32"):
        parts(tokens.float(), use_cache=False)


def test_batch_length_stays_open_beside_a_double_starred_parameter():
    model, args, _ = make("llama")
    options = {"use_cache": False, "output_hidden_states": True}  # `forward` takes the second by **kwargs
    pipe = split(model, args, options, stages=2).gpipe(chunks=2)
    tokens = torch.randint(0, 64, (7, 12))
    want, result = model(tokens, **options), pipe(tokens, **options)
    torch.testing.assert_close(result.hidden_states, want.hidden_states)
    torch.testing.assert_close(result.logits, want.logits)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, batch, added=None, *, scale=1.0, **more):
        x = self.second(self.first(batch["x"]).relu() + batch["rest"][0])
        return (x + added) * scale + sum(more.values())


def test_an_example_with_one_tensor_in_several_places():
    """As in `model(ids, labels=ids)`: torch.export would capture one input."""
    model, x = TwoInputs(), torch.randn(4, 3)
    batch = {"x": x, "rest": (x,)}
    stages = split(model, (batch, x), {"noise": x}, stages=2, by="memory")
    batch = {"x": torch.randn(5, 3), "rest": (torch.randn(5, 3),)}
    added, noise = torch.randn(5, 3), torch.randn(5, 3)
    torch.testing.assert_close(stages(batch, added, noise=noise), model(batch, added, noise=noise))


def test_a_call_may_pass_its_arguments_in_another_way():
    model, x = TwoInputs(), torch.randn(4, 3)
    stages = split(model, ({"x": x, "rest": (x,)}, x), {"noise": x}, stages=2, by="memory")
    pipe, y = stages.gpipe(chunks=2), torch.randn(6, 3)
    other = {"rest": (y,), "x": y + 1}  # its keys are in another order
    want = model(other, y, noise=y)
    for run in (stages, pipe):
        torch.testing.assert_close(run(noise=y, added=y, batch=other), want)
        torch.testing.assert_close(run(other, y, noise=y, scale=1.0), want)
        for args, more, words in [
            (
                (other, y),
                {},
                "has 2 positional arguments; the stages were cut for 2 .* and noise",
            ),
            ((other, y), {"noize": y}, "and noize; the stages were cut for 2 positional arguments and noise"),
            ((other,), {"noise": y}, r"added is a NoneType; the stages were cut for added: float32"),
            ((other, y), {"noise": y, "scale": 2.0}, r"scale is 2\.0; the stages were cut for its default"),
            (
                ({"x": y}, y),
                {"noise": y},
                r"batch has the keys \['x'\]; .* \['x', 'rest'\]",
            ),
            ((y, y), {"noise": y}, "batch is a tensor; the stages were cut for a dict of 2"),
            (({"x": y, "rest": [y]}, y), {"noise": y}, r"batch\['rest'\] is a list of 1; .* a tuple of 1"),
        ]:
            with pytest.raises(InputError, match=words):
                run(*args, **more)


def test_a_batch_of_one_is_captured_as_one():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    x = torch.randn(1, 3)
    parts = split(model, (x,), stages=2)
    assert torch.equal(parts(x), model(x))
    with pytest.raises(InputError, match="shape"):
        parts(torch.randn(2, 3))


def test_the_other_mode_is_refused():
    model, args, _ = make("resnet")
    parts = split(model, args, stages=2)
    parts.eval()
    with pytest.raises(InputError, match="cut in training mode and cannot run in evaluation mode"):
        parts(*args)
    quiet = split(model.eval(), args, stages=2)
    assert torch.equal(quiet(*args), model(*args))


def test_in_place_changes_are_never_cut_off():
    class Changes(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            y = self.a(x)
            view = y.view(-1)
            z = torch.sin(y)
            y.mul_(2.0)
            z = z + self.b(z)
            return view + z.view(-1) * self.calls

    model = Changes()
    captured = trace(model, (torch.randn(4, 4),))
    line = captured.line
    names = {n.name: i for i, n in enumerate(line.nodes)}
    assert not set(range(names["linear"] + 1, names["mul_"] + 1)) & set(line.allowed)
    whole = copy.deepcopy(model)
    parts = build_stages(captured, [])
    assert len(parts) == 1
    with pytest.raises(PartitionError, match="may not be cut before node"):
        build_stages(captured, [names["mul_"]])
    x = torch.randn(4, 4)
    assert torch.equal(parts[0](x)[0], whole(x))
    assert model.calls == 1


def test_memory_caps_and_speeds_move_the_cut():
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(8)])
    x = torch.randn(4, 32)
    count = [len(list(s.parameters())) for s in split(model, (x,), stages=2, by="memory", slack=0.0)]
    assert count == [8, 8]
    size = 4 * (32 * 32 + 32) * 4 + 4 * 32 * 4
    capped = split(model, (x,), stages=2, by="memory", memory=[2 * size, 100 * size])
    assert [len(list(s.parameters())) for s in capped] == [4, 12]
    with pytest.raises(PartitionError, match="no cut into 2 stages fits"):
        split(model, (x,), stages=2, by="memory", memory=[size, size])
    fast = split(model, (x,), stages=2, by="memory", speeds=[3.0, 1.0], slack=0.0)
    assert [len(list(s.parameters())) for s in fast] == [12, 4]


def test_cuts_by_hand():
    model, args, _ = make("mlp")
    parts = split(model, args, cuts=["linear_1", "linear_3"], by="memory")
    assert [len(list(s.parameters())) for s in parts] == [2, 4, 2]
    with pytest.raises(PartitionError, match="'nothing', which is neither a node"):
        split(model, args, cuts=["nothing"], by="memory")


def test_nobody_asks_the_first_stage_for_a_gradient_of_inputs():
    """All of its backward pass can wait in schedules that let weights wait, as torch's do."""
    model, args, kwargs = make("mlp")
    first, last = split(model, args, kwargs, stages=2).report.costs
    assert first.backward_input == 0 < first.backward_weight == first.backward
    assert last.backward_input > 0


def test_report_reads_well():
    model, args, kwargs = make("gpt2")
    text = str(split(model, args, kwargs, stages=2, by="memory").report)
    assert text.startswith("cut by the graph, balanced by memory to")
    assert "tied: transformer.wte.weight is held by stages 0, 1" in text
    assert "float32[s" in text


def test_too_many_stages():
    with pytest.raises(PartitionError, match="stages=4 needs 3 cuts; the graph allows 0"):
        split(nn.Linear(2, 2), (torch.randn(2, 2),), stages=4, by="memory")
    with pytest.raises(PartitionError, match="stages=0"):
        split(nn.Linear(2, 2), (torch.randn(2, 2),), stages=0)
    with pytest.raises(PartitionError, match="by='size'"):
        split(nn.Linear(2, 2), (torch.randn(2, 2),), by="size")


class Later(nn.Module):
    """A size is needed where only a tensor made after it, which passes by, still has it."""

    def forward(self, x, y):
        size = x.shape[0]
        mask = y > 0
        flat = torch.sin((y * 2).flatten())
        return torch.where(mask, torch.cos(flat.reshape(size, 4)), torch.zeros(()))


def test_a_size_is_read_off_a_tensor_that_was_made_later():
    model, x, y = Later(), torch.randn(3, 2), torch.randn(3, 4)
    line = trace(model, (x, y)).line
    for a, b in itertools.combinations(line.allowed, 2):
        parts = split(model, (x, y), cuts=[a, b], by="memory")
        for n in (3, 5):
            given = torch.randn(n, 2), torch.randn(n, 4)
            assert torch.equal(parts(*given), model(*given)), (a, b)


def test_few_bytes_do_not_cost_the_balance():
    """A narrow waist a little off the middle is not worth several percent of every step."""
    wide = [nn.Linear(64, 64) for _ in range(20)]
    model = nn.Sequential(*wide[:9], nn.Linear(64, 4), nn.Linear(4, 64), *wide[9:])
    x = torch.randn(2, 64)
    near = split(model, (x,), stages=2, by="memory").report
    narrow = split(model, (x,), stages=2, by="memory", slack=0.3).report
    assert narrow.crossing[0] < near.crossing[0] and narrow.balance < 0.92
    assert near.balance > 0.97


class Rotary(nn.Module):
    """As rotary embeddings of transformers are written: in float32, whoever switched autocast on."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        y = self.a(x)
        with torch.autocast("cpu", enabled=False):
            y = (y.float() * 2).cos()
        return self.c(self.b(y.to(x.dtype)))


def test_a_region_without_autocast_under_autocast():
    """The graph of the region holds guards of dtypes seen without."""
    model, x = Rotary(), torch.randn(4, 4)
    whole = copy.deepcopy(model)
    parts = split(model, (x,), stages=2, by="memory")
    for pipe in (parts, parts.gpipe(chunks=2)):
        model.zero_grad(), whole.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            want, got = whole(x), pipe(x)
        assert got.dtype == want.dtype and torch.equal(got, want)
        want.float().square().sum().backward(), got.float().square().sum().backward()
        for p, q in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=2e-2, atol=2e-2)


def test_what_is_computed_from_weights_alone_and_used_twice_is_a_weight_used_twice():
    """torch's separate pass for the weights goes through it twice: T5's position bias."""

    class Biased(nn.Module):
        def __init__(self, uses):
            super().__init__()
            self.bias, self.layers, self.uses = nn.Parameter(torch.ones(4)), nn.Linear(4, 4), uses

        def forward(self, x):
            bias = self.bias.exp()
            x = self.layers(x) + bias
            return x.sin() * bias if self.uses == 2 else x.sin()

    for uses in (1, 2):
        (stage,) = split(Biased(uses), (torch.ones(2, 4),), stages=1, by="memory")
        assert stage.reuses_weights == (uses == 2)


@pytest.mark.parametrize("way", ["graph", "modules"])
@pytest.mark.parametrize("name", ["states", "form", "not_recomputed", "answer", "results", "writes"])
def test_a_model_may_name_its_parts_as_a_stage_names_its_own(name, way):
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.add_module(name, nn.Linear(4, 4))

        def forward(self, x):
            return self.first(getattr(self, name)(self.first(x).relu()))

    model, x = Named(), torch.randn(4, 4)
    parts = split(model, (x,), stages=2, by="memory", way=way)
    torch.testing.assert_close(parts.gpipe(chunks=2)(x), model(x))
    assert list(parts.state_dict()) == list(model.state_dict())
