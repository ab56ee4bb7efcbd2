"""Quality: questions with known answers, asked of models, and how sure the difference between two is."""

from chabok.choose.quality.asking import Answered, Asker, Method
from chabok.choose.quality.questions import Question, Questions, question_of, read_questions
from chabok.choose.quality.scoring import Verdict, judge
from chabok.choose.quality.sets import SETS, is_set, read_set
from chabok.choose.quality.statistics import Paired, mcnemar, paired, wilson

__all__ = [
    "SETS",
    "Answered",
    "Asker",
    "Method",
    "Paired",
    "Question",
    "Questions",
    "Verdict",
    "is_set",
    "judge",
    "mcnemar",
    "paired",
    "question_of",
    "read_questions",
    "read_set",
    "wilson",
]
