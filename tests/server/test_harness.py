"""The server under the field's own evaluation harness, lm-eval, with a task of a few local questions."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.models import model_path
from tests.server.conftest import serving

from chabok.server.settings import ModelSettings, Settings

HARNESS = os.environ.get("LM_EVAL") or shutil.which("lm_eval", path=str(Path(sys.executable).parent)) or ""
"""The harness' command: beside this Python, or named by LM_EVAL."""

pytestmark = [
    pytest.mark.wide,
    pytest.mark.skipif(
        not HARNESS, reason="lm-eval is not installed: pip install 'lm-eval[api]', or set LM_EVAL"
    ),
]

COLORS = [
    {"question": "What color is the clear sky at noon?", "choices": ["blue", "green", "black"], "answer": 0},
    {"question": "What color is grass?", "choices": ["purple", "green", "white"], "answer": 1},
    {"question": "What color is fresh snow?", "choices": ["red", "brown", "white"], "answer": 2},
]
CAPITALS = [
    {"question": f"What is the capital of {country}? Answer in one word.", "answer": city}
    for country, city in (("France", "Paris"), ("Italy", "Rome"), ("Germany", "Berlin"))
]
RATED = """
output_type: multiple_choice
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_choice: "{{choices}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
WRITTEN = """
output_type: generate_until
doc_to_text: "{{question}}"
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 24, do_sample: false}
filter_list:
  - name: city
    filter: [{function: regex, regex_pattern: "(Paris|Rome|Berlin|Madrid)"}, {function: take_first}]
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


def run(
    tmp_path: Path, url: str, kind: str, task: str, lines: list[dict[str, object]], how: str
) -> dict[str, float]:
    """The harness' results of one local task."""
    tmp_path.mkdir()
    questions = tmp_path / f"{task}.jsonl"
    questions.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / f"{task}.yaml").write_text(
        f"task: {task}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {questions}}}}}\n"
        f'test_split: test\ndoc_to_target: "{{{{answer}}}}"\nmetadata: {{version: 1}}\n{how}'
    )
    method, more = {
        "local-completions": ("completions", ",tokenizer_backend=remote,tokenized_requests=False"),
        "local-chat-completions": ("chat/completions", ""),
    }[kind]
    command = [HARNESS, "run", "--model", kind, "--tasks", task, "--include_path", str(tmp_path)]
    command += ["--model_args", f"model=smollm2,base_url={url}/v1/{method},num_concurrent=2{more}"]
    command += ["--apply_chat_template"] if kind == "local-chat-completions" else []
    command += ["--output_path", str(tmp_path / "results")]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(
        command, env=os.environ | offline, capture_output=True, text=True, timeout=600, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (result,) = (tmp_path / "results").rglob("results_*.json")
    found: dict[str, float] = json.loads(result.read_text())["results"][task]
    return found


def test_the_harness_rates_choices_and_reads_answers(tmp_path: Path) -> None:
    model = ModelSettings("smollm2", str(model_path("smollm2")), preload=True)
    with serving(Settings(models=(model,), installed=False, prefix_disk=False)) as running:
        rated = run(tmp_path / "a", running.url, "local-completions", "colors", COLORS, RATED)
        written = run(tmp_path / "b", running.url, "local-chat-completions", "capitals", CAPITALS, WRITTEN)
    assert rated["acc,none"] == 1.0
    assert written["exact_match,city"] == 1.0
