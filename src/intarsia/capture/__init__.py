"""Model and example calls to an exported program: its inputs, the ranges of its sizes, and its guards."""

from intarsia.capture.annotate import run_on as run_on
from intarsia.capture.export import capture as capture
from intarsia.capture.input import Input as Input
from intarsia.capture.protect import evaluating as evaluating
