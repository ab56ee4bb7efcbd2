from __future__ import annotations

import hmac
import os
import stat
import tomllib
from pathlib import Path

import httpx
import pytest
from tests.cli.processes import chabok_run
from tests.server.faking import FakeLoader, serving, settings

from chabok.engine.timings import Timings
from chabok.server.auth import Account, Admission, Bucket, Caller, Keys, given_key
from chabok.server.errors import RefusedError
from chabok.server.keyfile import Limits, exposed, new_key, read_keys
from chabok.server.settings import SettingsError


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_key_is_shown_once_and_only_its_salted_hash_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    key = new_key("alice", path)
    other = new_key("bob", path)
    text = path.read_text()
    assert key.rpartition("-")[2] not in text
    assert key.split("-", 2)[2] not in text
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    keys = Keys(path, {})
    assert (keys.caller(key).name, keys.caller(other).name) == ("alice", "bob")
    tables = tomllib.loads(text)
    assert tables["alice"]["hash"].split(":")[1] != tables["bob"]["hash"].split(":")[1]


def test_keys_are_compared_in_constant_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = new_key("alice", tmp_path / "keys.toml")
    keys = Keys(tmp_path / "keys.toml", {"CHABOK_API_KEY": "x" * 32})
    calls = 0
    original = hmac.compare_digest

    def counting(a: bytes, b: bytes) -> bool:
        nonlocal calls
        calls += 1
        return original(a, b)

    monkeypatch.setattr("chabok.server.auth.hmac.compare_digest", counting)
    keys.caller(key)
    known, calls = calls, 0
    for wrong in (f"ck-{'0' * 12}-{'a' * 43}", "nonsense", key[:-1] + ("a" if key[-1] != "a" else "b")):
        calls = 0
        with pytest.raises(RefusedError):
            keys.caller(wrong)
        assert calls == known  # who is not known is compared as often as who is


@pytest.mark.parametrize("wrong", [None, "", "nonsense", "ck-000000000000-" + "a" * 43, "\udc80", "é" * 50])
def test_what_is_no_key_is_refused_with_401(tmp_path: Path, wrong: str | None) -> None:
    new_key("alice", tmp_path / "keys.toml")
    with pytest.raises(RefusedError) as caught:
        Keys(tmp_path / "keys.toml", {"CHABOK_API_KEY": "x" * 16}).caller(wrong)
    assert caught.value.status == 401
    assert caught.value.headers["WWW-Authenticate"] == "Bearer"


def test_a_single_key_may_come_from_the_environment_but_not_a_short_one() -> None:
    keys = Keys(None, {"CHABOK_API_KEY": "x" * 16})
    assert keys
    assert keys.caller("x" * 16).name == "environment"
    assert not Keys(None, {})
    with pytest.raises(SettingsError, match="at least 16 characters"):
        Keys(None, {"CHABOK_API_KEY": "secret"})


def test_a_key_is_read_from_either_header() -> None:
    assert given_key([(b"authorization", b"Bearer abc")]) == "abc"
    assert given_key([(b"authorization", b"bearer  abc ")]) == "abc"
    assert given_key([(b"x-api-key", b"abc")]) == "abc"
    assert given_key([(b"x-api-key", b"abc"), (b"authorization", b"Bearer def")]) == "def"
    assert given_key([(b"authorization", b"Basic abc")]) is None
    assert given_key([]) is None


def test_tenants_share_prefixes_only_if_they_are_told_to(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    keys = [new_key(name, path) for name in ("a", "b", "c", "d")]
    text = path.read_text()
    for name in ("c", "d"):
        text = text.replace(f"[{name}]", f'[{name}]\nprefixes = "team"')
    path.write_text(text)
    known = Keys(path, {})
    a, b, c, d = (known.caller(key).salt for key in keys)
    assert len({a, b, c}) == 3
    assert c == d
    assert "" not in (a, b, c)  # that of those without a key


def test_a_file_that_changes_is_read_again_and_a_broken_one_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    clock = Clock()
    alice = new_key("alice", path)
    keys = Keys(path, {}, clock)
    clock.now += 2
    bob = new_key("bob", path)
    assert keys.caller(bob).name == "bob"
    path.write_text("broken")
    clock.now += 2
    assert keys.caller(alice).name == "alice"
    path.unlink()
    clock.now += 2
    assert keys.caller(alice).name == "alice"
    carol = new_key("carol", path)
    clock.now += 2
    assert keys.caller(carol).name == "carol"
    with pytest.raises(RefusedError):
        keys.caller(alice)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[a]\nid = 5", "table \\[a\\]: id and hash must be as `chabok serve --new-key` writes them"),
        ("a = 5", "a must be a table"),
        ("x", "not TOML"),
        (
            "{entry}\nrequests_per_minut = 5",
            "no setting 'requests_per_minut'; did you mean requests_per_minute?",
        ),
        ("{entry}\nconcurrent = 0", "concurrent must be an integer of at least 1, not 0"),
        ("{entry}\n{again}", "its id is that of a, too"),
    ],
)
def test_what_a_file_of_keys_has_wrong_is_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "keys.toml"
    new_key("a", path)
    entry = path.read_text()
    path.write_text(text.replace("{entry}", entry).replace("{again}", entry.replace("[a]", "[b]")))
    with pytest.raises(SettingsError, match=said):
        read_keys(path)


