"""GPipe's interface: its arguments, attributes, errors and container protocol."""

from __future__ import annotations

import copy
import time
from collections import OrderedDict

import pytest
import torch
from torch import nn

from intarsia.pipeline import GPipe
from intarsia.pipeline.gpipe.gpipe import BalanceError, split_module, verify_module

CPUS = ["cpu"] * 4


def linears(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(1, 1) for _ in range(count)))


def count_nodes(tensor: torch.Tensor, name: str) -> int:
    seen, todo, found = set(), [tensor.grad_fn], 0
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        found += type(node).__name__ == name
        todo += [following for following, _ in node.next_functions]
    return found


class Raise(nn.Module):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def forward(self, x):
        raise self.error


def test_container_protocol():
    layers = linears(3)
    model = GPipe(layers, [1, 2], devices=CPUS)
    assert len(model) == 3
    assert list(model) == list(layers)
    assert model[0] is layers[0] and model[-1] is layers[2]
    for index in (3, -4):
        with pytest.raises(IndexError, match=str(index)):
            model[index]


def test_attributes():
    model = GPipe(linears(3), iter([1, 2]), devices=CPUS, chunks=42.000, checkpoint="always")
    assert model.balance == [1, 2]
    assert model.devices == [torch.device("cpu")] * 2, "extra devices are dropped"
    assert model.chunks == 42 and isinstance(model.chunks, int)
    assert model.checkpoint == "always"
    assert isinstance(model.partitions, nn.ModuleList)
    assert all(isinstance(p, nn.Sequential) for p in model.partitions)
    assert list(model.state_dict())[:2] == ["partitions.0.0.weight", "partitions.0.0.bias"]
    assert "partitions.1.2.weight" in model.state_dict()


def test_defaults():
    model = GPipe(linears(1), [1], devices=["cpu"])
    assert (model.chunks, model.checkpoint) == (1, "except_last")


def test_named_children_keep_their_names():
    model = GPipe(nn.Sequential(OrderedDict(a=nn.Linear(1, 1), b=nn.Linear(1, 1))), [1, 1], devices=CPUS)
    names = [name for name, _ in model.named_modules()]
    assert "partitions.0.a" in names and "partitions.1.b" in names
    with pytest.raises(AttributeError):
        _ = model.a


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"module": nn.Module(), "balance": [1]}, TypeError, "Sequential"),
        ({"module": nn.Sequential()}, ValueError, "intarsia.pipeline.balance"),
        (
            {"module": nn.Sequential(), "balance": [1]},
            ValueError,
            r"covers 1 layers.*has 0(.|\n)*pipeline.balance",
        ),
        ({"module": linears(2), "balance": [1]}, ValueError, "covers 1 layers.*has 2"),
        ({"module": linears(2), "balance": [2, 0]}, ValueError, "at least one layer"),
        ({"module": linears(2), "balance": [3, -1]}, ValueError, "at least one layer"),
        ({"module": linears(1), "balance": [1], "chunks": 0}, ValueError, "positive, got 0"),
        ({"module": linears(1), "balance": [1], "chunks": -1}, ValueError, "positive, got -1"),
        ({"module": linears(1), "balance": [1], "checkpoint": "INVALID"}, ValueError, "INVALID"),
        ({"module": linears(5), "balance": [1] * 5}, IndexError, "5 stages.*got 4"),
    ],
)
def test_refusals(arguments, error, match):
    with pytest.raises(error, match=match):
        GPipe(devices=CPUS, **arguments)


def test_split_module_raises_balance_errors():
    with pytest.raises(BalanceError):
        split_module(linears(2), [1], [torch.device("cpu")])


def test_duplicate_children_are_refused():
    layer = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="duplicate children"):
        verify_module(nn.Sequential(layer, layer))


