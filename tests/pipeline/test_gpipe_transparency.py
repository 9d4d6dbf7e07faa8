"""A pipeline gives what the plain module gives: outputs, gradients, modes that are on."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from pipeline_compare import MODES, assert_same, chunked, cuts, one_thread  # noqa: F401  (a fixture)
from torch import nn

from intarsia.pipeline import GPipe, pop, skippable, stash
from intarsia.pipeline.gpipe.skip import Namespace


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
