"""Whether the rows of a batch are independent, so that requests can be joined and a batch can be divided."""

from intarsia.graph.rows.walk import Doubt as Doubt
from intarsia.graph.rows.walk import doubt_about as doubt_about
from intarsia.graph.rows.walk import mixing as mixing
