"""`CompileOptions`: the options of a compile, checked once and shared by every entry point."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from intarsia.capture.input import further_calls
from intarsia.choose.measured import SHORTENING_S, Measured, Precision, allowed_arithmetic, is_number
from intarsia.engines import Engine, resolve_engines
from intarsia.errors import InputError, check_option_names
from intarsia.partition import PartitionOptions, Strategy, find_strategy
from intarsia.partition.options import PartitionChoices, partition_options
from intarsia.rewrite import Patterns
from intarsia.rewrite.apply import as_list

Engines = Sequence[Engine | str] | Engine | str | None
Partition = str | Strategy | Measured | None
Fallback = Literal["parts", "eager", "error"]


class CompileKeywords(PartitionChoices, total=False):
    """The options as keyword arguments of `compile`, and of functions that compile."""

    engines: Engines
    partition: Partition
    precision: Precision | None
    tolerance: float | None
    examples: Sequence[Sequence[Any]]
    options: PartitionOptions | None
    rewrite: Patterns
    verify: bool
    cuda_graphs: bool | Literal["static"] | None
    build_limit_s: float | None
    fallback: Fallback


@dataclass(frozen=True)
class Accuracy:
    """How exact the results must be, and how this is checked.

    Args:
        precision: the only shorter arithmetic that engines may use, "fp32" for none. None allows any, and
            measuring decides.
        tolerance: the largest error of results, as a share of the largest value (in each row of a batch).
            None allows only what rounding in the model's own arithmetic causes.
        examples: further calls on which the error is measured, as positional arguments.
        verify: whether everything that is built is compared with the model.
    """

    precision: Precision | None = None
    tolerance: float | None = None
    examples: Sequence[Sequence[Any]] = ()
    verify: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.verify, bool):
            raise InputError(f"verify={self.verify!r}; give True or False")
        allowed_arithmetic(self.precision, self.tolerance, verify=self.verify)
        further_calls(self.examples, {})


@dataclass(frozen=True)
class Placement:
    """What decides which engine runs which node: a measurement on this machine, or a strategy.

    `by_default` says that the user did not ask to measure. Then small models are not measured, and engines
    that are slow to build are not used for them.
    """

    strategy: Strategy
    measured: Measured | None = None
    by_default: bool = False


@dataclass(frozen=True)
class CompileOptions:
    """The options of one compile, which `compile` documents. Invalid values raise InputError.

    >>> CompileOptions.of(tolerance=0.02).accuracy.tolerance
    0.02
    >>> CompileOptions.of(fallback="part")
    Traceback (most recent call last):
    ...
    intarsia.errors.InputError: fallback='part'; give 'parts', 'eager' or 'error'
    """

    engines: Engines = None
    partition: Partition = None
    limits: PartitionOptions = field(default_factory=PartitionOptions)
    accuracy: Accuracy = field(default_factory=Accuracy)
    rewrite: Patterns = None
    cuda_graphs: bool | Literal["static"] | None = None
    build_limit_s: float | None = 600.0
    fallback: Fallback = "parts"

    def __post_init__(self) -> None:
        if self.fallback not in get_args(Fallback):
            raise InputError(f"fallback={self.fallback!r}; give 'parts', 'eager' or 'error'")
        limit = self.build_limit_s
        if limit is not None and (not is_number(limit) or not limit > 0):
            raise InputError(f"build_limit_s={limit!r}; give seconds, or None for no limit")
        if not (self.rewrite is None or isinstance(self.rewrite, bool)):
            as_list(self.rewrite)
        if self.cuda_graphs not in (None, True, False, "static"):
            raise InputError(f"cuda_graphs={self.cuda_graphs!r}; give True, False, 'static' or None")
        is_measured = self.partition is None or isinstance(self.partition, Measured)
        if self.arithmetic and not is_measured:
            raise InputError(
                f"precision={self.accuracy.precision!r} needs partition=Measured(), not {self.partition!r}"
            )
        if not is_measured:
            find_strategy(self.partition)  # type: ignore[arg-type]

    @property
    def arithmetic(self) -> tuple[str, ...]:
        """The kinds of arithmetic shorter than the model's own that engines may use.

        A measurement shows which are faster. With a strategy, a tolerance only bounds the error.
        """
        accuracy, is_measured = self.accuracy, isinstance(self.partition, Measured | None)
        if accuracy.precision is None and not is_measured:
            return ()
        return allowed_arithmetic(accuracy.precision, accuracy.tolerance, verify=accuracy.verify)

    @property
    def is_strict(self) -> bool:
        """Whether a model that cannot be compiled as a whole is an error."""
        return self.fallback == "error" or self.limits.require_full_compilation

    @property
    def placement(self) -> Placement:
        """The strategy or measurement of these options.

        With a tolerance there are more candidates to build, so a measurement without a budget gets one.
        """
        if isinstance(self.partition, Measured):
            return Placement(find_strategy("dependency"), self.partition)
        if self.partition is not None:
            return Placement(find_strategy(self.partition))
        measured = Measured(budget_s=SHORTENING_S) if self.arithmetic else None
        return Placement(find_strategy("dependency"), measured)

    @classmethod
    def of(cls, **choices: Any) -> CompileOptions:
        """Options by the names of `compile`'s arguments."""
        return cls().changed(**choices)

    @classmethod
    def checked(cls, choices: Mapping[str, Any], function: str, preset: Sequence[str] = ()) -> CompileOptions:
        """The options of another function that compiles; InputError, with near names, for unknown ones.

        The function sets the options in `preset` itself. Engines are looked up at once, so that a wrong name
        is reported before a model runs.

        >>> CompileOptions.checked({"engine": "openvino"}, "tune")
        Traceback (most recent call last):
        ...
        intarsia.errors.OptionError: tune has no option 'engine'; did you mean 'engines'?
        """
        for name in choices:
            if name in (*CALL_ARGUMENTS, *preset):
                raise InputError(f"{name} is not an option of {function}, which sets it")
        check_option_names(choices, [name for name in option_names() if name not in preset], function)
        options = cls.of(**choices)
        if options.engines is not None:
            resolve_engines(options.engines)
        return options

    def changed(self, **choices: Any) -> CompileOptions:
        """A copy with some options changed, by the names of `compile`'s arguments."""
        check_option_names(choices, option_names(), "compile")
        accuracy = {name: choices.pop(name) for name in list(choices) if name in Accuracy.__annotations__}
        plain = {name: choices.pop(name) for name in list(choices) if name in _PLAIN}
        together = choices.pop("options", None)
        if together is not None or choices:
            plain["limits"] = partition_options(together, choices)  # type: ignore[arg-type]
        return replace(self, accuracy=replace(self.accuracy, **accuracy), **plain)

    def keywords(self) -> dict[str, Any]:
        """The options by the names of `compile`'s arguments."""
        plain = {name: getattr(self, name) for name in _PLAIN}
        accuracy = {name: getattr(self.accuracy, name) for name in Accuracy.__annotations__}
        return {**plain, **accuracy, "options": self.limits}


_PLAIN = ("engines", "partition", "rewrite", "cuda_graphs", "build_limit_s", "fallback")
CALL_ARGUMENTS = ("model", "args", "kwargs", "dynamic_shapes")  # arguments of `compile` that are not options


def option_names() -> list[str]:
    """The names of all options of the user's.

    >>> "engines" in option_names(), "min_block_size" in option_names(), "model" in option_names()
    (True, True, False)
    """
    return [*CompileKeywords.__annotations__]
