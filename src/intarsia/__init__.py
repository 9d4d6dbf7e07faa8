"""Intarsia: cut a model into pieces, give each to the engine that runs it best, inlay them as one module."""

from intarsia.capture.annotate import run_on as run_on
from intarsia.capture.input import Input as Input
from intarsia.choose import Measured as Measured
from intarsia.compile import compile as compile
from intarsia.convert import ConverterPriority as ConverterPriority
from intarsia.convert import converter as converter
from intarsia.convert import enforce_tensor_types as enforce_tensor_types
from intarsia.engines import OnnxRuntime as OnnxRuntime
from intarsia.engines import OpenVINO as OpenVINO
from intarsia.engines import PyTorch as PyTorch
from intarsia.lower.decompositions import register_decomposition as register_decomposition
from intarsia.report import explain as explain
from intarsia.runtime import Compiled as Compiled
from intarsia.runtime import PartlyCompiled as PartlyCompiled

__version__ = "0.1.0"
