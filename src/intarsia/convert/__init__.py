"""FX nodes to layers: the converter registry and the interpreter that uses it."""

from intarsia.convert import aten as aten
from intarsia.convert.context import ConversionContext as ConversionContext
from intarsia.convert.context import enforce_tensor_types as enforce_tensor_types
from intarsia.convert.evaluators import evaluator as evaluator
from intarsia.convert.interpreter import NodeError as NodeError
from intarsia.convert.interpreter import convert as convert
from intarsia.convert.registry import ConverterPriority as ConverterPriority
from intarsia.convert.registry import converter as converter
from intarsia.convert.registry import registry as registry
