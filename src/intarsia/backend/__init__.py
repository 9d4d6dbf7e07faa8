"""The backend of torch.compile: `torch.compile(model, backend="intarsia")`, and a report for each graph."""

from intarsia.backend.dynamo_backend import GraphReport as GraphReport
from intarsia.backend.dynamo_backend import intarsia_backend as intarsia_backend
from intarsia.backend.dynamo_backend import reports as reports
