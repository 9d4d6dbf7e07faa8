"""The context of an export: short stacks, torch's messages kept for the log, and fast paths traced.

While it exports, torch writes down for every node the stack of the model's code. For that it reads the whole
stack, source lines and the caller's frames included, and drops most of it, which takes a large part of
an export. Here the stack is followed only up to the innermost `forward`.

Where an export fails, torch prints the graph it has so far, and warns; the reason is in its exception, which
is told. `logging.getLogger("intarsia.torch")` has the rest at DEBUG. With TORCH_LOGS set, all is shown.

`nn.TransformerEncoder` has a fast path: in evaluation and without gradients eager packs the rows that
`src_key_padding_mask` leaves, and gives zeros for the others before the final norm. It does so only if the
padding is at the end of every row, which it asks of the values; under export it takes the other path. The
zeros are put into the graph here.
"""

from __future__ import annotations

import functools
import inspect
import io
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, TextIO

import torch
import torch.fx.proxy
from torch import nn

from intarsia.logs import TORCH_LOG, torch_logs_kept

_NAME = "CapturedTraceback"  # private to torch; where it is gone, export takes its time
_lock = threading.Lock()
_users = 0  # threads that export now
_own: Any = None  # what torch reads stacks with


@contextmanager
def short_stack_traces() -> Iterator[None]:
    """While this holds, nodes are given the end of the stack that torch gives them: the same last line."""
    global _users, _own
    with _lock:
        if not _users:
            _own = getattr(torch.fx.proxy, _NAME, None)
        if not _users and _own is not None:
            setattr(torch.fx.proxy, _NAME, _EndOfStack)
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users and _own is not None:
                setattr(torch.fx.proxy, _NAME, _own)


class _EndOfStack:
    """The part of a stack that the tracer reads: where a node was made, from the innermost `forward` inwards.

    No frame is kept: tensors of the trace would live on in it, and torch asks which of them do.
    """

    def __init__(self, frames: list[traceback.FrameSummary]) -> None:
        self.frames = frames

    @classmethod
    def extract(cls, *, skip: int = 0) -> _EndOfStack:
        frames = []
        frame: FrameType | None = sys._getframe(1 + skip)
        while frame is not None:
            code = frame.f_code
            # An empty line is not looked up, and not shown.
            frames.append(traceback.FrameSummary(code.co_filename, frame.f_lineno, code.co_name, line=""))
            frame = None if code.co_name == "forward" else frame.f_back
        return cls(frames)

    def summary(self) -> traceback.StackSummary:
        """Outermost frame first; the tracer drops its own files from it."""
        return traceback.StackSummary.from_list(self.frames[::-1])


@contextmanager
def kept_messages() -> Iterator[None]:
    """While this holds, what torch writes to stderr in this thread goes to the log."""
    if os.environ.get("TORCH_LOGS"):
        yield
        return
    stderr, thread, text = sys.stderr, threading.get_ident(), io.StringIO()
    sys.stderr = _Parted(stderr, thread, text)
    try:
        with torch_logs_kept():
            yield
    finally:
        sys.stderr = stderr
        if text.getvalue():
            TORCH_LOG.debug("torch wrote while it exported:\n%s", text.getvalue())


class _Parted:
    """stderr, but for what one thread writes."""

    def __init__(self, stream: TextIO, thread: int, text: io.StringIO) -> None:
        self._stream, self._thread, self._text = stream, thread, text

    def write(self, text: str) -> int:
        return (self._text if threading.get_ident() == self._thread else self._stream).write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def fast_paths_traced(model: nn.Module) -> Iterator[None]:
    """While this holds, every TransformerEncoder of the model gives what its fast path would."""
    encoders = [m for m in model.modules() if _has_fast_path(m) and "forward" not in vars(m)]
    for encoder in encoders:
        encoder.__dict__["forward"] = _with_zeros(encoder)
    try:
        yield
    finally:
        for encoder in encoders:
            del encoder.__dict__["forward"]


@contextmanager
def keywords_named(model: nn.Module, kwargs: Mapping[str, Any]) -> Iterator[None]:
    """While this holds, the signature of `forward` names what its **parameter takes.

    torch.export (2.13) fails with `dynamic_shapes` if a **parameter takes anything, such as
    `output_hidden_states` in transformers 5.
    """
    own = model.forward
    parameters = inspect.signature(own).parameters.values() if kwargs else ()
    plain = [p for p in parameters if p.kind is not p.VAR_KEYWORD]
    rest = [name for name in kwargs if name not in {p.name for p in plain}]
    if len(plain) == len(parameters) or not rest:
        yield
        return

    @functools.wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    named = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in rest]
    forward.__signature__ = inspect.Signature([*plain, *named])  # type: ignore[attr-defined]
    before = {name: value for name, value in vars(model).items() if name == "forward"}
    model.__dict__["forward"] = forward
    try:
        yield
    finally:
        del model.__dict__["forward"]
        model.__dict__.update(before)


def _has_fast_path(module: nn.Module) -> bool:
    if (
        not isinstance(module, nn.TransformerEncoder)
        or type(module).forward is not nn.TransformerEncoder.forward
    ):
        return False
    return bool(getattr(module, "use_nested_tensor", False)) and torch.backends.mha.get_fastpath_enabled()


def _with_zeros(encoder: Any) -> Callable[..., torch.Tensor]:
    @functools.wraps(encoder.forward)
    def forward(
        src: torch.Tensor,
        mask: torch.Tensor | None = None,
        src_key_padding_mask: torch.Tensor | None = None,
        is_causal: bool | None = None,
    ) -> torch.Tensor:
        plain = functools.partial(nn.TransformerEncoder.forward, encoder)
        if src_key_padding_mask is None or mask is not None or src.dim() != 3 or torch.is_autocast_enabled():
            return plain(src, mask, src_key_padding_mask, is_causal)
        norm, encoder.norm = encoder.norm, None
        try:
            output = plain(src, mask, src_key_padding_mask, is_causal)
        finally:
            encoder.norm = norm
        padded = (
            src_key_padding_mask if src_key_padding_mask.dtype is torch.bool else src_key_padding_mask != 0
        )
        if getattr(encoder, "mask_check", True):
            at_the_end = (padded[:, 1:] >= padded[:, :-1]).all()
            padded = padded & at_the_end
        output = output.masked_fill(padded.unsqueeze(-1), 0.0)
        return output if norm is None else norm(output)

    return forward
