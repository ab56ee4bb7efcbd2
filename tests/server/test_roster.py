from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from tests.server.faking import MB, FakeLoader, settings

from chabok.errors import BusyError, CheckpointError, ResourceError, StoppingError, UnknownModelError
from chabok.server.auth import CALLER, Caller
from chabok.server.errors import RefusedError
from chabok.server.keyfile import Limits
from chabok.server.roster import Roster
from chabok.server.settings import ModelSettings, Settings


def run(
    test: Callable[[Roster, FakeLoader], Awaitable[None]],
    asked: Settings,
    loader: FakeLoader | None = None,
    **options: Any,
) -> None:
    loader = loader or FakeLoader()

    async def body() -> None:
        roster = Roster(asked, loader, **options)
        try:
            await asyncio.wait_for(test(roster, loader), 20)
        finally:
            loader.go.set()
            await roster.close()

    asyncio.run(body())


def models(*names: str, **values: Any) -> tuple[ModelSettings, ...]:
    values = {"context": 1024, "kv_memory": 16 * MB, **values}
    return tuple(ModelSettings(name, source=name, **values) for name in names)


def budget(n_models: int) -> int:
    """Room for so many models with one context of 1024 tokens each."""
    return n_models * 116 * MB + 10 * MB


def loaded(roster: Roster) -> set[str]:
    return {served.name for served in roster.loaded()}


def test_a_model_is_loaded_when_it_is_first_used_and_stays() -> None:
    async def test(roster: Roster, loader: FakeLoader) -> None:
        assert loader.loads == []
        for _ in range(2):
            async with roster.use("b") as served:
                assert served.name == "b"
                assert (await served.llm.generate("x", None)).timings.output_tokens > 0
        assert loader.loads == ["b"]

    run(test, Settings(models=models("a", "b")))


def test_the_first_model_is_the_default_one_and_aliases_and_latest_mean_the_same() -> None:
    async def test(roster: Roster, loader: FakeLoader) -> None:
        for name in ("", "default", "A", "alias", "a:latest", "alias:latest"):
            async with roster.use(name) as served:
                assert served.name == "a"

    run(test, Settings(models=models("a", aliases=("alias",)) + models("b")))


def test_all_who_ask_for_a_model_at_the_same_time_wait_for_one_load() -> None:
    async def test(roster: Roster, loader: FakeLoader) -> None:
        loader.go.clear()

        async def use() -> object:
            async with roster.use("a") as served:
                return served

        tasks = [asyncio.create_task(use()) for _ in range(20)]
        await asyncio.sleep(0.05)
        assert roster.entries()[0].loading
        loader.go.set()
        assert len(set(await asyncio.gather(*tasks))) == 1
        assert loader.loads == ["a"]

    run(test, Settings(models=models("a")))


def test_that_one_of_the_waiting_leaves_does_not_end_the_load_for_the_others() -> None:
    async def test(roster: Roster, loader: FakeLoader) -> None:
        loader.go.clear()

        async def use() -> str:
            async with roster.use("a") as served:
                return served.name

        first, second = asyncio.create_task(use()), asyncio.create_task(use())
        await asyncio.sleep(0.05)
        first.cancel()
        loader.go.set()
        assert await second == "a"
        assert first.cancelled()
        assert loader.loads == ["a"]

    run(test, Settings(models=models("a")))


def test_a_load_that_nobody_waits_for_any_more_is_kept_for_its_time() -> None:
    async def test(roster: Roster, loader: FakeLoader) -> None:
        loader.go.clear()

        async def use() -> None:
            async with roster.use("a"):
                pass

        task = asyncio.create_task(use())
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.sleep(0.01)
        loader.go.set()
        while not loaded(roster):
            await asyncio.sleep(0.01)
        while loaded(roster):
            await asyncio.sleep(0.01)

    run(test, Settings(models=models("a", keep_alive=0.1)))


def test_a_failed_load_says_why_and_the_next_request_tries_again() -> None:
    async def test(roster: Roster, loader: FakeLoader) -> None:
        loader.failing.add("a")
        for _ in range(2):
            with pytest.raises(CheckpointError, match="tensor 'x' is damaged"):
                async with roster.use("a"):
                    pass
        assert roster.entries()[0].error == "a.gguf: tensor 'x' is damaged"
        assert roster.load_failures == 2
        loader.failing.clear()
        async with roster.use("a") as served:
            assert served.name == "a"
        assert roster.entries()[0].error == ""
        assert loader.loads == ["a"] * 3

    run(test, Settings(models=models("a")))


