"""Saving a model's programs for generation, and loading them into a model with the same weights."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torch import nn

from intarsia.archive.codec import Json
from intarsia.archive.files import check_shareable, check_weights, weight_digests
from intarsia.archive.reader import Bundle, complaining, open_bundle
from intarsia.archive.writer import BundleWriter
from intarsia.engines.building import sharing_weights
from intarsia.errors import ArchiveError, InputError
from intarsia.generation.anatomy import Anatomy, anatomy_of
from intarsia.generation.check import checked, worst
from intarsia.generation.compile import Generation
from intarsia.generation.forward import EncoderForward, GeneratingForward, Programs
from intarsia.generation.loop import place
from intarsia.runtime.compiled import Compiled
from intarsia.runtime.forwards import CompiledModel
from intarsia.runtime.weights import release_memory

_FORMAT, _VERSION = "intarsia-generation", 2
_KINDS = ("prompt", "masked_prompt", "token", "continued")


def save(generation: Generation, path: str | os.PathLike[str]) -> None:
    """Write all programs into one file, each with its weights. If saving fails, no file remains.

    >>> import os, tempfile
    >>> from intarsia import compile_generation, generation
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    >>> model = LlamaForCausalLM(config).eval()
    >>> path = os.path.join(tempfile.mkdtemp(), "llama.generation")
    >>> with compile_generation(model, max_length=8, engines="onnxruntime") as fast:
    ...     generation.save(fast, path)
    >>> print(generation.load(path, model))
    LlamaForCausalLM generates compiled, up to 8 tokens
      batch 1, prompt: on onnxruntime
      batch 1, token: on onnxruntime
    """
    bundle = BundleWriter()
    about: dict[str, Json] = {
        "generation": forward_to_json(generation.forward, bundle),
        "weights": weight_digests(generation.model),
        "notes": list(generation.notes),
    }
    bundle.write(path, _FORMAT, _VERSION, about)


def load(path: str | os.PathLike[str], model: nn.Module) -> Generation:
    """Let `model` generate with the programs of a file. It must have the weights they were compiled for.

    If the file or the weights do not fit, ArchiveError is raised and the model is not changed.
    """
    name = type(model).__name__
    if not isinstance(model, nn.Module):
        raise InputError(f"load takes the model that a file's programs were made of, not a {name}")
    complaint = f"{os.fspath(path)} cannot be loaded"
    with complaining(complaint), sharing_weights() as shared, open_bundle(path, _FORMAT, _VERSION) as bundle:
        manifest = bundle.manifest
        check_weights(name, model, manifest["weights"])
        forward, error = forward_from_json(name, model, manifest["generation"], bundle)
        notes = tuple(map(str, manifest["notes"]))
    generation = Generation(model, forward, error, forward.tolerance, (*shared.notes, *notes))
    release_memory(model)  # as after `compile_generation`
    place(generation.forward)
    return generation


def forward_to_json(forward: GeneratingForward, bundle: BundleWriter) -> dict[str, Json]:
    """The description of a forward in a file; its programs are added to the bundle."""
    if not forward.by_rows:
        raise ArchiveError(f"{forward.path} was restored; there is nothing to save")

    def add(kind: str, program: CompiledModel | None) -> str | None:
        if program is None:
            return None
        if not isinstance(program, Compiled):
            raise ArchiveError(f"{forward.path}: its program of a {kind} is in parts, which are not saved")
        check_shareable(f"{forward.path}, {kind}", program)
        return bundle.add(f"{forward.path} {kind}", program)

    rows: dict[str, Json] = {
        str(count): {kind: add(f"{kind}.{count}", getattr(programs, kind)) for kind in _KINDS}
        for count, programs in forward.by_rows.items()
    }
    encoder: Json = None
    if forward.encoder is not None:
        plain, masked = forward.encoder.plain, forward.encoder.masked
        encoder = {"plain": add("encoder", plain), "masked": add("masked_encoder", masked)}
    source = forward.anatomy.source
    return {
        "max_length": forward.max_length,
        "tolerance": forward.tolerance,
        "max_source": None if source is None or source.fixed else source.states,
        "anatomy": _description(forward.anatomy),
        "rows": rows,
        "encoder": encoder,
    }


def forward_from_json(
    where: str, model: nn.Module, description: Mapping[str, Any], bundle: Bundle
) -> tuple[GeneratingForward, float]:
    """The forward of a model with programs of the bundle, and its error.

    It is compared with the model's own forward, since equal weights do not mean equal models.
    """
    try:
        anatomy = anatomy_of(model, description["max_length"], description["max_source"])
    except InputError as error:
        raise ArchiveError(f"{where} cannot generate by programs: {error}") from error
    if (now := _description(anatomy)) != description["anatomy"]:
        raise ArchiveError(f"{where} is {now}, and was {description['anatomy']} when it was compiled")

    def program(name: str | None) -> Compiled | None:
        return None if name is None else bundle.program(name)

    by_rows: dict[int, Programs] = {}
    for count, names in description["rows"].items():
        prompt, masked, token, continued = (program(names.get(kind)) for kind in _KINDS)
        if token is None:
            raise ArchiveError(f"{where} has no program of a token for {count} rows")
        by_rows[int(count)] = Programs(prompt, masked, token, continued)
    encoder = None
    if description["encoder"] is not None:
        own: Any = model
        assert anatomy.source is not None
        plain, masked = (program(description["encoder"][kind]) for kind in ("plain", "masked"))
        if plain is None:
            raise ArchiveError(f"{where} has no program of its encoder")
        encoder = EncoderForward(own.get_encoder(), anatomy, anatomy.source, plain, masked)
    forward = GeneratingForward(model, anatomy, by_rows, description["max_length"], encoder)
    forward.path, forward.tolerance = where, description["tolerance"]
    result = worst(checked(forward, rows, forward.tolerance) for rows in by_rows)
    if result.fault is not None:
        raise ArchiveError(f"{where}, by the programs of the file, {result.fault}")
    return forward, result.error


def _description(anatomy: Anatomy) -> str:
    """What programs were compiled for, as one line: keys and values, masks, dtypes, the device."""
    facts = asdict(anatomy)
    facts["result"] = anatomy.result.__name__
    facts["device"] = anatomy.device.type
    if anatomy.source is not None:
        facts["source"] = {**facts["source"], "result": anatomy.source.result.__name__}
    return ", ".join(f"{name} {value}" for name, value in facts.items())
