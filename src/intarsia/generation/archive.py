"""A model's programs for generation as one file, and their way back into a model of the same weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from torch import nn

from intarsia.archive.bundle import (
    check_member,
    check_weights,
    open_bundle,
    weight_digests,
    write_bundle,
)
from intarsia.archive.load import complaining, load_bytes
from intarsia.archive.values import Json
from intarsia.errors import ArchiveError, InputError
from intarsia.generation.anatomy import Anatomy, anatomy_of
from intarsia.generation.check import checked, worst
from intarsia.generation.encoder import EncoderForward
from intarsia.generation.forward import GeneratingForward, Programs
from intarsia.generation.generation import Generation
from intarsia.generation.loop import place
from intarsia.runtime.compiled import Compiled
from intarsia.runtime.partly import PartlyCompiled

_FORMAT, _VERSION = "intarsia-generation", 1
_KINDS = ("prompt", "masked_prompt", "token")

Program = Compiled | PartlyCompiled


def save(made: Generation, path: str | os.PathLike[str]) -> None:
    """Write all programs into one file, each with its weights; a file that fails is not left behind.

    >>> import os, tempfile
    >>> from intarsia import compile_generation, generation
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    >>> model = LlamaForCausalLM(config).eval()
    >>> path = os.path.join(tempfile.mkdtemp(), "llama.generation")
    >>> with compile_generation(model, max_length=8, engines="onnxruntime") as made:
    ...     generation.save(made, path)
    >>> print(generation.load(path, model))
    LlamaForCausalLM generates compiled, up to 8 tokens
      1 rows, prompt: on onnxruntime
      1 rows, token: on onnxruntime
    """
    told, members = packed(made.forward, "programs/")
    about: dict[str, Json] = {"weights": weight_digests(made.model), "notes": list(made.notes)}
    write_bundle(path, _FORMAT, _VERSION, {"generation": told, **about}, members)


def load(path: str | os.PathLike[str], model: nn.Module) -> Generation:
    """Let `model`, which must have the weights that the programs were made of, generate by those of a file.

    ArchiveError, and the model stays as it is, where the file or the weights do not fit.
    """
    name = type(model).__name__
    if not isinstance(model, nn.Module):
        raise InputError(f"load takes the model that a file's programs were made of, not a {name}")
    with complaining(f"{os.fspath(path)} cannot be loaded"):
        reader = open_bundle(path, _FORMAT, _VERSION)
        told = reader.manifest
        check_weights(name, model, told["weights"])
        forward, error = unpacked(name, model, told["generation"], reader.member)
        notes = tuple(map(str, told["notes"]))
    made = Generation(model, forward, error, forward.tolerance, notes)
    place(made)
    return made


def packed(forward: GeneratingForward, prefix: str) -> tuple[dict[str, Json], dict[str, Compiled]]:
    """What a file says of a forward, and its programs by the names of members."""
    if not forward.by_rows:
        raise ArchiveError(f"{forward.path} was restored, so there is nothing to save")
    members: dict[str, Compiled] = {}

    def member(kind: str, program: Program | None) -> str | None:
        if program is None:
            return None
        if not isinstance(program, Compiled):
            raise ArchiveError(f"{forward.path}: its program of a {kind} is in parts, which are not saved")
        check_member(f"{forward.path}, {kind}", program)
        members[f"{prefix}{kind}.intarsia"] = program
        return f"{prefix}{kind}.intarsia"

    rows: dict[str, Json] = {
        str(count): {kind: member(f"{kind}.{count}", getattr(programs, kind)) for kind in _KINDS}
        for count, programs in forward.by_rows.items()
    }
    encoder: Json = None
    if forward.encoder is not None:
        plain, masked = forward.encoder.plain, forward.encoder.masked
        encoder = {"plain": member("encoder", plain), "masked": member("masked_encoder", masked)}
    source = forward.anatomy.source
    told: dict[str, Json] = {
        "max_length": forward.max_length,
        "tolerance": forward.tolerance,
        "max_source": None if source is None or source.fixed else source.states,
        "anatomy": _description(forward.anatomy),
        "rows": rows,
        "encoder": encoder,
    }
    return told, members


def unpacked(
    where: str, model: nn.Module, told: Mapping[str, Any], read: Callable[[str], Any]
) -> tuple[GeneratingForward, float]:
    """The forward of a model, of programs that `read` gives by the names of members, and its error.

    It is compared with the model's own, as when it was compiled: weights do not tell all of a model.
    """
    try:
        anatomy = anatomy_of(model, told["max_length"], told["max_source"])
    except InputError as error:
        raise ArchiveError(f"{where} cannot generate by programs: {error}") from error
    if (now := _description(anatomy)) != told["anatomy"]:
        raise ArchiveError(f"{where} is {now}, and was {told['anatomy']} when it was compiled")

    def program(name: str | None) -> Compiled | None:
        return None if name is None else load_bytes(read(name))

    by_rows: dict[int, Programs] = {}
    for count, names in told["rows"].items():
        prompt, masked, token = (program(names[kind]) for kind in _KINDS)
        if token is None:
            raise ArchiveError(f"{where} has no program of a token for {count} rows")
        by_rows[int(count)] = Programs(prompt, masked, token)
    encoder = None
    if told["encoder"] is not None:
        own: Any = model
        assert anatomy.source is not None
        plain, masked = (program(told["encoder"][kind]) for kind in ("plain", "masked"))
        if plain is None:
            raise ArchiveError(f"{where} has no program of its encoder")
        encoder = EncoderForward(own.get_encoder(), anatomy, anatomy.source, plain, masked)
    made = GeneratingForward(model, anatomy, by_rows, told["max_length"], encoder)
    made.path, made.tolerance = where, told["tolerance"]
    found = worst(checked(made, rows, made.tolerance) for rows in by_rows)
    if found.fault is not None:
        raise ArchiveError(f"{where}, by the programs of the file, {found.fault}")
    return made, found.error


def _description(anatomy: Anatomy) -> str:
    """What programs were made for, as one line: keys and values, masks, dtypes, the device."""
    told = asdict(anatomy)
    told["result"] = anatomy.result.__name__
    told["device"] = anatomy.device.type
    if anatomy.source is not None:
        told["source"] = {**told["source"], "result": anatomy.source.result.__name__}
    return ", ".join(f"{name} {value}" for name, value in told.items())
