"""A model in OpenVINO's compiled form, whose weights stay in a file of ours.

Integers wider than 32 bits are narrowed here: OpenVINO 2026.4 keeps their lower bits when it reads a compiled
model, so a slice to the end of a varying size (2**63 - 1) lost its last element.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np

from intarsia.engines.base import GrowingFile
from intarsia.engines.openvino import snippets
from intarsia.engines.openvino.core import core

# OpenVINO leaves weights out of what it exports if it has read them from a file: it knows their places there.
_WITHOUT_WEIGHTS = {"CACHE_MODE": "OPTIMIZE_SIZE"}
_ALIGNMENT = 64
# Reading a model, OpenVINO computes the range of indices before it has the constants: a division by one that
# is still 0 ends the process (2026.4).
_DIVISIONS = ("Mod", "FloorMod", "Divide")
_NARROW = (-(2**31), 2**31 - 1)


def export(model: Any, config: Mapping[str, Any], file: GrowingFile) -> bytes | None:
    """The model, compiled; None for one with bodies, or constants of one name, whose places cannot be told,
    and for one that OpenVINO cannot read again (Swin's, in 2026.4; integers that are divided; weights of more
    than 32 bits) or that then answers otherwise.

    The model is written as OpenVINO's own description, in which every constant is then said to lie in our
    file; read from there and compiled, it is exported without weights.
    """
    import openvino

    if any(_divides_integers(op) for op in model.get_ops()):
        return None
    constants = {op.get_friendly_name(): op for op in model.get_ops() if op.get_type_name() == "Constant"}
    if any(name in file.places and _is_wide(op) for name, op in constants.items()):
        return None
    with tempfile.TemporaryDirectory() as folder:
        described = Path(folder, "model.xml")
        openvino.serialize(model, described, os.devnull)
        tree = ElementTree.parse(described)
        found = [layer for layer in tree.iter("layer") if layer.get("type") == "Const"]
        names = Counter(str(layer.get("name")) for layer in found)
        if next(tree.iter("body"), None) is not None or names != Counter(list(constants)):
            return None
        inside = {name: op for name, op in constants.items() if name not in file.places}
        places = {**file.places, **_appended(inside, file)}
        for layer in found:
            data = layer.find("data")
            if data is None or int(data.get("size", -1)) != constants[str(layer.get("name"))].get_byte_size():
                return None
            data.set("offset", str(places[str(layer.get("name"))]))
        tree.write(described)
        read = core().read_model(described, file.path)
        compiled = snippets.compiled(read, {**config, **_WITHOUT_WEIGHTS})
        blob = bytes(compiled.export_model().getvalue())
        try:
            again, _kept = imported(memoryview(bytearray(blob)), config, file.path)
            return blob if _answer_alike(compiled, again) else None
        except Exception:  # what OpenVINO refuses of its own is not worth a file's space
            return None


def _divides_integers(op: Any) -> bool:
    return op.get_type_name() in _DIVISIONS and op.get_output_element_type(0).is_integral()


def _answer_alike(one: Any, other: Any) -> bool:
    """Whether two compiled models give the same bits for some inputs.

    Where sizes vary they are not run: OpenVINO crashes on sizes that do not fit each other, and which do is
    not told here.
    """
    if any(port.get_partial_shape().is_dynamic for port in one.inputs):
        return True
    inputs = []
    for port in one.inputs:
        shape = [size.get_length() for size in port.get_partial_shape()]
        dtype, count = port.get_element_type().to_dtype(), int(np.prod(shape))
        values = np.linspace(-1, 1, count) if np.issubdtype(dtype, np.floating) else np.zeros(count)
        inputs.append(values.astype(dtype).reshape(shape))
    answers = [model.create_infer_request().infer(inputs, share_outputs=False) for model in (one, other)]
    pairs = zip(answers[0].values(), answers[1].values(), strict=True)
    return all(np.array_equal(a, b, equal_nan=np.issubdtype(a.dtype, np.floating)) for a, b in pairs)


def _appended(constants: Mapping[str, Any], file: GrowingFile) -> dict[str, int]:
    """Put constants into the file; where each begins."""
    joined, at = bytearray(), {}
    for name, op in constants.items():
        at[name] = len(joined)
        joined += _bytes(op)
        joined += bytes(-len(joined) % _ALIGNMENT)
    start = file.append(bytes(joined)) if joined else 0
    return {name: start + place for name, place in at.items()}


def _is_wide(op: Any) -> bool:
    """Whether a constant holds integers beyond 32 bits.

    OpenVINO computes with 32. Compiling, it takes the nearest of a larger one (the end of a slice that has
    none, say); reading a compiled model it takes the lower bits (2026.4): -1 for the largest.
    """
    if op.data.dtype not in (np.int64, np.uint64, np.uint32) or op.data.size == 0:
        return False
    low, high = _NARROW
    return bool(op.data.min() < low or op.data.max() > high)


def _bytes(op: Any) -> bytes:
    raw = bytes((op.data.clip(*_NARROW).astype(op.data.dtype) if _is_wide(op) else op.data).tobytes())
    if len(raw) != op.get_byte_size():
        raise ValueError(f"{op.get_friendly_name()} has {len(raw)} bytes, not {op.get_byte_size()}")
    return raw


def imported(blob: memoryview, config: Mapping[str, Any], path: str) -> tuple[Any, object]:
    """The compiled model, and what keeps its memory alive."""
    import openvino

    array = np.frombuffer(blob, np.uint8)
    if not array.flags.writeable:
        array = array.copy()
    tensor = openvino.Tensor(array, shared_memory=True)
    settings = {**config, **_WITHOUT_WEIGHTS, "WEIGHTS_PATH": path}
    return core().import_model(tensor, "CPU", settings), (array, tensor)
