"""A pipeline gives what the plain module gives: outputs, gradients, buffers, random numbers."""

from __future__ import annotations

import copy
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from intarsia.pipeline import GPipe, pop, skippable, stash
from intarsia.pipeline.skip import Namespace

MODES = ["always", "except_last", "never"]


@pytest.fixture(autouse=True)
def one_thread():
    """The number of threads may change the last bit of a sum; one thread compares exactly."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.act(self.norm(self.conv(x)) + x)


@skippable(stash=["skip"])
class Down(nn.Module):
    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(a, b, 3, stride=2, padding=1)

    def forward(self, x):
        yield stash("skip", x)
        return F.relu(self.conv(x))


@skippable(pop=["skip"])
class Up(nn.Module):
    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(a + b, b, 3, padding=1)

    def forward(self, x):
        skip = yield pop("skip")
        x = F.interpolate(x, size=skip.shape[-2:])
        return F.relu(self.conv(torch.cat([x, skip], 1)))


class GPT2Block(nn.Module):
    """A block of transformers' GPT-2, as a layer that takes and returns hidden states."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x):
        output = self.block(x)
        return output[0] if isinstance(output, tuple) else output


class GPT2Embedding(nn.Module):
    def __init__(self, config) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.n_positions, config.n_embd)

    def forward(self, ids):
        return self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))


def mlp():
    layers = [nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True)) for _ in range(4)]
    return nn.Sequential(*layers), lambda: torch.rand(10, 8)


def inplace_at_the_border():
    layers = [nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.LeakyReLU(0.1, inplace=True)]
    return nn.Sequential(*layers), lambda: torch.randn(10, 8)


def resnet():
    layers = [
        nn.Conv2d(3, 4, 3),
        nn.ReLU(inplace=True),
        Residual(4),
        Residual(4),
        nn.Flatten(),
        nn.LazyLinear(5),
    ]
    model = nn.Sequential(*layers)
    model(torch.rand(2, 3, 8, 8))
    return model, lambda: torch.rand(10, 3, 8, 8)


def unet():
    ns = [Namespace() for _ in range(2)]
    return nn.Sequential(
        Down(2, 4).isolate(ns[0]),
        Down(4, 8).isolate(ns[1]),
        nn.Conv2d(8, 8, 3, padding=1),
        Up(8, 4).isolate(ns[1]),
        Up(4, 2).isolate(ns[0]),
    ), lambda: torch.rand(10, 2, 8, 8)


def gpt2():
    transformers = pytest.importorskip("transformers")
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block as Block

    config = transformers.GPT2Config(
        vocab_size=40, n_positions=16, n_embd=16, n_layer=3, n_head=2,
        embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0, attn_implementation="eager",
    )  # fmt: skip
    blocks = [GPT2Block(Block(config, layer_idx=i)) for i in range(3)]
    layers = [GPT2Embedding(config), *blocks, nn.LayerNorm(16), nn.Linear(16, 40)]
    return nn.Sequential(*layers), lambda: torch.randint(40, (10, 16))


MODELS = [mlp, inplace_at_the_border, resnet, unet, gpt2]


def cuts(count: int, stages: int) -> list[int]:
    return [len(range(j, count, stages)) for j in range(stages)]


def chunked(module, x, chunks):
    return torch.cat([module(piece) for piece in x.chunk(chunks)])


