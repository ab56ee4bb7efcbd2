"""Starting ``chabok`` as users do, on a model without weights."""

import os
import subprocess
import sys
from pathlib import Path

import chabok

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "tests.cli.mocked"]


def environment(**more: str) -> dict[str, str]:
    source = str(Path(chabok.__file__).parents[1])
    found = {name: value for name, value in os.environ.items() if not name.startswith("CHABOK_")}
    return found | {"PYTHONPATH": f"{source}{os.pathsep}{ROOT}", "NO_COLOR": "1"} | more


def chabok_run(*arguments: str, stdin: str | bytes = "", **env: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*COMMAND, *arguments],
        input=stdin.encode() if isinstance(stdin, str) else stdin,
        capture_output=True,
        timeout=60,
        cwd=ROOT,
        env=environment(**env),
        check=False,
    )
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())
