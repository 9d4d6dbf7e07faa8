"""What runs when a compiled module is called."""

from intarsia.runtime.compiled import Compiled as Compiled
