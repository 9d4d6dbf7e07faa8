"""Compiled modules and what happens at a call of one."""

from intarsia.runtime.compiled import Compiled as Compiled
from intarsia.runtime.partly import PartlyCompiled as PartlyCompiled
