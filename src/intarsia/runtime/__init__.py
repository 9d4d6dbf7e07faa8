"""What runs when a compiled module is called."""

from intarsia.runtime.compiled import Compiled as Compiled
from intarsia.runtime.partly import PartlyCompiled as PartlyCompiled
