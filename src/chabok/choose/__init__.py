"""Choosing: speed, price and quality side by side, what speed is worth, what this machine can reach.

Everything here works on what ``chabok.measure`` measured, on published shapes of models, and on models and
endpoints alike; nothing is shown that cannot be computed again.
"""

from chabok.choose.compare import Comparison, compare, conclude
from chabok.choose.contest import Contestant, Plan
from chabok.choose.member import Member, Quality
from chabok.choose.pareto import Limit, front
from chabok.choose.quality import (
    Answered,
    Paired,
    Question,
    Questions,
    judge,
    mcnemar,
    paired,
    question_of,
    read_questions,
    read_set,
    wilson,
)

__all__ = [
    "Answered",
    "Comparison",
    "Contestant",
    "Limit",
    "Member",
    "Paired",
    "Plan",
    "Quality",
    "Question",
    "Questions",
    "compare",
    "conclude",
    "front",
    "judge",
    "mcnemar",
    "paired",
    "question_of",
    "read_questions",
    "read_set",
    "wilson",
]
