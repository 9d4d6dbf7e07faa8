"""OpInfo samples of operators that are decomposed: exported, lowered as compiling does, run, compared."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
from tests.convert import drivers
from tests.convert.harness import REFUSED, RUNS, WRONG
from tests.convert.samples import Call, op_infos, samples, tolerance
from torch import nn
from torch.export import ExportedProgram, export
from torch.utils import _pytree as pytree

from intarsia.convert import convert, registry
from intarsia.convert.interpreter import NodeError
from intarsia.errors import EngineError, GuardError, IntarsiaError
from intarsia.lower import lower
from intarsia.network import Network

Verdict = tuple[str, str]


class _Module(nn.Module):
    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call

    def forward(self, *tensors: torch.Tensor) -> Any:
        # Engines have no complex type: what is complex leaves as a pair.
        made = self.call(*tensors)
        return [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in made]


def judge_samples(name: str, dtype: str, limit: int) -> dict[str, list[Verdict]]:
    """What becomes of an op's samples on each engine; nothing of those that cannot be exported."""
    op = op_infos()[name]
    verdicts: dict[str, list[Verdict]] = {engine: [] for engine in drivers.ENGINES}
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    for sample in samples(op, getattr(torch, dtype), limit):
        leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        inputs = tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        module = _Module(Call(op, leaves, spec))
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                program = export(module, inputs, strict=False)
                expected = module(*(t.clone() for t in inputs))
            except Exception:  # control flow on data, ...: nobody can compile it
                continue
        net = _network(program)
        for engine in drivers.ENGINES:
            if isinstance(net, str):
                verdicts[engine].append((REFUSED, net))
            else:
                verdicts[engine].append(_judge(name, net, inputs, expected, engine))
    return verdicts


def _network(program: ExportedProgram) -> Network | str:
    """What the program is converted to, or why it is not."""
    try:
        return convert(lower(program, registry.__contains__).module)
    except NodeError as error:
        return f"{error.node.target}: {error.reason}"
    except IntarsiaError as error:
        return str(error)


def _judge(name: str, net: Network, inputs: Any, expected: Any, engine: str) -> Verdict:
    try:
        run = drivers.build(engine, net)
    except EngineError as error:
        return REFUSED, drivers.told(error)
    try:
        made = run(*inputs)
        for have, want in zip(made, expected, strict=True):
            rtol, atol = tolerance(name, want.dtype)
            torch.testing.assert_close(have, want, rtol=rtol, atol=atol, equal_nan=True)
    except GuardError as error:  # PyTorch answers such a call
        return REFUSED, f"left to PyTorch: {error}"
    except Exception as error:  # the engine took the network, so whatever goes wrong now reaches the user
        return WRONG, " ".join(str(error).split())[:300]
    return RUNS, ""