def test_a_failed_load_takes_no_memory_of_the_budget() -> None:
    async def test(roster: Roster, loader: FakeLoader) -> None:
        loader.failing.add("a")
        with pytest.raises(CheckpointError):
            async with roster.use("a"):
                pass
        async with roster.use("b") as served:
            assert served.name == "b"

    run(test, Settings(models=models("a", "b"), memory_budget=budget(1)))


def test_what_was_not_used_for_longest_makes_room() -> None:
    async def test(roster: Roster, loader: FakeLoader) -> None:
        for name in ("a", "b", "a", "c"):
            async with roster.use(name):
                pass
        assert loaded(roster) == {"a", "c"}
        assert loader.models["b"].closed
        assert not loader.models["a"].closed

    run(test, Settings(models=models("a", "b", "c"), memory_budget=budget(2)))


def test_a_model_in_use_is_never_unloaded_and_who_finds_no_room_is_told_when_to_come_again() -> None:
    async def test(roster: Roster, loader: FakeLoader) -> None:
        async with roster.use("a") as served:
            with pytest.raises(BusyError, match="no room for b while other models are in use") as caught:
                async with roster.use("b"):
                    pass
            assert caught.value.retry_after_s > 0
            assert (await served.llm.generate("x", None)).timings.output_tokens > 0
        assert not await roster.unload("b") or loaded(roster) == {"a"}

    run(test, Settings(models=models("a", "b"), memory_budget=budget(1)), room_s=0.1)


def test_who_waits_for_room_gets_it_when_the_other_model_is_free() -> None:
    async def test(roster: Roster, loader: FakeLoader) -> None:
        async def use() -> None:
            async with roster.use("b"):
                assert loaded(roster) == {"b"}

        async with roster.use("a"):
            task = asyncio.create_task(use())
            await asyncio.sleep(0.1)
            assert not task.done()
            assert loaded(roster) == {"a"}
        await task
        assert loader.models["a"].closed

    run(test, Settings(models=models("a", "b"), memory_budget=budget(1)))


def test_a_model_that_can_never_fit_is_refused_with_what_it_needs() -> None:
    async def test(roster: Roster, loader: FakeLoader) -> None:
        with pytest.raises(ResourceError, match=r"a needs 116 MB, but the memory budget is 50.0 MB"):
            async with roster.use("a"):
                pass
        assert loader.loads == []

    run(test, Settings(models=models("a"), memory_budget=50 * MB))


def test_preloaded_models_are_not_unloaded_for_others() -> None:
    async def test(roster: Roster, loader: FakeLoader) -> None:
        assert roster.unready == "loading a"
        await roster.preload()
        assert roster.unready == ""
        with pytest.raises(ResourceError, match="preloaded models have"):
            async with roster.use("b"):
                pass
        async with roster.use("a", keep_alive=0):
            pass
        await asyncio.sleep(0.05)
        assert loaded(roster) == {"a"}
        assert not await roster.unload("a")

    run(test, Settings(models=models("a", preload=True) + models("b"), memory_budget=budget(1)))


def test_the_first_of_several_preloaded_models_leaves_room_for_the_others() -> None:
    async def test(roster: Roster, loader: FakeLoader) -> None:
        await roster.preload()
        assert loaded(roster) == {"a", "b", "c"}

    run(test, Settings(models=models("a", "b", "c", preload=True, kv_memory=None), memory_budget=budget(3)))


def test_the_machines_free_memory_counts_as_well_as_the_budget() -> None:
    async def test(roster: Roster, loader: FakeLoader) -> None:
        with pytest.raises(ResourceError, match=r"a needs 116 MB, but 100 MB are free"):
            async with roster.use("a"):
                pass

    run(test, Settings(models=models("a"), memory_budget=10**12), FakeLoader(available=100 * MB))


def test_the_cache_of_keys_and_values_takes_what_room_there_is_but_one_context_at_least() -> None:
    facts = FakeLoader().facts(ModelSettings("a"))
    assert facts.kv_memory(1024, None, 10**12) == 4 * 16 * MB
    assert facts.kv_memory(1024, None, 116 * MB) == 16 * MB
    assert facts.kv_memory(1024, None, 100 * MB + 4 * 40 * MB) == 40 * MB
    assert facts.kv_memory(1024, 5 * MB, 10**12) == 5 * MB


