"""TorchInductor."""

from intarsia.engines.inductor.engine import GPU_REWRITES as GPU_REWRITES
from intarsia.engines.inductor.engine import Inductor as Inductor
