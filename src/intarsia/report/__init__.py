"""Reports about a model: where its parts would run and why, and whether a candidate computes the same."""

from intarsia.report.explain import Explanation as Explanation
from intarsia.report.explain import explain as explain