def test_duplicate_parameters():
    class Wrap(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return self.layer(x)

    shared = nn.Linear(2, 2)
    plain = nn.Sequential(Wrap(shared), Wrap(shared))
    model = GPipe(copy.deepcopy(plain), [1, 1], devices=["cpu", "cpu"], chunks=2)
    x = torch.rand(4, 2)
    plain(x).sum().backward()
    model(x).sum().backward()
    torch.testing.assert_close(next(model.parameters()).grad, shared.weight.grad)
    with pytest.raises(ValueError, match="duplicate parameters"):
        GPipe(plain, [1, 1], devices=["cpu", "meta"])


def test_moving_is_denied_and_casting_is_not():
    model = GPipe(linears(2), [1, 1], devices=CPUS)
    for move in (
        lambda: model.cuda(),
        lambda: model.cpu(),
        lambda: model.to(torch.device("cuda")),
        lambda: model.to(0),
        lambda: model.to("cuda"),
        lambda: model.to(device=0),
        lambda: model.to(torch.rand(1)),
        lambda: model.to(tensor=torch.rand(1)),
    ):
        with pytest.raises(TypeError, match="manages where"):
            move()
    assert model.half()[0].weight.dtype == torch.float16
    assert model.to(torch.double)[0].weight.dtype == torch.double
    assert model.to(dtype=torch.float)[0].weight.dtype == torch.float


def test_empty_module():
    model = GPipe(nn.Sequential(), [])
    assert model(torch.tensor(42)) == torch.tensor(42)
    assert model((torch.tensor(42),)) == (torch.tensor(42),)
    with pytest.raises(TypeError):
        model(42)


def test_checkpoint_nodes_are_counted_in_real_chunks():
    x = torch.rand(2, 1)
    for chunks, mode, expected in [
        (2, "always", 2),
        (2, "except_last", 1),
        (2, "never", 0),
        (8, "always", 2),
        (8, "except_last", 1),  # two micro-batches there are, whatever was asked for
        (1, "except_last", 0),
    ]:
        output = GPipe(linears(1), [1], devices=CPUS, chunks=chunks, checkpoint=mode)(x)
        assert count_nodes(output, "CheckpointBackward") == expected
        assert count_nodes(output, "RecomputeBackward") == expected


def test_no_checkpoint_in_eval():
    model = GPipe(linears(2), [1, 1], devices=CPUS, chunks=2)
    assert count_nodes(model(torch.rand(2, 1)), "CheckpointBackward") == 2
    model.eval()
    output = model(torch.rand(2, 1))
    assert output.requires_grad
    assert count_nodes(output, "CheckpointBackward") == count_nodes(output, "RecomputeBackward") == 0


def test_a_module_in_eval_stays_in_eval():
    model = GPipe(nn.Sequential(nn.Dropout(), nn.Dropout()).eval(), [1, 1], devices=CPUS)
    assert not model.training and not model.partitions[0].training


def test_wrong_inputs():
    model = GPipe(linears(2), [1, 1], devices=CPUS, chunks=2)
    x = torch.rand(4, 1)
    with pytest.raises(TypeError):
        model(x, x)
    for wrong in ("hello", (x, "hello"), None, 3, [], {"a": object(), "b": x}):
        with pytest.raises(TypeError):
            model(wrong)
    with pytest.raises(ValueError, match=r"\[4, 3\]"):
        model((x, torch.rand(3, 1)))
    with pytest.raises(ValueError, match="2 chunks"):
        model(torch.tensor(1.0))


@pytest.mark.parametrize("chunks", [1, 2])
def test_wrong_outputs(chunks):
    class Answer(nn.Module):
        def __init__(self, answer):
            super().__init__()
            self.answer = answer

        def forward(self, x):
            return self.answer(x)

    for answer in (lambda x: "hello", lambda x: (x, "hello"), lambda x: 3, lambda x: (x, object())):
        with pytest.raises(TypeError):
            GPipe(nn.Sequential(Answer(answer)), [1], devices=CPUS, chunks=chunks)(torch.rand(2))
    if chunks == 2:
        with pytest.raises(ValueError, match="without dimensions"):
            GPipe(nn.Sequential(Answer(lambda x: x.mean())), [1], devices=CPUS, chunks=2)(torch.rand(2))
        with pytest.raises(TypeError, match="disagree"):
            GPipe(nn.Sequential(Answer(lambda x: (x, len(x)))), [1], devices=CPUS, chunks=2)(torch.rand(3))


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize(
    "error", [ZeroDivisionError("zero"), KeyboardInterrupt(), SystemExit(3), GeneratorExit()]
)
def test_an_exception_reaches_the_caller(error, chunks):
    model = GPipe(
        nn.Sequential(nn.Identity(), nn.Identity(), Raise(error)), [1, 1, 1], devices=CPUS, chunks=chunks
    )
    with pytest.raises(type(error)) as caught:
        model(torch.rand(3, 1))
    assert caught.value is error
    assert "stage 2" in error.__notes__[-1] and "micro-batch 0" in error.__notes__[-1]
    assert any(entry.name == "forward" and entry.path.name == "test_gpipe.py" for entry in caught.traceback)


def test_after_an_exception_stages_stop_as_soon_as_possible():
    counter = 0

    class Counter(nn.Module):
        def forward(self, x):
            nonlocal counter
            time.sleep(0.1)
            counter += 1
            return x

    layers = nn.Sequential(nn.Identity(), nn.Identity(), Counter(), Raise(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        GPipe(layers, [1, 1, 1, 1], devices=CPUS, chunks=3)(torch.rand(3))
    assert counter == 2


def test_an_exception_in_the_recomputation_reaches_the_caller():
    class Once(nn.Module):
        def forward(self, x):
            if torch.is_grad_enabled():
                raise ZeroDivisionError("again")
            return x * 2

    model = GPipe(nn.Sequential(Once(), nn.Linear(1, 1)), [1, 1], devices=CPUS, chunks=2, checkpoint="always")
    output = model(torch.rand(2, 1))
    with pytest.raises(ZeroDivisionError, match="again") as caught:
        output.sum().backward()
    assert any("stage 0" in note for note in caught.value.__notes__)


def test_state_dict_loads_under_any_balance_and_from_the_plain_module():
    def fresh():
        return nn.Sequential(OrderedDict(a=nn.Linear(2, 2), b=nn.BatchNorm1d(2), c=nn.Linear(2, 2)))

    plain = fresh()
    two = GPipe(fresh(), [1, 2], devices=CPUS)
    three = GPipe(fresh(), [1, 1, 1], devices=CPUS)
    outer = nn.ModuleDict({"body": GPipe(fresh(), [2, 1], devices=CPUS)})
    two.load_state_dict(plain.state_dict())
    three.load_state_dict(two.state_dict())
    outer.load_state_dict({f"body.{key}": value for key, value in three.state_dict().items()})
    again = fresh()
    again.load_state_dict(outer["body"].plain_state_dict())
    for key, value in plain.state_dict().items():
        assert torch.equal(again.state_dict()[key], value)
    with pytest.raises(RuntimeError, match="Unexpected"):
        two.load_state_dict({**plain.state_dict(), "d.weight": torch.zeros(1)})
    with pytest.raises(RuntimeError, match="Missing"):
        two.load_state_dict({})


def test_other_devices():
    with pytest.raises(ValueError, match="on the CPU and on CUDA"):
        GPipe(linears(2), [1, 1], devices=["cpu", "meta"])
    layers = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout())
    model = GPipe(layers, [1, 2], devices=["meta", "meta"], chunks=2, checkpoint="always")
    output = model(torch.empty(4, 2, device="meta"))
    output.sum().backward()
    assert output.is_meta and model[0].weight.grad.is_meta


def test_a_pipeline_can_be_saved_whole(tmp_path):
    model = GPipe(linears(2), [1, 1], devices=CPUS, chunks=2)
    model(torch.rand(2, 1))
    torch.save(model, tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    x = torch.rand(4, 1)
    assert torch.equal(model(x), again(x))


def test_deepcopy_trains_alone():
    model = GPipe(linears(2), [1, 1], devices=CPUS, chunks=2)
    model(torch.rand(4, 1))
    twin = copy.deepcopy(model)
    twin(torch.rand(4, 1)).sum().backward()
    assert model[0].weight.grad is None and twin[0].weight.grad is not None
