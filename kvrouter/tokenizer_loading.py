"""Finding and loading the tokenizer of each model that the workers serve.

What is tried, in order: what the configuration names for the model, what it names for all, the
folder or hub id that the engine gives as the model's root.
"""

import asyncio
import logging
import ssl
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from functools import partial
from pathlib import Path

from kvrouter.config import ConfigError, TokenizerConfig
from kvrouter.fleet import Fleet
from kvrouter.pool import Pool
from kvrouter.tokenize import (
    BackendSettings,
    BytesTokenizer,
    ModelTokenizer,
    RemoteTokenizer,
    TokenizerError,
    read_template,
)
from kvrouter.tokenize.choice import BackendWish
from kvrouter.tokenize.guarded import told
from kvrouter.tokenize.template import ChatTemplate, TemplateError
from kvrouter.workers import WorkerState

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 0.1
"""How soon a model that has just appeared is noticed. Costs a look at a few booleans."""

RETRY_S = 30.0
"""How long after a failure the tokenizer is looked for again."""


PATIENCE_S = 30.0
"""How long the other models wait while one is loaded, and how long workers may be missing before a
name of the configuration counts as one that none serves."""


class TokenizerLoader:
    """Loads tokenizers in threads, so that the event loop goes on; one after the other.

    The files of a model may hang whoever reads them. So nobody waits for these threads: neither the
    other models, after `patience_s`, nor the end of the router.
    """

    def __init__(
        self,
        settings: TokenizerConfig,
        tls: ssl.SSLContext | None = None,
        *,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._settings = settings
        self._tls = tls
        self._patience_s = patience_s
        self._failed_at: dict[str, float] = {}
        self._late: dict[str, asyncio.Future[ModelTokenizer]] = {}
        """What is still being loaded, by model."""
        self._loaded_from: dict[str, str] = {}
        """Where the tokenizer in use is from, by model."""
        self._names_known_at: float | None = None

    async def run(self, fleet: Fleet) -> None:
        """Load what is missing until cancelled."""
        names_told = False
        while True:
            if not names_told and self._knows_names(fleet):
                names_told = True
                for problem in unserved(self._settings, fleet):
                    log.warning("%s", problem)
            for pool in list(fleet.pools.values()):
                if pool.tokenizer_loading or self._may_retry(pool) or self._is_outdated(pool):
                    await self._load(pool)
            await asyncio.sleep(LOOK_AGAIN_S)

    def _knows_names(self, fleet: Fleet) -> bool:
        """Whether all workers have told what they serve, or had their time for that."""
        if not fleet.pools:
            return False
        if all(worker.facts.models for worker in fleet.workers.values()):
            return True
        now = time.monotonic()
        self._names_known_at = self._names_known_at or now + self._patience_s
        return now >= self._names_known_at

    def _may_retry(self, pool: Pool) -> bool:
        """What failed may be mended meanwhile: a folder mounted, a hub that is back."""
        late = self._late.get(pool.model)
        if late is not None:
            return late.done()
        failed_at = self._failed_at.get(pool.model)
        return failed_at is not None and time.monotonic() - failed_at > RETRY_S

    def _is_outdated(self, pool: Pool) -> bool:
        """Whether none of the engines has its model where the tokenizer is from any more.

        As when all have been started again with the next version, under the same name.
        """
        loaded = self._loaded_from.get(pool.model)
        if pool.tokenizer is None or loaded is None or self._configured(pool) is not None:
            return False
        roots = _roots(pool)
        return bool(roots) and loaded not in roots

    async def _load(self, pool: Pool) -> None:
        known_problem = pool.tokenizer_problem
        wish = self._settings.backends.get(pool.model, self._settings.backend)
        if wish == "remote":
            pool.tokenizer = RemoteTokenizer(pool.model, partial(_ready_urls, pool), self._tls)
        elif wish == "bytes":
            pool.tokenizer = BytesTokenizer("approximate: the configuration asks for bytes")
        else:
            await self._load_files(pool, wish)
        if pool.tokenizer is None:
            self._failed_at[pool.model] = time.monotonic()
        else:
            self._failed_at.pop(pool.model, None)
            pool.tokenizer_problem = ""
        if pool.tokenizer_problem != known_problem or pool.tokenizer is not None:
            self._report(pool)

    async def _load_files(self, pool: Pool, wish: BackendWish) -> None:
        where = self._where(pool)
        if where is None:
            pool.tokenizer_problem = "the engine names no root; set --tokenizer"
            return
        load = partial(self._load_from, where, wish, pool.max_model_len)
        if pool.tokenizer is not None:
            log.info("model %s: its engines have it at %s by now", pool.model, where)
            pool.tokenizer = None
            pool.tokenizer_problem = f"{where}, where its engines have it by now, is being loaded"
            pool.token_counts.begin_anew()
        work = self._late.pop(pool.model, None)
        if work is None:
            work = _in_thread(load)
            self._loaded_from[pool.model] = where
        if not (await asyncio.wait({work}, timeout=self._patience_s))[0]:
            self._late[pool.model] = work
            pool.tokenizer_problem = f"{where} is still being loaded"
            return
        try:
            pool.tokenizer = work.result()
        except TokenizerError as error:
            pool.tokenizer_problem = str(error)
        except BaseException as error:  # files of others may be wrong in any way
            what = told(error)
            log.debug("the tokenizer of %s", pool.model, exc_info=True)
            pool.tokenizer_problem = f"{where} can't be loaded: {type(error).__name__}: {what}"

    def _report(self, pool: Pool) -> None:
        tokenizer = pool.tokenizer
        if tokenizer is None:
            log.warning(
                "model %s: prompts are not tokenized, routed by load: %s",
                pool.model,
                pool.tokenizer_problem,
            )
            return
        report = tokenizer.report
        log.info("model %s: prompts are encoded by %s: %s", pool.model, report.name, report.why)
        if tokenizer.chat_problem:
            log.warning("model %s: %s", pool.model, tokenizer.chat_problem)

    def _where(self, pool: Pool) -> str | None:
        return self._configured(pool) or next(iter(_roots(pool)), None)

    def _configured(self, pool: Pool) -> str | None:
        return self._settings.models.get(pool.model) or self._settings.path

    def _load_from(
        self, where: str, wish: BackendWish, max_model_len: Callable[[], int | None]
    ) -> ModelTokenizer:
        template = self._settings.chat_template
        return ModelTokenizer.load(
            where,
            chat_template=Path(template) if template else None,
            backends=BackendSettings(
                wish=wish,
                check_every=self._settings.check_every,
                cache_bytes=self._settings.cache_bytes,
            ),
            max_model_len=max_model_len,
        )


def check_chat_template(settings: TokenizerConfig) -> None:
    """Raises ConfigError when the file is missing, or is no chat template."""
    path = settings.chat_template
    if path is None:
        return
    try:
        ChatTemplate(read_template(Path(path)), {})
    except TemplateError as error:
        raise ConfigError(f"tokenizer.chat_template: {path}: {error}") from error


def unserved(settings: TokenizerConfig, fleet: Fleet) -> list[str]:
    """What is configured for models that no worker serves, in words."""
    fields: dict[str, Collection[str]] = {
        "models": settings.models,
        "backends": settings.backends,
        "send_ids": settings.send_ids,
    }
    problems = []
    for field, names in fields.items():
        for name in [name for name in names if name not in fleet.pools]:
            known = [pool.model for pool in fleet.pools.values() if pool.worker_with(name)]
            if known:
                what = f"{name!r} is another name or an adapter of {known[0]!r}: give that"
            else:
                what = f"no worker serves {name!r}; the models are {', '.join(fleet.pools)}"
            problems.append(f"tokenizer.{field}: {what}")
    return problems


def _roots(pool: Pool) -> list[str]:
    """Where its engines have the model, as far as they tell."""
    return [
        model.root
        for worker in pool.workers.values()
        for model in worker.facts.models
        if model.id == pool.model and model.root
    ]


def _in_thread(load: Callable[[], ModelTokenizer]) -> "asyncio.Future[ModelTokenizer]":
    """Load in a thread of its own, which the process does not wait for when it ends."""
    work: Future[ModelTokenizer] = Future()

    def run() -> None:
        try:
            tokenizer = load()
        except BaseException as error:  # noqa: BLE001  # it is raised where the result is taken
            work.set_exception(error)
        else:
            work.set_result(tokenizer)

    threading.Thread(target=run, name="load tokenizer", daemon=True).start()
    return asyncio.wrap_future(work)


def _ready_urls(pool: Pool) -> list[str]:
    """Called from threads, so the workers are listed first."""
    workers = list(pool.workers.values())
    return [each.url for each in workers if each.state is WorkerState.READY]
