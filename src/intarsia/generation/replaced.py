"""A module's `forward` that is answered in part by something compiled, with one warning of each kind."""

from __future__ import annotations

import re
import threading
import warnings
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import nn

from intarsia.errors import InputError, StaleWeightsError
from intarsia.runtime.placed import PlacedForward


class ReplacedForward(PlacedForward, ABC):
    """Asks `answer` first, which gives what the module would, or a sentence that says why it cannot."""

    runs: dict[str, int]  # who answered; "own" is the module's own forward

    def __init__(self, path: str, module: nn.Module) -> None:
        super().__init__(path, module, ())
        self._told: set[str] = set()
        self._here = threading.local()  # whether a program runs, which may be the module itself

    @abstractmethod
    def answer(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the module returns; or, as a string, why its own forward has to be asked."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if getattr(self._here, "answers", False) or torch.compiler.is_compiling():
            return self.own(*args, **kwargs)
        told: str | None = None
        if self.enabled and not self.module.training and not torch.is_grad_enabled() and not _autocast():
            try:
                self.check_fresh()
                self._here.answers = True
                made = self.answer(args, kwargs)
                if not isinstance(made, str):
                    return made
                told = made
            except StaleWeightsError as error:
                self.enabled: bool = False
                told = str(error)
            except InputError as error:  # nothing was written yet
                told = str(error)
            finally:
                self._here.answers = False
        self.runs["own"] += 1
        kind = re.sub(r"\d+", "", told or "")  # one warning of a kind, not one for each token
        if told is not None and kind not in self._told:
            self.refused = told
            self._told.add(kind)
            warnings.warn(f"{self.path} runs in PyTorch for this call: {told}", stacklevel=2)
        return self.own(*args, **kwargs)


def _autocast() -> bool:
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
