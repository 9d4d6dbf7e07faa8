"""Models quantised by pt2e: the float model, the quantised one eagerly, compiled exactly, and in integers.

    python bench/pt2e.py [bert vit resnet50] [--tolerance 0.1] [--rounds 20]

Needs `pip install torchao`, whose quantizer for x86 is taken (activations of 8 bits by tensor, weights by
channel) and shown the example once. Peers run in turns in one process; errors are against the quantised model
run eagerly.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
from bench.specimens import specimen
from torch.utils import _pytree as pytree

import intarsia
from intarsia.cli.zoo import Specimen
from intarsia.compare import relative_error
from intarsia.timing import PAUSE_S, race


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=["bert", "vit", "resnet50"])
    parser.add_argument("--tolerance", type=float, default=0.1)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"INTARSIA_CACHE": folder, "INTARSIA_CACHE_GB": "0"}
        for name in options.models:
            _measure(name, options.tolerance, options.rounds)


def _measure(name: str, tolerance: float, rounds: int) -> None:
    thing = specimen(name, full=True)
    args, kwargs = thing.args, thing.kwargs
    quantized = _quantized(thing)
    exact = intarsia.compile(quantized, args, kwargs)
    short = intarsia.compile(quantized, args, kwargs, tolerance=tolerance)
    modules: dict[str, Callable[..., Any]] = {
        "float, eager": thing.model,
        "float, compiled": intarsia.compile(thing.model, args, kwargs),
        "quantised, eager": quantized,
        "quantised, compiled": exact,
        f"quantised, tolerance={tolerance:g}": short,
    }
    with torch.no_grad():
        expected = _tensors(quantized(*args, **kwargs))
        errors = {key: relative_error(_tensors(f(*args, **kwargs)), expected) for key, f in modules.items()}
        calls = {key: lambda f=f: f(*args, **kwargs) for key, f in modules.items()}
        took = race(calls, rounds=rounds, budget_s=120.0, warmup=1, pause_s=PAUSE_S)
    print(f"{name} (within the tolerance by {', '.join(dict.fromkeys(short.plan.engines))})")
    for key, timing in took.items():
        print(f"  {key:28} {timing.median * 1e3:8.1f} ms   error {errors[key]:.1e}", flush=True)


def _tensors(value: object) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _quantized(thing: Specimen) -> torch.nn.Module:
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config())
    module = torch.export.export(thing.model, thing.args, thing.kwargs).module()
    prepared = prepare_pt2e(module, quantizer)
    with torch.no_grad():
        prepared(*thing.args, **thing.kwargs)
    made: torch.nn.Module = convert_pt2e(prepared)
    return made


if __name__ == "__main__":
    main()
