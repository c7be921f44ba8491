"""Loading the tokenizers of the models that turn up."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from support.fleets import OTHER, join, new_fleet
from support.tokenizers import TINY, with_config

from kvrouter.config import TokenizerConfig
from kvrouter.fleet import Fleet
from kvrouter.supervision import background
from kvrouter.tokenizer_loading import TokenizerLoader


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