def test_a_model_is_unloaded_when_it_was_not_used_for_its_time_and_loaded_again_when_it_is() -> None:
    async def test(roster: Roster, loader: FakeLoader) -> None:
        async with roster.use("a"):
            await asyncio.sleep(0.15)
            assert loaded(roster) == {"a"}  # in use for longer than that
        expires = roster.entries()[0].expires
        assert expires is not None
        while loaded(roster):
            await asyncio.sleep(0.01)
        async with roster.use("a"):
            pass
        assert loader.loads == ["a", "a"]

    run(test, Settings(models=models("a", keep_alive=0.1)))


def test_a_request_may_say_how_long_the_model_stays() -> None:
    async def test(roster: Roster, loader: FakeLoader) -> None:
        async with roster.use("a", keep_alive=math.inf):
            pass
        assert roster.entries()[0].expires is None
        await asyncio.sleep(0.1)
        assert loaded(roster) == {"a"}
        async with roster.use("a", keep_alive=0):
            pass
        while loaded(roster):
            await asyncio.sleep(0.01)

    run(test, Settings(models=models("a", keep_alive=0.05)))


def test_who_wants_a_model_that_is_just_being_unloaded_gets_it_loaded_anew() -> None:
    async def test(roster: Roster, loader: FakeLoader) -> None:
        async with roster.use("a"):
            pass
        unloading = asyncio.create_task(roster.unload("a"))
        await asyncio.sleep(0)
        async with roster.use("a") as served:
            assert (await served.llm.generate("x", None)).timings.output_tokens > 0
        await unloading
        assert loader.loads == ["a", "a"]

    run(test, Settings(models=models("a")))


def test_an_unknown_name_is_an_error_that_names_the_nearest() -> None:
    async def test(roster: Roster, loader: FakeLoader) -> None:
        with pytest.raises(
            UnknownModelError, match=r"no model is called 'smolm' here; did you mean smollm\?"
        ):
            async with roster.use("smolm"):
                pass

    run(test, Settings(models=models("smollm"), installed=False))


def test_installed_models_are_served_where_that_is_allowed_by_name_but_never_by_path() -> None:
    loader = FakeLoader()
    model = SimpleNamespace(name="ollama:other:latest", path="/models/blob")
    loader.here = {"other:latest": model, "ollama:other:latest": model}

    async def test(roster: Roster, loader: FakeLoader) -> None:
        async with roster.use("other") as served:
            assert served.name == "other:latest"
            assert served.settings.source == "/models/blob"
        with pytest.raises(UnknownModelError):
            async with roster.use("/models/blob"):
                pass

    async def closed(roster: Roster, loader: FakeLoader) -> None:
        with pytest.raises(UnknownModelError):
            async with roster.use("other"):
                pass

    run(test, Settings(models=models("a")), loader)
    run(closed, Settings(models=models("a"), installed=False), loader)
    run(closed, Settings(models=models("a"), host="192.0.2.1"), loader)


def test_a_key_that_may_use_one_model_sees_and_gets_no_other() -> None:
    async def test(roster: Roster, loader: FakeLoader) -> None:
        CALLER.set(Caller("alice", limits=Limits(models=("b",))))
        assert [entry.name for entry in roster.entries()] == ["b"]
        with pytest.raises(RefusedError, match="the key 'alice' may not use 'a'; it may use b"):
            async with roster.use("a"):
                pass
        assert loader.loads == []
        async with roster.use("b"):
            pass

    run(test, Settings(models=models("a", "b"), installed=False))


def test_a_roster_that_is_stopping_takes_no_more_requests() -> None:
    async def test(roster: Roster, loader: FakeLoader) -> None:
        async with roster.use("a"):
            await roster.drain(1.0)
        assert roster.unready == "stopping"
        with pytest.raises(StoppingError):
            async with roster.use("a"):
                pass

    run(test, Settings(models=models("a")))


def test_different_models_may_be_loaded_at_the_same_time() -> None:
    async def test(roster: Roster, loader: FakeLoader) -> None:
        loader.go.clear()

        async def use(name: str) -> None:
            async with roster.use(name):
                pass

        tasks = [asyncio.create_task(use(name)) for name in ("a", "b")]
        while loader.at_a_time < 2:
            await asyncio.sleep(0.01)
        loader.go.set()
        await asyncio.gather(*tasks)

    run(test, Settings(models=models("a", "b")))


def test_a_model_that_cannot_be_preloaded_stops_the_start() -> None:
    async def test(roster: Roster, loader: FakeLoader) -> None:
        loader.failing.add("one")
        with pytest.raises(CheckpointError):
            await roster.preload()
        assert roster.unready == "loading one"

    run(test, settings("one"))
