"""The argument MODEL of the command line: the model that it names, and an example call."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from intarsia.capture.input import resolve_call
from intarsia.checkpoint.pretrained import class_of, load_pretrained, transformers_for
from intarsia.cli import zoo
from intarsia.cli.zoo import Specimen
from intarsia.errors import InputError, first_line, near_names
from intarsia.logs import torch_logs_kept

if TYPE_CHECKING:
    from intarsia.runtime import Compiled

_FORMS = "a zoo name, FILE.py:FUNCTION, MODULE:FUNCTION, a .pt2 file, an archive, or a Hugging Face folder"
_DTYPES = ("float32", "float16", "bfloat16")
_ENGINE_FILES = (".onnx", ".xml")
_WEIGHTS = (".pt", ".pth", ".bin", ".safetensors")


def resolve(
    name: str, *, full: bool = False, ranges: Sequence[str] | None = None, dtype: str | None = None
) -> Specimen:
    """The model that `name` names, with an example call, whose sizes vary by `--range`.

    A name is looked up in this order: `file.py:function` or `package.module:function`, which returns
    `(model, args)` or `(model, args, kwargs)`; a file or folder (a `.pt2` program, an archive, a Hugging Face
    folder); an architecture of the zoo; a model type of Hugging Face, with random weights.

    >>> type(resolve("bert").model).__name__
    'BertModel'
    """
    if dtype not in (None, *_DTYPES):
        raise InputError(f"--dtype {dtype} is none of {', '.join(_DTYPES)}")
    specimen = _find(name, full, None if dtype is None else getattr(torch, dtype))
    return replace(specimen, dynamic_shapes=_dynamic_shapes(specimen, ranges)) if ranges else specimen


def _find(name: str, full: bool, dtype: torch.dtype | None) -> Specimen:
    place, colon, function = name.rpartition(":")
    path = Path(name)
    if path.is_dir():
        return _from_folder(path, dtype)
    if dtype is not None:
        raise InputError(f"--dtype is only for Hugging Face folders, and {name} is not one")
    if colon and place:
        return _from_function(name, place, function)
    if path.is_file() or path.suffix in (".pt2", ".intarsia"):
        return _from_file(path)
    if name in zoo.names():
        return zoo.specimen(name, full=full)
    if path.suffix == ".py":
        raise InputError(f"{name} names no function; write {name}:FUNCTION")
    return _from_type(name)


def compiled_file(name: str) -> Compiled | None:
    """The compiled module, if the name is a file of `intarsia.save`; None for other models."""
    path = Path(name)
    if not path.is_file() or path.suffix in (".pt2", ".py", *_ENGINE_FILES, *_WEIGHTS):
        return None
    from intarsia.archive import load

    return load(path)


def load_factory(place: str, name: str) -> Callable[..., Any]:
    """The function `name` of a Python file or module."""
    try:
        module = _imported(place)
    except InputError:
        raise
    except Exception as error:  # the user's own code
        raise InputError(f"{place} cannot be imported: {type(error).__name__}: {error}") from error
    factory = getattr(module, name, None)
    if not callable(factory):
        own = [
            key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__
        ]
        hint = near_names(name, own) or (f"; it has {', '.join(own[:6])}" if own else "")
        raise InputError(f"{place} has no function {name!r}{hint}")
    if isinstance(factory, nn.Module):
        raise InputError(f"{place}:{name} is a model; give a function that returns (model, args)")
    return factory  # type: ignore[no-any-return]


def call_factory(place: str, name: str, *args: Any) -> Any:
    """The result of the function `name` of a Python file or module."""
    try:
        return load_factory(place, name)(*args)
    except InputError:
        raise
    except Exception as error:  # the user's own code
        raise InputError(f"{place}:{name} raised {type(error).__name__}: {error}") from error


def _imported(place: str) -> Any:
    if not place.endswith(".py"):
        if "" not in sys.path:
            sys.path.insert(0, "")  # the current folder
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is None or not place.startswith(error.name):
                raise
            hint = f"; did you mean {place}.py?" if Path(f"{place}.py").is_file() else ""
            raise InputError(f"there is no module {place!r}{hint}") from error
    path = Path(place)
    if not path.is_file():
        raise InputError(f"there is no file {place}{near_names(path.name, _names_beside(path))}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # classes are looked up by their module
    if str(path.parent.resolve()) not in sys.path:
        sys.path.insert(0, str(path.parent.resolve()))  # like Python for a script
    spec.loader.exec_module(module)
    return module


def _names_beside(path: Path) -> list[str]:
    return [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []


def _from_function(name: str, place: str, function: str) -> Specimen:
    returned = call_factory(place, function)
    is_call = isinstance(returned, tuple) and len(returned) in (2, 3)
    if not is_call or not isinstance(returned[0], nn.Module | ExportedProgram):
        kind = type(returned).__name__
        raise InputError(f"{name} must return (model, args) or (model, args, kwargs), not a {kind}")
    model, args, *rest = returned
    kwargs = rest[0] if rest else {}
    if not isinstance(args, tuple | list):
        raise InputError(f"{name} returns args as a {type(args).__name__}; make it a tuple: (args,)")
    if not isinstance(kwargs, dict):
        raise InputError(f"{name} returns kwargs as a {type(kwargs).__name__}; make it a dict")
    model = model.eval() if isinstance(model, nn.Module) else model
    args, kwargs, dynamic_shapes = resolve_call(model, tuple(args), kwargs, None)  # args may be `Input`s
    return Specimen(model, tuple(args), dict(kwargs), dynamic_shapes)


_RANGE = re.compile(r"(?P<dims>[\w.]+\.\d+(?:,[\w.]+\.\d+)*)=(?P<least>\d+):(?P<most>\d*)")


def _dynamic_shapes(specimen: Specimen, ranges: Sequence[str]) -> dict[str, Any]:
    """The `dynamic_shapes` of torch.export for ranges such as `ids.0,mask.0=1:32`."""
    if specimen.dynamic_shapes is not None or isinstance(specimen.model, ExportedProgram | _CapturedModel):
        raise InputError("--range is for models with fixed sizes; this model has ranges or was exported")
    bound = inspect.signature(specimen.model.forward).bind(*specimen.args, **specimen.kwargs).arguments
    shapes: dict[str, Any] = dict.fromkeys((*bound, *specimen.kwargs))
    for number, text in enumerate(ranges):
        if (parsed := _RANGE.fullmatch(text)) is None:
            raise InputError(f"--range {text} is not of the form INPUT.DIM=MIN:MAX, such as x.0=1:32")
        least, most = int(parsed["least"]), int(parsed["most"]) if parsed["most"] else None
        if most is not None and most <= least:
            raise InputError(f"--range {text}: {most} must be more than {least}")
        size = torch.export.Dim(f"size{number}", min=least, max=most)
        for dim in parsed["dims"].split(","):
            name, _, axis = dim.rpartition(".")
            value = bound.get(name, specimen.kwargs.get(name))
            if not isinstance(value, torch.Tensor):
                tensors = [key for key in shapes if isinstance(bound.get(key), torch.Tensor)]
                hint = (
                    near_names(name, tensors)
                    or f"; they are {', '.join(tensors) or 'nested: use intarsia.Input'}"
                )
                raise InputError(f"--range {text}: {name!r} is not a tensor of the call{hint}")
            if int(axis) >= value.dim():
                raise InputError(f"--range {text}: {name} has {value.dim()} dimensions")
            actual = value.shape[int(axis)]
            if actual < least or (most is not None and actual > most):
                raise InputError(f"--range {text}: the example's {dim} = {actual} is outside of the range")
            shapes[name] = {**(shapes[name] or {}), int(axis): size}
    return shapes


def _from_file(path: Path) -> Specimen:
    if not path.is_file():
        raise InputError(f"there is no file {path}{near_names(path.name, _names_beside(path))}")
    if path.suffix == ".pt2":
        return _from_program(path)
    if path.suffix == ".py":
        raise InputError(f"{path} names no function; write {path}:FUNCTION")
    if path.suffix in _ENGINE_FILES:
        raise InputError(f"{path} is no PyTorch model; `intarsia check MODEL --against {path}` compares it")
    if path.suffix in _WEIGHTS:
        raise InputError(
            f"{path} has weights without a model; write a function that builds the model and loads them,"
            " and give FILE.py:FUNCTION"
        )
    if not zipfile.is_zipfile(path):
        raise InputError(f"{path} is not a model; give {_FORMS}")
    return _from_archive(path)


def _from_program(path: Path) -> Specimen:
    try:
        with torch_logs_kept():
            program = torch.export.load(path)
    except Exception as error:  # torch raises many types
        raise InputError(f"{path} is not a file of torch.export.save: {first_line(error)}") from error
    if program.example_inputs is None:
        raise InputError(f"{path} has no example inputs; export the model again with this version of torch")
    args, kwargs = program.example_inputs
    return Specimen(program, tuple(args), dict(kwargs))


def _from_archive(path: Path) -> Specimen:
    from intarsia.archive import load
    from intarsia.serve.interface import Interface

    compiled = load(path)
    if compiled.captured is None:
        raise InputError(f"{path} does not contain the model that it was compiled from; compile it again")
    interface = Interface.of(compiled)
    drawn = interface.example(interface.usual(), torch.Generator().manual_seed(0))
    args, kwargs = pytree.tree_unflatten(interface.prepared(drawn), compiled.lowered.in_spec)
    model = _CapturedModel(compiled.captured(), compiled.lowered.out_spec)
    return Specimen(model.eval(), tuple(args), dict(kwargs))


class _CapturedModel(nn.Module):
    """The graph that an archive was compiled from, with the signature of the model."""

    def __init__(self, graph: nn.Module, out_spec: pytree.TreeSpec) -> None:
        super().__init__()
        self.captured, self._out_spec = graph, out_spec

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        flat = self.captured(*pytree.tree_leaves((args, kwargs)))
        return pytree.tree_unflatten(list(flat), self._out_spec)


def _from_folder(path: Path, dtype: torch.dtype | None) -> Specimen:
    if not (path / "config.json").is_file():
        raise InputError(f"{path} has no config.json, so it is not a Hugging Face folder; give {_FORMS}")
    if any(path.glob("*.safetensors")) or any(path.glob("*.bin")):
        model = load_pretrained(path, dtype=dtype)
    else:
        hf = transformers_for(str(path))
        try:
            config = hf.AutoConfig.from_pretrained(path)
            model = _random(class_of(hf, config), config)
            model = model if dtype is None else model.to(dtype)
        except Exception as error:  # transformers raises many types
            raise InputError(f"transformers cannot load {path}: {first_line(error)}") from error
    return Specimen(model.eval(), (), _hugging_face_call(str(path), model))


def _from_type(name: str) -> Specimen:
    types: list[str] = []
    if importlib.util.find_spec("transformers") is not None:
        hf = transformers_for(name)
        types = list(hf.CONFIG_MAPPING)
        if name in types:
            config = hf.AutoConfig.for_model(name)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                model = _random(class_of(hf, config), config)
            return Specimen(model.eval(), (), _hugging_face_call(name, model))
    hint = near_names(name, [*zoo.names(), *types, *_names_beside(Path(name))])
    raise InputError(f"there is no model {name!r}{hint or f': give {_FORMS}'}")


def _random(kind: Any, config: Any) -> Any:
    return kind.from_config(config) if hasattr(kind, "from_config") else kind(config)


def _hugging_face_call(name: str, model: Any) -> dict[str, torch.Tensor]:
    """An example call for the model's main input, with sizes of the configuration."""
    config, main = model.config, model.main_input_name
    texts, draw = getattr(config, "text_config", config), torch.Generator().manual_seed(0)
    if main == "pixel_values":
        side = getattr(config, "image_size", None) or 224
        height, width = (side, side) if isinstance(side, int) else side
        shape = (1, getattr(config, "num_channels", 3), height, width)
        return {main: torch.randn(shape, generator=draw)}
    if main == "input_values":
        return {main: torch.randn((1, 16000), generator=draw)}
    vocabulary = getattr(texts, "vocab_size", None)
    if main != "input_ids" or vocabulary is None:
        raise InputError(
            f"{name} takes {main!r}, for which no example can be drawn; write a function that returns"
            " (model, args, kwargs), and give FILE.py:FUNCTION"
        )
    ids = torch.randint(0, vocabulary, (1, 32), generator=draw)
    call = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if getattr(config, "is_encoder_decoder", False):
        call["decoder_input_ids"] = ids[:, :8]
    return call
