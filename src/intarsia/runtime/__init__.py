"""What runs when a compiled module is called."""

from intarsia.runtime.stitch import Compiled as Compiled
