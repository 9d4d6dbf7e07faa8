"""From a model to a module whose pieces run on engines: one job with named stages, refit, and parts."""

from intarsia.compiler.api import compile as compile
