"""Which arithmetic engines may use: the model's own, or shorter ones within a tolerance.

Shorter arithmetic is another engine with a name of its own, so tables, mixes, archives and costs work as for
any engine. The error that counts is that of the whole against the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from intarsia.choose.measured import is_number
from intarsia.engines import Engine
from intarsia.errors import InputError

Precision = Literal["fp32", "bf16", "fp16", "int8", "int8-weights", "int4-weights"]
SHORTENING_S = 30.0  # the budget where a tolerance is given and no budget: there is more to build


def allowed_arithmetic(
    precision: Precision | None, tolerance: float | None, *, verify: bool
) -> tuple[str, ...]:
    """What besides the model's own arithmetic may be tried; nothing without a tolerance.

    With `precision="fp32"` a tolerance is a bound for engines of the model's own arithmetic, and no more.

    >>> allowed_arithmetic(None, 0.02, verify=True)
    ('bf16', 'fp16', 'int8', 'int8-weights', 'int4-weights')
    >>> allowed_arithmetic("bf16", 0.02, verify=True)
    ('bf16',)
    """
    known = get_args(Precision)
    if precision is not None and precision not in known:
        raise InputError(f"precision={precision!r} is not known; known are {', '.join(known)}")
    if tolerance is None:
        if precision in (None, "fp32"):
            return ()
        raise InputError(f"precision={precision!r} needs tolerance=, how far results may be off")
    if not is_number(tolerance) or not 0 < tolerance < 1:
        raise InputError(f"tolerance={tolerance!r} must be a share of the largest value, between 0 and 1")
    if not verify:
        raise InputError(
            f"tolerance={tolerance!r} needs verify=True: the error is found by running the model"
        )
    if precision == "fp32":
        return ()
    return (precision,) if precision is not None else known[1:]


def refuse_short_engines(engines: Sequence[Engine]) -> None:
    """Refuse to measure engines of shorter arithmetic where nothing says how far results may be off."""
    for engine in engines:
        if not engine.is_exact:
            raise InputError(
                f"{engine.name} computes in {engine.arithmetic}, and is measured within a tolerance alone:"
                " give tolerance=, or leave partition=Measured() away"
            )
