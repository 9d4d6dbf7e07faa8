"""Compiled modules and what happens at a call of one."""

from intarsia.runtime.compiled import Compiled as Compiled
from intarsia.runtime.forwards import PartlyCompiled as PartlyCompiled
