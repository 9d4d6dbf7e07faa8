"""Engines as the harness uses them: built once a network, errors in the engine's own words."""

from __future__ import annotations

import functools
import hashlib
import re
from importlib.util import find_spec

from intarsia.engines import MNN, NetworkEngine, OnnxRuntime, OpenVINO, Program
from intarsia.errors import EngineError
from intarsia.network import Network

# Those at hand: a machine with a GPU may lack OpenVINO.
ENGINES = tuple(name for name in ("onnxruntime", "openvino") if find_spec(name) is not None)
# With those that take a part of the layers only: they must refuse the rest, and be right.
ALL_ENGINES = (*ENGINES, *(["mnn"] if find_spec("MNN") is not None else []))
_KEPT = 256
_programs: dict[tuple[str, str], Program | EngineError] = {}


@functools.cache
def engine_of(name: str) -> NetworkEngine:
    """The engine on one thread, so that runs do not depend on the machine."""
    return {"onnxruntime": OnnxRuntime, "openvino": OpenVINO, "mnn": MNN}[name](threads=1)


def build(engine: str, net: Network) -> Program:
    """A program of the network, remembered by its content; EngineError if the engine refuses it.

    Compiling probes before it builds. To ask OpenVINO takes as long as to build: here it is asked for its
    reason where building fails. test_opinfo.py asks about all that was built at once.
    """
    content = net.to_onnx().SerializeToString()
    key = (engine, hashlib.sha256(content).hexdigest())
    if key not in _programs:
        if len(_programs) >= _KEPT:
            _programs.clear()
        try:
            _programs[key] = engine_of(engine).build(net)
        except EngineError as error:
            reason = engine_of(engine).probe(net)
            _programs[key] = error if reason is None else EngineError(reason)
    found = _programs[key]
    if isinstance(found, EngineError):
        raise found
    return found


def told(error: Exception) -> str:
    """An engine's error without positions and names, so that equal causes read equal."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = (lines or [type(error).__name__])[0 if "ONNXRuntimeError" in str(error) else -1]
    text = re.sub(r"\[ONNXRuntimeError\] : \d+ : (\w+) : ", r"\1: ", text)
    text = re.sub(r" node with name '[^']*'| Name:'[^']*'", "", text)
    return text[:240]