def test_names_that_are_taken_or_odd_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    new_key("alice@example.com", path)
    with pytest.raises(SettingsError, match=r"has a key called alice@example\.com already"):
        new_key("alice@example.com", path)
    for name in ("", "a b", 'a"', "a\n", "-a", "a" * 65):
        with pytest.raises(SettingsError, match="a key's name"):
            new_key(name, path)


def test_permissions_that_let_others_at_the_keys_are_told(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    new_key("a", path)
    assert exposed(path) == ""
    path.chmod(0o644)
    assert "can be read by everybody" in exposed(path)
    path.chmod(0o662)
    assert "can be changed by others" in exposed(path)


def test_the_permissions_of_a_file_stay_when_a_key_is_added(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    new_key("a", path)
    path.chmod(0o640)
    new_key("b", path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [file.name for file in tmp_path.iterdir()] == ["keys.toml"]


# Limits.


def test_a_bucket_refills_steadily_and_says_when_there_is_enough() -> None:
    clock = Clock()
    bucket = Bucket(60, 60.0, clock)
    for _ in range(60):
        assert bucket.wait_s() == 0
        bucket.take(1)
    assert bucket.wait_s() == pytest.approx(1.0)
    clock.now += 0.5
    assert bucket.wait_s() == pytest.approx(0.5)
    clock.now += 1000
    assert bucket.wait_s(60) == 0
    bucket.take(120)
    assert bucket.wait_s() == pytest.approx(61)


def caller(limits: Limits, clock: Clock) -> Caller:
    account = Account()
    account.apply(limits, clock)
    return Caller("alice", "s", limits, account)


def test_requests_per_minute_are_limited_with_the_time_to_wait() -> None:
    clock = Clock()
    alice = caller(Limits(requests_per_minute=2), clock)
    for _ in range(2):
        with Admission(alice):
            pass
    with pytest.raises(RefusedError, match="limited to 2 requests in a minute; try again in 30 s") as caught:
        Admission(alice).__enter__()
    assert caught.value.status == 429
    assert caught.value.headers["Retry-After"] == "30"
    clock.now += 30
    with Admission(alice):
        pass


def test_requests_at_a_time_are_limited_and_refused_ones_cost_nothing() -> None:
    alice = caller(Limits(concurrent=1, requests_per_minute=5), Clock())
    with Admission(alice):
        for _ in range(10):
            with pytest.raises(RefusedError, match="1 requests at a time"):
                Admission(alice).__enter__()
    with Admission(alice):
        pass
    assert alice.account.running == 0


@pytest.mark.parametrize("name", ["tokens_per_minute", "tokens_per_day"])
def test_tokens_are_counted_when_they_are_used_and_owed_if_they_were_too_many(name: str) -> None:
    clock = Clock()
    alice = caller(Limits(**{name: 1000}), clock)
    with Admission(alice):
        alice.begin("model", 900)
        alice.ended(Timings(output_tokens=600), "stop")
    with pytest.raises(RefusedError, match="limited to 1000 tokens in"):
        Admission(alice).__enter__()
    clock.now += 60 if name == "tokens_per_minute" else 86400
    with Admission(alice):
        pass


def test_what_was_used_stays_used_when_the_file_is_read_again_unless_the_limit_changed() -> None:
    clock = Clock()
    account = Account()
    account.apply(Limits(requests_per_minute=5), clock)
    account.buckets["requests_per_minute"].take(5)
    account.apply(Limits(requests_per_minute=5), clock)
    assert account.buckets["requests_per_minute"].wait_s() > 0
    account.apply(Limits(requests_per_minute=6), clock)
    assert account.buckets["requests_per_minute"].wait_s() == 0
    account.apply(Limits(), clock)
    assert not account.buckets


def test_a_priority_above_a_keys_highest_is_lowered_to_it() -> None:
    alice = caller(Limits(priority=5), Clock())
    assert [alice.capped(asked) for asked in (-3, 5, 100)] == [-3, 5, 5]
    assert Caller().capped(100) == 100


# Over HTTP.


def test_a_server_with_keys_asks_for_them_in_the_form_of_each_interface(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    key = new_key("alice", path)
    with serving(settings(api_keys=path)) as (address, _):
        for name in ("/health", "/ready", "/"):
            assert httpx.get(address + name).status_code == 200
        for name, where in (
            ("/v1/models", ("error", "message")),
            ("/api/tags", ("error",)),
            ("/metrics", ()),
        ):
            answer = httpx.get(address + name)
            assert answer.status_code == 401
            value = answer.json()
            for part in where:
                value = value[part]
            assert not where or "needs an API key" in value
        anthropic = httpx.post(address + "/v1/messages", json={})
        assert anthropic.status_code == 401
        assert anthropic.json()["error"]["type"] == "authentication_error"
        for headers in ({"Authorization": f"Bearer {key}"}, {"x-api-key": key}):
            assert httpx.get(address + "/v1/models", headers=headers).status_code == 200
            assert httpx.get(address + "/metrics", headers=headers).status_code == 200
        assert httpx.get(address + "/v1/models", headers={"x-api-key": key + "x"}).status_code == 401


def test_limits_of_a_key_hold_over_http(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    key = new_key("alice", path)
    path.write_text(path.read_text() + 'models = ["two"]\ntokens_per_minute = 50\n')
    headers = {"Authorization": f"Bearer {key}"}
    loader = FakeLoader()
    with serving(settings("one", "two", api_keys=path), loader) as (address, _):
        listed = httpx.get(address + "/v1/models", headers=headers).json()["data"]
        assert [model["id"] for model in listed] == ["two"]
        body = {"model": "one", "prompt": "x", "max_tokens": 60}
        refused = httpx.post(address + "/v1/completions", headers=headers, json=body)
        assert refused.status_code == 403
        assert "may not use 'one'" in refused.json()["error"]["message"]
        body["model"] = "two"
        assert httpx.post(address + "/v1/completions", headers=headers, json=body).status_code == 200
        refused = httpx.post(address + "/v1/completions", headers=headers, json=body)
        assert refused.status_code == 429
        assert int(refused.headers["Retry-After"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"


def test_a_client_that_leaves_early_pays_for_what_it_had(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    key = new_key("alice", path)
    path.write_text(path.read_text() + "tokens_per_minute = 5\n")
    headers = {"Authorization": f"Bearer {key}"}
    with serving(settings(api_keys=path), FakeLoader(row_s=0.002)) as (address, server):
        body = {"prompt": "x", "max_tokens": 900, "stream": True}
        with httpx.stream("POST", address + "/v1/completions", headers=headers, json=body) as answer:
            for n, _ in enumerate(answer.iter_lines()):
                if n > 20:
                    break
        engine = server.roster.loaded()[0].llm.llm.engine
        while not engine.stats.finished["cancelled"]:
            pass
        assert httpx.get(address + "/v1/models", headers=headers).status_code == 429


# Browsers.


def test_without_keys_a_name_that_is_not_this_machines_is_refused() -> None:
    with serving(settings(allowed_hosts=("box.lan",))) as (address, _):
        port = address.rpartition(":")[2]
        for host in ("evil.com", f"evil.com:{port}", "localhost.evil.com", "127.0.0.1.evil.com", "[evil]"):
            answer = httpx.get(address + "/v1/models", headers={"Host": host})
            assert answer.status_code == 403, host
            assert answer.json()["error"]["code"] == "host_not_allowed"
        for host in ("localhost", f"LOCALHOST:{port}", "127.0.0.1", "[::1]:80", "app.localhost", "box.lan"):
            assert httpx.get(address + "/v1/models", headers={"Host": host}).status_code == 200, host


def test_without_keys_other_servers_pages_are_refused_and_the_own_page_is_not() -> None:
    with serving(settings(cors_origins=("https://app.example.com",))) as (address, _):
        for origin in ("https://evil.com", "null", "http://localhost:1", "file://"):
            answer = httpx.post(address + "/api/generate", headers={"Origin": origin}, content=b"{}")
            assert answer.status_code == 403, origin
        for origin in (address, "https://app.example.com"):
            answer = httpx.get(address + "/v1/models", headers={"Origin": origin})
            assert answer.status_code == 200
        asked = {"Origin": "https://app.example.com", "Access-Control-Request-Method": "POST"}
        allowed = httpx.options(address + "/v1/chat/completions", headers=asked)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "https://app.example.com"


def test_no_page_is_told_that_it_may_use_the_server_unless_it_was_named() -> None:
    with serving(settings()) as (address, _):
        for method in ("GET", "OPTIONS"):
            answer = httpx.request(
                method,
                address + "/v1/models",
                headers={"Origin": "https://evil.com", "Access-Control-Request-Method": "GET"},
            )
            assert "access-control-allow-origin" not in answer.headers


def test_a_key_is_made_on_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "new" / "keys.toml"
    done = chabok_run("serve", "--new-key", "alice", "--api-keys", str(path))
    assert done.returncode == 0
    assert Keys(path, {}).caller(done.stdout.strip()).name == "alice"
    assert "only time the key of alice is shown" in done.stderr
    done = chabok_run("serve", "--new-key", "alice")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert os.name == "nt" or "needs --api-keys FILE" in done.stderr
