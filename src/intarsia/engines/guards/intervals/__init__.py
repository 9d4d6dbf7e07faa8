"""Which values the tensors of a network may have."""

from intarsia.engines.guards.intervals import elementwise as elementwise
from intarsia.engines.guards.intervals import linear as linear
from intarsia.engines.guards.intervals import movement as movement
from intarsia.engines.guards.intervals.interval import Interval as Interval
from intarsia.engines.guards.intervals.interval import is_weight as is_weight
from intarsia.engines.guards.intervals.interval import layer_ranges as layer_ranges
from intarsia.engines.guards.intervals.interval import network_ranges as network_ranges
from intarsia.engines.guards.intervals.interval import range_of as range_of
from intarsia.engines.guards.intervals.interval import whole as whole
