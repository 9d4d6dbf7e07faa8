"""A network in MNN's own form, made by MNN's converter in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from intarsia.engines.mnn.layers import written_out
from intarsia.errors import EngineError
from intarsia.network import Network
from intarsia.network.serialize import to_proto

# `MNN.tools`, the documented wrapper of the converter, installs a package when it is imported and reports
# each conversion to a server (MNN 3.6). The library below it, `_tools`, does neither. It prints, and it
# ends the process where a check of its own fails, so it runs in a process of its own.
_CODE = "import sys, _tools; sys.exit(0 if _tools.mnnconvert(sys.argv) else 3)"
_MOST_BYTES = 2**31 - 1  # of a protobuf


def converted(net: Network, timeout_s: float = 600.0) -> bytes:
    """The network as MNN's file holds it; EngineError with what the converter printed where it fails."""
    proto, _weights = to_proto(net, weights_outside=False)
    written_out(net, proto)
    if proto.ByteSize() > _MOST_BYTES:
        raise EngineError(f"the network has {proto.ByteSize()} bytes; MNN's converter reads {_MOST_BYTES}")
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "model.onnx"), Path(folder, "model.mnn")
        source.write_bytes(proto.SerializeToString())
        files = ["--modelFile", str(source), "--MNNModel", str(target)]
        output = _run(["mnnconvert", "-f", "ONNX", "--bizCode", "intarsia", *files], timeout_s)
        if not target.exists() or not target.stat().st_size:
            raise EngineError(f"MNN's converter refuses {net.name}: {_reason(output)}")
        return target.read_bytes()


def _run(arguments: Sequence[str], timeout_s: float) -> str:
    """What the converter prints."""
    command = [sys.executable, "-P", "-c", _CODE, *arguments[1:]]
    try:
        run = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return f"it took longer than {timeout_s:.0f} s"
    text = run.stdout.decode(errors="replace")
    return text if run.returncode >= 0 else f"{text}\nit ended with signal {-run.returncode}"


def _reason(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    telling = [line for line in lines if "rror" in line or "ot support" in line or "signal" in line]
    return (telling or lines or ["it wrote no file"])[-1]
