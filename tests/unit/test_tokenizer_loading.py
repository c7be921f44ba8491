"""Loading the tokenizers of the models that turn up."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from support.fleets import BASE, OTHER, join, new_fleet
from support.tokenizers import TINY, with_config

from kvrouter.config import ConfigError, TokenizerConfig, WorkerConfig
from kvrouter.fleet import Fleet
from kvrouter.supervision import background
from kvrouter.tokenizer_loading import LOOK_AGAIN_S, TokenizerLoader, check_chat_template
from kvrouter.workers import ServedModel, WorkerFacts


@asynccontextmanager
async def loading(config: TokenizerConfig, patience_s: float = 20.0) -> AsyncIterator[Fleet]:
    """A fleet with workers of the models `m` and `n`, whose tokenizers are being loaded."""
    fleet = new_fleet()
    join(fleet, "a")
    join(fleet, "b", OTHER)
    loader = TokenizerLoader(config, patience_s=patience_s)
    async with background({"tokenizers": lambda: loader.run(fleet)}):
        yield fleet


async def until(what: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not what():  # noqa: ASYNC110  # done in threads, nothing to await
            await asyncio.sleep(0.005)


async def test_a_model_whose_files_hang_holds_up_no_other(tmp_path: Path) -> None:
    """A folder on a network that does not answer; the model is served once its files come."""
    folder = with_config(tmp_path / "m")
    (folder / "tokenizer_config.json").unlink()
    os.mkfifo(folder / "tokenizer_config.json")
    config = TokenizerConfig(models={"m": str(folder), "n": str(TINY)}, backend="hf", cache_bytes=0)
    async with loading(config, patience_s=0.05) as fleet:
        await until(lambda: fleet.pools["n"].tokenizer)
        assert "still being loaded" in fleet.pools["m"].tokenizer_problem
        (folder / "tokenizer_config.json").write_text("{}")
        await until(lambda: fleet.pools["m"].tokenizer)
        assert fleet.pools["m"].tokenizer_problem == ""


def at_root(root: Path | None) -> WorkerFacts:
    """An engine that has `m` there."""
    return replace(BASE, models=(ServedModel("m", None if root is None else str(root)),))


async def test_the_tokenizer_of_engines_that_have_the_next_version_is_loaded(
    tmp_path: Path,
) -> None:
    """All engines of a name are started again with a model at another place, one by one."""
    one, two = (with_config(tmp_path / name) for name in ("one", "two"))
    config = TokenizerConfig(backend="hf", cache_bytes=0)
    async with loading(config) as fleet:
        join(fleet, "a", at_root(one))
        join(fleet, "c", at_root(one))
        pool = fleet.pools["m"]
        pool.tokenizer_problem = ""
        await until(lambda: pool.tokenizer)
        first = pool.tokenizer
        pool.token_counts.observe(1, 2, "a")
        join(fleet, "a", at_root(two))
        join(fleet, "c", at_root(None))  # does not tell for a moment
        join(fleet, "c", at_root(one))
        await asyncio.sleep(3 * LOOK_AGAIN_S)
        assert pool.tokenizer is first
        join(fleet, "c", at_root(two))
        await until(lambda: pool.tokenizer is not first and pool.tokenizer)
        assert (pool.tokenizer_problem, pool.token_counts.problem) == ("", "")
        join(fleet, "a", at_root(tmp_path / "none"))
        join(fleet, "c", at_root(tmp_path / "none"))
        await until(lambda: "no folder" in pool.tokenizer_problem)
        assert pool.tokenizer is None


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if "tokenizer." in each.getMessage()]


async def test_names_that_no_worker_serves_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """A model's name was misspelt, or an adapter's was given: the setting would do nothing."""
    config = TokenizerConfig(
        backend="bytes",
        models={"lora-a": "x"},
        backends={"m": "bytes", "Mm": "remote"},
        send_ids=["n", "nn"],
    )
    async with loading(config) as fleet:
        await until(lambda: fleet.pools["n"].tokenizer)
        await asyncio.sleep(3 * LOOK_AGAIN_S)
    assert warned(caplog) == [
        "tokenizer.models: 'lora-a' is another name or an adapter of 'm': give that",
        "tokenizer.backends: no worker serves 'Mm'; the models are m, n",
        "tokenizer.send_ids: no worker serves 'nn'; the models are m, n",
    ]


async def test_names_are_not_told_before_all_workers_had_their_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = TokenizerConfig(backend="bytes", send_ids=["late"])
    async with loading(config, patience_s=2 * LOOK_AGAIN_S) as fleet:
        fleet.add(WorkerConfig(url="http://late:1"))
        await until(lambda: fleet.pools["n"].tokenizer)
        assert warned(caplog) == []
        await until(lambda: warned(caplog))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "can't be read: No such file"),
        (b"\xff", "is no text in UTF-8"),
        (b"{% for %}", "does not compile"),
    ],
)
def test_a_chat_template_that_is_none_is_told_before_anything_starts(
    tmp_path: Path, content: bytes | None, problem: str
) -> None:
    path = tmp_path / "chat.jinja"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=problem) as caught:
        check_chat_template(TokenizerConfig(chat_template=str(path)))
    assert f"tokenizer.chat_template: {path}: " in str(caught.value)


def test_a_right_chat_template_is_right() -> None:
    path = TINY / "chat_template_parts.jinja"
    check_chat_template(TokenizerConfig(chat_template=str(path)))
    check_chat_template(TokenizerConfig())
