"""What a compiled module depends on, as text: a graph with edges, arguments and weights, and the process."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from intarsia.cache.machine import digest, machine_key, package_version, processor_features
from intarsia.capture.annotate import wanted_engine
from intarsia.graph.nodes import module_path, source_line
from intarsia.lower import Lowered
from intarsia.runtime.weights import tensor_digest

_PACKAGES = ("torch", "onnx", "onnx_ir", "numpy")  # engines tell their own


def of_lowered(lowered: Lowered) -> Iterator[str]:
    """A graph, with everything that a call of it depends on."""
    yield from _graph(lowered.module)
    yield repr((lowered.inputs, lowered.outputs, lowered.in_spec, lowered.out_spec))
    yield repr((lowered.input_names, lowered.guards, lowered.notes))
    yield repr(sorted((str(symbol), str(known)) for symbol, known in lowered.range_constraints.items()))
    yield from _tensors(lowered.buffers.items())
    strides = lowered.module.meta.get("strides", {})
    yield repr(sorted((str(name), tuple(value)) for name, value in strides.items()))


def _graph(module: fx.GraphModule) -> Iterator[str]:
    held: list[tuple[str, torch.Tensor]] = []
    for node in module.graph.nodes:
        value = str(_described(node.meta.get("val")))
        where = (module_path(node), source_line(node), wanted_engine(node))
        yield repr((node.op, node.name, str(node.target), _argument(node.args), _argument(node.kwargs)))
        yield repr((value, where))
        if node.op == "get_attr":
            attribute: Any = functools.reduce(getattr, str(node.target).split("."), module)
            if isinstance(attribute, torch.Tensor):
                held.append((str(node.target), attribute))
            elif isinstance(attribute, fx.GraphModule):
                yield from _graph(attribute)
            else:
                raise Unknowable(f"{node.target} is a {type(attribute).__name__}")
    yield from _tensors(held)


class Unknowable(Exception):
    """Something has no text that tells it from all others."""


def _argument(value: Any) -> str:
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}({','.join(map(_argument, value))})"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key!r}:{_argument(item)}' for key, item in value.items())}}}"
    if isinstance(value, slice):
        return f"slice{_argument((value.start, value.stop, value.step))}"
    plain = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
    if value is None or value is Ellipsis or isinstance(value, plain):
        return f"{type(value).__name__} {value!r}"
    raise Unknowable(f"an argument is a {type(value).__name__}")


def _described(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_described(item) for item in value]
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        return value.dtype, str(value.device), *map(str, value.shape), "strides", *map(str, value.stride())
    return type(value).__name__, str(value)


def of_values(tree: Any) -> Iterator[str]:
    """Values and their structure, tensors by their contents."""
    leaves, structure = pytree.tree_flatten(tree)
    yield repr(structure)
    tensors = [(str(place), leaf) for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    yield from _tensors(tensors)
    yield from (_argument(leaf) for leaf in leaves if not isinstance(leaf, torch.Tensor))


def _tensors(named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[str]:
    items = list(named)
    with ThreadPoolExecutor(max(1, torch.get_num_threads())) as pool:  # hashing lets other threads run
        yield from pool.map(lambda item: f"{item[0]}: {_tensor(item[1])}", items)


def _tensor(tensor: torch.Tensor) -> str:
    tensor = tensor.detach()
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
        raise Unknowable(f"a tensor of layout {tensor.layout} on {tensor.device}")
    return f"{tensor.stride()} {tensor_digest(tensor)}"


def of_process() -> Iterator[str]:
    """This machine, the versions on it, and settings that decide how torch computes."""
    yield f"{machine_key()}, {processor_features()}, {_sources()}"
    yield ", ".join(f"{name} {package_version(name)}" for name in _PACKAGES)
    settings = sorted(item for item in os.environ.items() if item[0].startswith(("INTARSIA_", "ORT_", "OV_")))
    yield repr([item for item in settings if not item[0].startswith("INTARSIA_CACHE")])
    yield repr(
        (
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
            torch.backends.mkldnn.enabled,
            torch.get_default_dtype(),
            torch.backends.mha.get_fastpath_enabled(),
        )
    )


@functools.cache
def _sources() -> str:
    """What this package's own files are: a version may be edited where it stands."""
    root = Path(__file__).parents[1]
    files = [(str(p.relative_to(root)), p.stat().st_size, p.stat().st_mtime_ns) for p in root.rglob("*.py")]
    return digest(repr(sorted(files)))
