"""Choosing: speed, price and quality side by side, what speed is worth, what this machine can reach.

Everything here works on what ``chabok.measure`` measured, on published shapes of models, and on models and
endpoints alike; nothing is shown that cannot be computed again.
"""

from chabok.choose.agent_trace import read_turn
from chabok.choose.cold import ColdReport
from chabok.choose.compare import Comparison, compare, conclude
from chabok.choose.contest import Contestant, Plan
from chabok.choose.machine import measure_machine, measure_model
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
from chabok.choose.roofline import Machine, Prediction, WhatIf, predict, survey, what_if
from chabok.choose.shapes import Shape
from chabok.choose.swap import Measured
from chabok.choose.turn import Step, Threshold, Turn, TurnReport, examine, few

__all__ = [
    "Answered",
    "ColdReport",
    "Comparison",
    "Contestant",
    "Limit",
    "Machine",
    "Measured",
    "Member",
    "Paired",
    "Plan",
    "Prediction",
    "Quality",
    "Question",
    "Questions",
    "Shape",
    "Step",
    "Threshold",
    "Turn",
    "TurnReport",
    "WhatIf",
    "compare",
    "conclude",
    "examine",
    "few",
    "front",
    "judge",
    "mcnemar",
    "measure_machine",
    "measure_model",
    "paired",
    "predict",
    "question_of",
    "read_questions",
    "read_set",
    "read_turn",
    "survey",
    "what_if",
    "wilson",
]
