"""Whether the rows of a batch are computed apart: requests may share a call, a batch may be divided."""

from intarsia.graph.rows.walk import Doubt as Doubt
from intarsia.graph.rows.walk import doubt_about as doubt_about
from intarsia.graph.rows.walk import mixing as mixing
