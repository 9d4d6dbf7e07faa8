"""What is compared with a model: any callable, or a file that another runtime loads."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from intarsia.errors import EngineError, InputError
from intarsia.runtime.compiled import Compiled

Values = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Candidate:
    """Something that claims to compute what a model does.

    `call` takes the model's arguments. What a file computes is `flat`: its tensors, without the structure of
    the model's results. `inside` gives every value that a file computes on the way, by name.
    """

    name: str
    call: Callable[..., Any]
    flat: bool = False
    inside: Callable[..., Values] | None = None

    @property
    def compiled(self) -> Compiled | None:
        """The candidate as a module of this package, whose segments can be run alone."""
        return self.call if isinstance(self.call, Compiled) else None

    @property
    def recompile(self) -> Callable[[nn.Module], Callable[..., Any]] | None:
        """For a module of torch.compile, what compiles another module the same way."""
        # `dynamo_ctx` is private (torch 2.11 to 2.13); without it only the results are compared.
        context = getattr(self.call, "dynamo_ctx", None)
        return context if callable(context) and hasattr(self.call, "_orig_mod") else None


def candidate_of(given: Any, model: nn.Module) -> Candidate:
    """The candidate that a user gives: a callable, or the path of an ONNX, OpenVINO, `.pt2` or saved file."""
    if isinstance(given, str | os.PathLike):
        return _from_file(Path(given), model)
    if not callable(given):
        raise InputError(f"candidate is a {type(given).__name__}; give a callable or the path of a file")
    return Candidate(getattr(given, "__name__", type(given).__name__), given)


def _from_file(path: Path, model: nn.Module) -> Candidate:
    if not path.is_file():
        raise InputError(f"there is no file {path}")
    if path.suffix == ".onnx":
        return _flat(path, _OnnxFile(path), model)
    if path.suffix == ".xml":
        return _flat(path, _OpenvinoFile(path), model)
    if path.suffix == ".pt2":
        return Candidate(path.name, torch.export.load(path).module())
    from intarsia.archive import load

    return Candidate(path.name, load(path))


def _flat(path: Path, file: _OnnxFile | _OpenvinoFile, model: nn.Module) -> Candidate:
    def fed(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Values:
        return _by_name(path.name, file.inputs, _named(model, args, kwargs))

    def call(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
        return file.run(fed(args, kwargs))

    def inside(*args: Any, **kwargs: Any) -> Values:
        return file.run_inside(fed(args, kwargs))

    return Candidate(path.name, call, flat=True, inside=inside)


class _OnnxFile:
    """An ONNX file, as ONNX Runtime runs it on the CPU."""

    def __init__(self, path: Path) -> None:
        try:
            import onnxruntime as ort
        except ImportError as error:
            raise InputError(f"{path} needs ONNX Runtime: pip install 'intarsia[onnxruntime]'") from error
        self._path = path
        try:
            self._session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime raises classes of its own
            said = next(iter(str(error).splitlines()), "")
            raise EngineError(f"ONNX Runtime cannot load {path}: {said}") from error
        self.inputs = [item.name for item in self._session.get_inputs()]

    def run(self, values: Values) -> list[torch.Tensor]:
        return _torch(self._session.run(None, _numpy(values)))

    def run_inside(self, values: Values) -> Values:
        """Every value of the main graph; its weights are read from where the file has them."""
        import onnx
        import onnxruntime as ort

        model = onnx.load(self._path)
        # With its optimisations on, ONNX Runtime still computes all that is asked for, but fuses less.
        names = [name for node in model.graph.node for name in node.output if name]
        del model.graph.output[:]
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
        session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        made = session.run(names, _numpy(values))
        return {name: torch.from_numpy(x) for name, x in zip(names, made, strict=True) if _is_array(x)}


# Without it, OpenVINO computes in bf16 or fp16 where the processor has that.
_IN_FLOAT32 = {"INFERENCE_PRECISION_HINT": "f32"}


class _OpenvinoFile:
    """An OpenVINO model, as OpenVINO runs it on the CPU in float32."""

    def __init__(self, path: Path) -> None:
        try:
            import openvino
        except ImportError as error:
            raise InputError(f"{path} needs OpenVINO: pip install 'intarsia[openvino]'") from error
        self._core, self._path = openvino.Core(), path
        try:
            self._compiled = self._core.compile_model(self._core.read_model(path), "CPU", _IN_FLOAT32)
        except Exception as error:  # OpenVINO raises RuntimeErrors of many lines
            said = next((line for line in reversed(str(error).splitlines()) if line.strip()), "")
            raise EngineError(f"OpenVINO cannot load {path}: {said}") from error
        self.inputs = [port.get_any_name() for port in self._compiled.inputs]

    def run(self, values: Values) -> list[torch.Tensor]:
        made = self._compiled(_numpy(values))
        return _torch([made[port] for port in self._compiled.outputs])

    def run_inside(self, values: Values) -> Values:
        """What every operation computes."""
        import openvino

        model = self._core.read_model(self._path)
        kinds = ("Parameter", "Constant", "Result")
        operations = [op for op in model.get_ordered_ops() if op.get_type_name() not in kinds]
        whole = openvino.Model([op.output(0) for op in operations], model.get_parameters())
        compiled = self._core.compile_model(whole, "CPU", _IN_FLOAT32)
        made = compiled(_numpy(values))
        names = [op.get_friendly_name() for op in operations]
        arrays = [made[port].copy() for port in compiled.outputs]
        return {name: torch.from_numpy(x) for name, x in zip(names, arrays, strict=True) if _is_array(x)}


def _named(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Values:
    """The tensors of a call by the names of arguments; what is nested has a name like `pair.0`."""
    try:
        bound: Mapping[str, Any] = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):  # an exported module, say, whose forward takes anything
        bound = {**{str(place): value for place, value in enumerate(args)}, **kwargs}
    leaves, _ = pytree.tree_flatten_with_path(dict(bound))
    return {
        ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path): value
        for path, value in leaves
        if isinstance(value, torch.Tensor)
    }


def _by_name(file: str, names: Sequence[str], given: Values) -> Values:
    """The inputs of a file: those of the same names, or as many in the same order."""
    if set(names) <= set(given):
        return {name: given[name] for name in names}
    if len(names) == len(given):
        return dict(zip(names, given.values(), strict=True))
    raise InputError(f"{file} takes {', '.join(names)}; the model is called with {', '.join(given)}")


def _numpy(values: Values) -> dict[str, Any]:
    try:
        return {name: value.detach().cpu().contiguous().numpy() for name, value in values.items()}
    except TypeError as error:
        raise InputError(f"the inputs have a dtype that numpy lacks: {error}") from error


def _torch(arrays: Sequence[Any]) -> list[torch.Tensor]:
    return [torch.from_numpy(array.copy()) for array in arrays]


def _is_array(value: Any) -> bool:
    return hasattr(value, "dtype") and value.dtype.kind in "fiub"
