"""``python -m tests.models [NAME ...]``: fetches real test models, all by default."""

import sys

from tests.models import MODELS, model_path

for wanted in sys.argv[1:] or MODELS:
    print(wanted, model_path(wanted))
