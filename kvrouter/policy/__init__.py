"""How a worker rank is chosen: filters remove, a scorer rates, a picker chooses. All pure."""

from kvrouter.policy.candidate import Candidate, Survey, TierCredit
from kvrouter.policy.compose import Choice, Policy, build_policy, parameters_of
from kvrouter.policy.decision import Decision, NoCandidate, Rated
from kvrouter.policy.pickers import Reason

__all__ = [
    "Candidate",
    "Choice",
    "Decision",
    "NoCandidate",
    "Policy",
    "Rated",
    "Reason",
    "Survey",
    "TierCredit",
    "build_policy",
    "parameters_of",
]
