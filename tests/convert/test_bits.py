"""The same bits as another dtype: bytes run, the rest is refused with a reason."""

from __future__ import annotations

import pytest
import torch
from tests.convert import drivers
from tests.convert.one_node import answers, network_of

from intarsia.convert.interpreter import NodeError

view = torch.ops.aten.view.dtype
BYTES = torch.arange(256).to(torch.uint8)


@pytest.mark.parametrize("engine", drivers.ENGINES)
def test_bytes(engine: str) -> None:
    for x, dtype in (
        (BYTES, torch.int8),
        (BYTES.view(torch.int8), torch.uint8),
        (BYTES > 3, torch.uint8),
        (BYTES > 3, torch.int8),
        (BYTES, torch.uint8),
    ):
        have, want = answers(view, x, dtype, engine=engine)
        assert torch.equal(have, want)


@pytest.mark.parametrize(
    ("source", "target"),
    [(torch.float32, torch.int32), (torch.int64, torch.float32), (torch.uint8, torch.bool)],
)
def test_other_bits_are_refused(source: torch.dtype, target: torch.dtype) -> None:
    with pytest.raises(NodeError, match=r"the bits of \w+ as \w+ are not handled"):
        network_of(view, torch.ones(4, dtype=source), target)