def assert_same(plain: nn.Module, piped: nn.Module) -> None:
    for (name, a), b in zip(plain.named_parameters(), piped.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    for (name, a), b in zip(plain.named_buffers(), piped.buffers(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize(
    ("checkpoint", "concurrent"), [*((mode, None) for mode in MODES), ("never", True), ("except_last", False)]
)
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("model", MODELS)
def test_training(model, stages, checkpoint, concurrent):
    torch.manual_seed(0)
    plain, sample = model()
    piped = GPipe(
        copy.deepcopy(plain),
        cuts(len(plain), stages),
        devices=["cpu"] * stages,
        chunks=4,
        checkpoint=checkpoint,
        concurrent_backward=concurrent,
    )
    for _ in range(2):  # the second time what was learned of the stages is used
        x = sample()
        a, b = x.clone(), x.clone()
        if x.is_floating_point():
            a.requires_grad_(), b.requires_grad_()
        expected, actual = chunked(plain, a, 4), piped(b)
        assert torch.equal(expected, actual)
        (expected.square().mean()).backward()
        (actual.square().mean()).backward()
        if x.is_floating_point():
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=1e-7)
        assert_same(plain, piped)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("model", MODELS)
def test_inference(model, mode):
    torch.manual_seed(0)
    plain, sample = model()
    plain.eval()
    piped = GPipe(copy.deepcopy(plain), cuts(len(plain), 3), devices=["cpu"] * 3, chunks=3)
    with mode():
        x = sample()
        expected, actual = plain(x), piped(x)
    assert not actual.requires_grad
    assert actual.is_inference() == expected.is_inference()
    torch.testing.assert_close(expected, actual, rtol=1e-5, atol=1e-6)


def test_grad_and_inference_mode_follow_into_the_stages():
    seen = []

    class See(nn.Module):
        def forward(self, x):
            seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
            return x

    piped = GPipe(nn.Sequential(See(), See()), [1, 1], devices=["cpu"] * 2, chunks=2, checkpoint="never")
    for mode, expected in [
        (torch.enable_grad, (True, False)),
        (torch.no_grad, (False, False)),
        (torch.inference_mode, (False, True)),
    ]:
        seen.clear()
        with mode():
            piped(torch.rand(2))
        assert seen == [expected] * 4


@pytest.mark.parametrize("checkpoint", MODES)
def test_autocast_follows_and_keeps_gradients(checkpoint):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 8))
    piped = GPipe(copy.deepcopy(plain), [2, 2], devices=["cpu"] * 2, chunks=3, checkpoint=checkpoint)
    x = torch.rand(6, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, actual = chunked(plain, x, 3), piped(x)
    assert actual.dtype == torch.bfloat16
    assert torch.equal(expected, actual)
    expected.float().sum().backward()
    actual.float().sum().backward()
    for a, b in zip(plain.parameters(), piped.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=2e-2, atol=2e-2)


def test_default_device_follows():
    class Make(nn.Module):
        def forward(self, x):
            return torch.empty(len(x), 1)

    piped = GPipe(nn.Sequential(nn.Identity(), Make()), [1, 1], devices=["cpu"] * 2, chunks=2)
    with torch.device("meta"):
        assert piped(torch.empty(4, 1)).is_meta


@pytest.mark.parametrize("checkpoint", MODES)
def test_saved_tensor_hooks_follow(checkpoint):
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
    piped = GPipe(copy.deepcopy(plain), [2, 2], devices=["cpu"] * 2, chunks=2, checkpoint=checkpoint)
    x = torch.rand(4, 4)
    packed = []

    def pack(tensor):
        packed.append(threading.current_thread().name)
        return tensor.neg()

    with torch.autograd.graph.saved_tensors_hooks(pack, torch.neg):
        expected, actual = chunked(plain, x, 2), piped(x)
    expected.sum().backward()
    actual.sum().backward()
    assert set(packed) > {"MainThread"}
    for a, b in zip(plain.parameters(), piped.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-6)


# Random numbers


def dropouts():
    return nn.Sequential(
        nn.Linear(8, 32), nn.Dropout(0.5), nn.Linear(32, 32), nn.Dropout(0.3), nn.Linear(32, 8)
    )


@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize(("chunks", "stages"), [(1, 3), (1, 1), (4, 1)])
def test_dropout_equals_the_plain_module_where_stages_do_not_overlap(chunks, stages, checkpoint):
    plain = dropouts()
    piped = GPipe(
        copy.deepcopy(plain), cuts(5, stages), devices=["cpu"] * stages, chunks=chunks, checkpoint=checkpoint
    )
    x = torch.rand(8, 8)
    torch.manual_seed(1)
    expected = chunked(plain, x, chunks)
    after = torch.get_rng_state()
    torch.manual_seed(1)
    actual = piped(x)
    assert torch.equal(torch.get_rng_state(), after)
    assert torch.equal(expected, actual)
    expected.sum().backward()
    actual.sum().backward()
    assert torch.equal(torch.get_rng_state(), after), "computing again draws nothing new"
    assert_same(plain, piped)


@pytest.mark.parametrize("chunks", [2, 5])
def test_dropout_is_the_same_however_it_is_checkpointed_and_run_after_run(chunks):
    plain = dropouts()
    x = torch.rand(10, 8)
    results = []
    for checkpoint in [*MODES, "always"]:
        piped = GPipe(copy.deepcopy(plain), [2, 3], devices=["cpu"] * 2, chunks=chunks, checkpoint=checkpoint)
        torch.manual_seed(2)
        outputs = [piped(x) for _ in range(3)]
        state = torch.get_rng_state()
        sum(output.sum() for output in outputs).backward()
        results.append((*outputs, state, *(p.grad for p in piped.parameters())))
    assert not torch.equal(results[0][0], results[0][1]), "the second run draws other numbers"
    for result in results[1:]:
        for first, other in zip(results[0], result, strict=True):
            torch.testing.assert_close(first, other, rtol=1e-6, atol=1e-7)


def test_masks_agree_with_gradients_when_stages_draw_at_the_same_time():
    class Dropouts(nn.Module):
        def forward(self, x):
            for _ in range(100):
                x = F.dropout(x, p=0.001)
            return x

    x = torch.rand(10, 10, requires_grad=True)
    piped = GPipe(
        nn.Sequential(Dropouts(), Dropouts()), [1, 1], devices=["cpu"] * 2, chunks=10, checkpoint="always"
    )
    y = piped(x)
    y.norm().backward()
    assert y.bool().tolist() == x.grad.bool().tolist()
    assert not y.bool().all()


def test_every_kind_of_random_operation_is_recomputed_alike():
    class Draw(nn.Module):
        def forward(self, x):
            x = x * torch.rand_like(x) + torch.randn(x.shape) * torch.bernoulli(torch.full_like(x, 0.5))
            x = F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5)[0]
            x = (
                x * torch.randint(1, 5, x.shape)
                + torch.empty_like(x).uniform_()
                + F.alpha_dropout(x, training=True)
            )
            return x * (1 + torch.multinomial(torch.ones(8), len(x) * 8, replacement=True).view(x.shape))

    grads = []
    for checkpoint in ("always", "never"):
        torch.manual_seed(3)
        x = torch.linspace(-1, 1, 80).view(10, 8).requires_grad_()
        piped = GPipe(
            nn.Sequential(Draw(), Draw()), [1, 1], devices=["cpu"] * 2, chunks=5, checkpoint=checkpoint
        )
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            piped(x).sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


