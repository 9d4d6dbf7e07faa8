"""Rewriting of layers: patterns over a network, and the code that applies them."""

from intarsia.rewrite.apply import Benefits as Benefits
from intarsia.rewrite.apply import Patterns as Patterns
from intarsia.rewrite.apply import apply as apply
from intarsia.rewrite.apply import is_traded as is_traded
from intarsia.rewrite.apply import patterns_by_engine as patterns_by_engine
from intarsia.rewrite.check import Checked as Checked
from intarsia.rewrite.check import check_pattern as check_pattern
from intarsia.rewrite.fusions import FUSIONS as FUSIONS
from intarsia.rewrite.manager import AnalysisPatternManager as AnalysisPatternManager
from intarsia.rewrite.manager import Match as Match
from intarsia.rewrite.manager import MatchReport as MatchReport
from intarsia.rewrite.manager import RewritePatternManager as RewritePatternManager
from intarsia.rewrite.manager import rewrite_modules as rewrite_modules
from intarsia.rewrite.pattern import PatternAnalyzer as PatternAnalyzer
from intarsia.rewrite.pattern import PatternRewriter as PatternRewriter
from intarsia.rewrite.pattern import Refusal as Refusal
from intarsia.rewrite.pattern import Rule as Rule
from intarsia.rewrite.pattern import refuse as refuse
from intarsia.rewrite.pattern import rule as rule
from intarsia.rewrite.transaction import Fired as Fired
from intarsia.rewrite.transaction import RewriteLog as RewriteLog
