"""From a model to a module whose pieces run on engines: one job with named stages, refit, and parts."""

from intarsia.compiler.job import compile as compile
from intarsia.compiler.job import compile_whole as compile_whole
from intarsia.compiler.job import compile_with as compile_with
