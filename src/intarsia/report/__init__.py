"""Reports: what would run where, and why."""

from intarsia.report.explain import Explanation as Explanation
from intarsia.report.explain import explain as explain
