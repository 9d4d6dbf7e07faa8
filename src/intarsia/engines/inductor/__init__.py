"""TorchInductor."""

from intarsia.engines.inductor.engine import Inductor as Inductor
