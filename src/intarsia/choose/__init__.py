"""Who runs what best: candidates, their times on this machine, and the plan that wins."""

from intarsia.choose.measured import Measured as Measured
