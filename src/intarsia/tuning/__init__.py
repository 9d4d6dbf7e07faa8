"""Tuning programs of other authors: their calls are recorded, and compiled programs replace their modules."""

from intarsia.tuning.archive import load as load
from intarsia.tuning.archive import save as save
from intarsia.tuning.recorded import Recorded as Recorded
from intarsia.tuning.recorded import recording as recording
from intarsia.tuning.tune import Tuned as Tuned
from intarsia.tuning.tune import tune as tune
