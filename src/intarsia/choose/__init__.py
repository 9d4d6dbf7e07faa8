"""The choice of engines: candidates, their times on this machine, and the fastest plan."""

from intarsia.choose.measured import Measured as Measured
