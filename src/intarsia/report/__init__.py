"""Reports: what would run where, and why."""

from intarsia.report.explain import explain as explain
from intarsia.report.explanation import Explanation as Explanation
