import json

from tests.cli.processes import chabok_run


def test_doctor_tells_about_the_machine(tmp_path: object) -> None:
    done = chabok_run("doctor", CHABOK_CACHE=str(tmp_path))
    assert done.returncode == 0, done.stderr
    for word in ("CPU", "Instructions", "Cores", "Memory", "Reads", "Models", "Packed", "Kernels", "numpy"):
        assert word in done.stdout
    assert str(tmp_path) in done.stdout


def test_doctor_speaks_json() -> None:
    found = json.loads(chabok_run("doctor", "--json").stdout)
    assert found["cores"]["threads"] >= 1
    assert found["bandwidth"]["one_thread"] > 1e8
    assert found["memory"]["total"] >= found["memory"]["available"] > 0
    assert set(found["caches"]) == {"models", "packed", "kernels", "prefixes"}
