"""Autocast around a call: it changes what the model computes, and a compiled module cannot follow it."""

from __future__ import annotations

import torch

from intarsia.errors import InputError


def refuse_autocast(kind: str) -> None:
    """InputError if autocast is on around compiling for a kind of device: it would not be there at calls."""
    if kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind):
        raise InputError(
            f"{_written(kind)} is on around compiling; write it into the model's forward, where it is"
            " compiled with the rest"
        )


def under_autocast(kind: str) -> str:
    """What to say of a call under an autocast that the model was compiled without."""
    return (
        f"{_written(kind)} is on around this call, and the model itself answers differently under it; write"
        " it into the model's forward and compile that, or call the compiled module under"
        f" torch.autocast({kind!r}, enabled=False)"
    )


def _written(kind: str) -> str:
    return f"torch.autocast({kind!r}, {torch.get_autocast_dtype(kind)})"