def test_without_random_operations_the_generator_stands_still():
    piped = GPipe(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), [1, 1], devices=["cpu"] * 2, chunks=2)
    before = torch.get_rng_state()
    piped(torch.rand(4, 1, generator=torch.Generator())).sum().backward()
    assert torch.equal(before, torch.get_rng_state())


def test_drawing_unwatched_is_noticed():
    class Late(nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return x + torch.rand(1) if self.calls > 1 else x

    piped = GPipe(
        nn.Sequential(Late(), nn.Identity()), [1, 1], devices=["cpu"] * 2, chunks=2, checkpoint="always"
    )
    with pytest.warns(UserWarning, match="default generator"):
        piped(torch.rand(4))


# Buffers


def test_stateful_buffers_are_recomputed_from_what_they_were():
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x):
            self.calls += 1
            return x * self.scale * self.calls

    plain = nn.Sequential(Counting(), Counting())
    piped = GPipe(copy.deepcopy(plain), [1, 1], devices=["cpu"] * 2, chunks=3, checkpoint="always")
    x = torch.rand(6, 1)
    for _ in range(2):
        for piece in x.chunk(3):
            plain(piece).sum().backward()
        piped(x).sum().backward()
        assert_same(plain, piped)


def test_a_late_change_of_the_input_is_refused():
    class Late(nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return x.add_(1) if self.calls > 1 else x

    for checkpoint in ("except_last", "never"):
        layers = nn.Sequential(nn.Identity(), Late())
        piped = GPipe(layers, [1, 1], devices=["cpu"] * 2, chunks=2, checkpoint=checkpoint)
        with pytest.raises(RuntimeError, match=r"in.place"):
            piped(torch.rand(4))
        x = torch.rand(4)
        assert torch.equal(piped(x), x + 1), "it is known now"


# Borders


class Fork(nn.Module):
    def forward(self, x):
        return {
            "x": x * 2,
            "count": 3,
            "none": None,
            "nested": [x.long(), (x,)],
            "flag": True,
            "name": "kept",
        }


class Change(nn.Module):
    def forward(self, tree):
        assert tree["none"] is None and tree["flag"] is True and tree["name"] == "kept"
        return {**tree, "x": tree["x"] * tree["count"], "count": tree["count"] + 1}


class Merge(nn.Module):
    def forward(self, tree):
        return tree["x"] * tree["count"] + tree["nested"][1][0] + tree["nested"][0]


@pytest.mark.parametrize("checkpoint", MODES)
def test_trees_numbers_and_none_pass_borders(checkpoint):
    plain = nn.Sequential(Fork(), Change(), Merge())
    piped = GPipe(plain, [1, 1, 1], devices=["cpu"] * 3, chunks=3, checkpoint=checkpoint)
    x = torch.linspace(-3, 3, 10).requires_grad_()
    expected = plain(x)
    actual = piped(x)
    assert torch.equal(expected, actual)
    assert torch.equal(
        torch.autograd.grad(expected.sum(), x)[0],
        torch.autograd.grad(actual.sum(), x)[0],
    )


def test_trees_as_input_and_output():
    class Swap(nn.Module):
        def forward(self, tree):
            return {"b": [tree["a"][0] + tree["n"], None], "a": tree["a"][1], "n": tree["n"], "s": tree["s"]}

    class Back(nn.Module):
        def forward(self, tree):
            return {"a": (tree["b"][0], tree["a"]), "n": tree["n"], "s": tree["b"][1]}

    tree = {"a": (torch.rand(5, 2), torch.arange(5)), "n": 2, "s": None}
    output = GPipe(nn.Sequential(Swap(), Back()), [1, 1], devices=["cpu"] * 2, chunks=2)(tree)
    assert torch.equal(output["a"][0], tree["a"][0] + 2) and torch.equal(output["a"][1], tree["a"][1])
    assert output["n"] == 2 and output["s"] is None


@pytest.mark.parametrize("checkpoint", MODES)
def test_integers_first_and_tensors_twice(checkpoint):
    class Pair(nn.Module):
        def forward(self, x):
            return (x.detach().long(), x, x, torch.tensor([False]))

    class Sum(nn.Module):
        def forward(self, pair):
            return pair[0] + pair[1] * pair[2]

    piped = GPipe(nn.Sequential(Pair(), Sum()), [1, 1], devices=["cpu"] * 2, chunks=2, checkpoint=checkpoint)
    x = torch.linspace(1, 4, 4).requires_grad_()
    y = piped(x)
    y.sum().backward()
    assert torch.equal(y, x.long() + x * x)
    assert torch.equal(x.grad, 2 * x)


@pytest.mark.parametrize(("batch", "chunks", "expected"), [(7, 4, [2, 2, 2, 1]), (2, 5, [1, 1]), (5, 1, [5])])
def test_uneven_and_fewer_chunks(batch, chunks, expected):
    sizes = []

    class Size(nn.Module):
        def forward(self, x):
            sizes.append(len(x))
            return x

    piped = GPipe(nn.Sequential(Size(), nn.Identity()), [1, 1], devices=["cpu"] * 2, chunks=chunks)
    x = torch.rand(batch, 1)
    assert torch.equal(piped(x), x)
    assert sizes == expected


def test_python_autograd_functions():
    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x

        @staticmethod
        def backward(ctx, grad):
            return grad

    class M(nn.Module):
        def forward(self, x):
            return Identity.apply(x)

    x = torch.rand(42)
    for chunks in (1, 2):
        piped = GPipe(
            nn.Sequential(M(), M()), [1, 1], devices=["cpu"] * 2, chunks=chunks, checkpoint="always"
        )
        assert torch.equal(piped(x), x)


def test_double_backward_without_checkpointing():
    plain = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    piped = GPipe(copy.deepcopy(plain), [1, 2], devices=["cpu"] * 2, chunks=2, checkpoint="never")
    results = []
    for model in (plain, piped):
        x = torch.linspace(0, 1, 12).view(4, 3).requires_grad_()
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        grad.square().sum().backward()
        results.append(x.grad)
    torch.testing.assert_close(*results)


def test_backward_twice():
    piped = GPipe(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), [1, 1], devices=["cpu"] * 2, chunks=2)
    y = piped(torch.ones(2, 1)).sum()
    y.backward(retain_graph=True)
    once = piped[0].weight.grad.clone()
    y.backward()
    assert torch.equal(piped[0].weight.grad, 2 * once)


def test_threads_end():
    before = threading.active_count()
    piped = GPipe(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), [1, 1], devices=["cpu"] * 2, chunks=2)
    for _ in range(5):
        piped(torch.rand(2, 1)).sum().backward()
    assert threading.active_count() == before
