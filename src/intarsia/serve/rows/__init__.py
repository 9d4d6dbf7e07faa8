"""Whether the rows of a batch are computed apart, so that requests may share a call."""

from intarsia.serve.rows.walk import mixing as mixing
