"""GPipe: a sequential module, cut into stages, that runs as a pipeline."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from intarsia.pipeline.gpipe import microbatch
from intarsia.pipeline.gpipe.batchnorm import DeferredBatchNorm
from intarsia.pipeline.gpipe.keyed_random import call_layer
from intarsia.pipeline.gpipe.pipeline import Pipeline, StageResources
from intarsia.pipeline.gpipe.skip import verify_skippables
from intarsia.pipeline.gpipe.stream import indexed

_STAGED = re.compile(r"partitions\.\d+\.(.+)")


def plain_state_dict(state_dict: dict[str, Any]) -> dict[str, Any]:
    """The state dict of the plain module, from that of a pipeline.

    >>> plain_state_dict({"partitions.1.2.weight": 0})
    {'2.weight': 0}
    """
    return {_plain(key): value for key, value in state_dict.items()}


def fit_state_dict(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """A pre-hook of `load_state_dict` that renames keys of the plain module, or of another balance."""
    partitions = module.get_submodule("partitions")
    stages = {
        layer: j for j, stage in enumerate(partitions.children()) for layer, _ in stage.named_children()
    }
    renamed: dict[str, Any] = {}
    for key in [key for key in state_dict if key.startswith(prefix)]:
        plain = _plain(key.removeprefix(prefix))
        layer = plain.split(".", 1)[0]
        name = f"partitions.{stages[layer]}.{plain}" if layer in stages else key.removeprefix(prefix)
        renamed[prefix + name] = state_dict.pop(key)
    state_dict.update(renamed)


def _plain(key: str) -> str:
    staged = _STAGED.fullmatch(key)
    return staged[1] if staged else key


Device = torch.device | int | str
CHECKPOINT_MODES = ("always", "except_last", "never")


class BalanceError(ValueError):
    """The balance does not fit the module."""


def verify_module(module: nn.Module) -> None:
    """Raise unless the module is an `nn.Sequential` of distinct children."""
    if not isinstance(module, nn.Sequential):
        raise TypeError(f"only an nn.Sequential can be cut into stages, got {type(module).__name__}")
    if len(list(module.named_children())) != len(module):
        raise ValueError("the module has a child more than once; duplicate children cannot be split")


def verify_splitting(partitions: Iterable[nn.Module], devices: list[torch.device]) -> None:
    """Raise for a parameter that two devices would share, and for devices without copies between them."""
    homes: dict[int, torch.device] = {}
    for partition, device in zip(partitions, devices, strict=True):
        for parameter in partition.parameters():
            if homes.setdefault(id(parameter), device) != device:
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} is shared by stages on distinct devices "
                    f"({homes[id(parameter)]} and {device}); duplicate parameters must stay on one device"
                )
    if len(set(devices)) > 1 and not {device.type for device in devices} <= {"cpu", "cuda"}:
        raise ValueError(f"stages can be on the CPU and on CUDA devices, got {devices}")


def split_module(
    module: nn.Sequential, balance: Iterable[int], devices: list[torch.device]
) -> tuple[nn.ModuleList, list[int], list[torch.device]]:
    """Cut a module into stages with `balance` layers each, and move every stage to its device.

    >>> layers = nn.Sequential(nn.Identity(), nn.ReLU(), nn.Tanh())
    >>> partitions, _, _ = split_module(layers, [2, 1], [torch.device("cpu")] * 2)
    >>> [len(partition) for partition in partitions]
    [2, 1]
    """
    balance = list(balance)
    if len(module) != sum(balance):
        raise BalanceError(
            f"the balance {balance} covers {sum(balance)} layers, but the module has {len(module)}"
        )
    if any(count <= 0 for count in balance):
        raise BalanceError(f"every stage needs at least one layer, got the balance {balance}")
    if len(balance) > len(devices):
        raise IndexError(f"{len(balance)} stages need as many devices, got {len(devices)}")
    devices = devices[: len(balance)]
    layers = iter(module.named_children())
    partitions = nn.ModuleList()
    for count, device in zip(balance, devices, strict=True):
        partition = Layers(OrderedDict(next(layers) for _ in range(count)))
        partition.training = module.training
        partitions.append(partition.to(device))
    return partitions, balance, devices


class Layers(nn.Sequential):
    """The layers of a stage. The name of a layer is the place by which its random numbers are keyed."""

    def forward(self, input: Any) -> Any:
        """The output of the last layer."""
        for name, layer in self.named_children():
            input = call_layer(layer, name, input)
        return input


class GPipe(nn.Module):
    """Wraps an `nn.Sequential` as a pipeline of micro-batches over several devices.

    >>> model = GPipe(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)),
    ...               balance=[1, 2], devices=["cpu", "cpu"], chunks=4)
    >>> model(torch.rand(8, 4)).shape
    torch.Size([8, 2])

    Args:
        module: the sequential module. Its layers are moved, not copied.
        balance: the number of layers of each stage (`balance_by_time` finds a good balance).
        devices: the devices of the stages. By default, all CUDA devices, or the CPU if there are none.
        chunks: the number of micro-batches in a mini-batch.
        checkpoint: the micro-batches whose activations are computed again in the backward pass:
            "always", "except_last" or "never".
        deferred_batch_norm: whether running statistics are those of mini-batches.
        concurrent_backward: whether backward passes of stages on the CPU run at the same time. By default,
            they do if micro-batches are checkpointed. Stages on different GPUs always do.

    With checkpointing or concurrent backward passes, parameters get their gradients from a plain
    `backward()`. These are refused then: `torch.autograd.grad` and `backward(inputs=...)` of parameters,
    gradients of gradients, and hooks on parameters. With neither (checkpoint="never"), all of this works.
    """

    #: The number of layers of each stage.
    balance: list[int]
    #: The device of each stage. The input must be on the first, and the output is on the last.
    devices: list[torch.device]
    #: The number of micro-batches.
    chunks: int
    #: Which micro-batches are checkpointed.
    checkpoint: str

    def __init__(
        self,
        module: nn.Sequential,
        balance: Iterable[int] | None = None,
        *,
        devices: Iterable[Device] | None = None,
        chunks: int = 1,
        checkpoint: str = "except_last",
        deferred_batch_norm: bool = False,
        concurrent_backward: bool | None = None,
    ) -> None:
        super().__init__()
        chunks, checkpoint = int(chunks), str(checkpoint)
        if balance is None:
            raise ValueError(_with_advice("a balance is required"))
        if chunks <= 0:
            raise ValueError(f"the number of chunks must be positive, got {chunks}")
        if checkpoint not in CHECKPOINT_MODES:
            raise ValueError(f"checkpoint must be one of {', '.join(CHECKPOINT_MODES)}, got {checkpoint!r}")
        verify_module(module)
        verify_skippables(module)
        if deferred_batch_norm:
            module = cast(nn.Sequential, DeferredBatchNorm.convert_deferred_batch_norm(module, chunks))
        balance = list(balance)
        if devices is None:
            devices = (
                range(torch.cuda.device_count()) if torch.cuda.is_available() else ["cpu"] * len(balance)
            )
        try:
            cut = split_module(module, balance, [_device(device) for device in devices])
        except BalanceError as error:
            raise ValueError(_with_advice(str(error))) from error
        self.partitions: nn.ModuleList = cut[0]
        self.balance: list[int] = cut[1]
        self.devices: list[torch.device] = cut[2]
        self.chunks = chunks
        self.checkpoint = checkpoint
        self.concurrent_backward = concurrent_backward
        self.train(module.training)
        verify_splitting(self.partitions, self.devices)
        self._resources = StageResources(cast(Iterable[nn.Sequential], self.partitions), self.devices)
        self.register_load_state_dict_pre_hook(fit_state_dict)  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        """The number of layers."""
        return sum(self.balance)

    def __getitem__(self, index: int) -> nn.Module:
        """A layer of the module."""
        layers = list(self)
        try:
            return layers[index]
        except IndexError:
            raise IndexError(f"layer {index} of {len(layers)} does not exist") from None

    def __iter__(self) -> Iterator[nn.Module]:
        """The layers, in order."""
        for partition in self.partitions:
            yield from partition.children()

    def layers(self, module: nn.Sequential) -> dict[str, nn.Module]:
        """The layers of `module`, a module like the wrapped one, by name. See `keyed_random`."""
        return {
            name: getattr(module, name) for stage in self.partitions for name, _ in stage.named_children()
        }

    # The pipeline has put its stages on their devices.

    def cuda(self, device: Device | None = None) -> NoReturn:
        """Raise: stages cannot be moved."""
        raise _moving_denied()

    def cpu(self) -> NoReturn:
        """Raise: stages cannot be moved."""
        raise _moving_denied()

    def to(self, *args: Any, **kwargs: Any) -> GPipe:
        """Cast the parameters. Raises for a device: stages cannot be moved."""
        moves = isinstance(args[0], Device | Tensor) if args else False
        if moves or kwargs.get("device") is not None or kwargs.get("tensor") is not None:
            raise _moving_denied()
        return super().to(*args, **kwargs)

    def plain_state_dict(self) -> dict[str, Any]:
        """The state dict with the names of the wrapped module.

        >>> layers = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
        >>> list(GPipe(layers, [1, 1], devices=["cpu", "cpu"]).plain_state_dict())
        ['0.weight', '0.bias', '1.weight', '1.bias']
        """
        return plain_state_dict(self.state_dict())

    def forward(self, input: Any, sizes: Sequence[int] | None = None) -> Any:
        """Run a mini-batch through the pipeline: a tensor, or a tree of tensors, numbers and None.

        `sizes` gives the samples of each micro-batch, in place of `chunks` equal ones.
        """
        microbatch.check_tree(input, "the input")
        if not self.devices:  # an empty module is the identity
            return input
        microbatch.check_sizes(input)
        batches = microbatch.scatter(input, self.chunks, sizes)
        count = len(batches)
        for module in self.modules():
            if isinstance(module, DeferredBatchNorm):
                module.begin(count)
        stop = {"always": count, "except_last": count - 1, "never": 0}[self.checkpoint]
        pipeline = Pipeline(
            batches,
            cast(Iterable[nn.Sequential], self.partitions),
            self._resources,
            checkpoint_stop=stop if self.training else 0,
            concurrent_backward=self.concurrent_backward,
        )
        pipeline.run()
        return microbatch.gather(batches)


def _device(device: Device) -> torch.device:
    chosen = indexed(torch.device(device))
    return torch.device("cpu") if chosen.type == "cpu" else chosen


def _moving_denied() -> TypeError:
    return TypeError("the pipeline manages where its stages are; parameters and buffers cannot be moved")


def _with_advice(message: str) -> str:
    return f"""{message}

A balance can be found by profiling the module:

    from intarsia.pipeline import GPipe
    from intarsia.pipeline.balance import balance_by_time

    partitions = torch.cuda.device_count()
    sample = torch.empty(...)  # an example of a mini-batch
    balance = balance_by_time(partitions, module, sample)
    model = GPipe(module, balance, ...)
"""
