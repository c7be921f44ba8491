"""Builds the package; with `KVROUTER_COMPILED=1` what a request runs through is compiled first.

mypyc makes C of typed Python, which needs a C compiler, and mypy and setuptools where this runs
(`make compiled`). The modules stay what they are: whatever passes here without it passes with it.

What can't be compiled: modules that compare values of a `msgspec.Struct` of their own, for mypyc
does not know its `__eq__` and compares their identity (`kvrouter/rank_load`); that define one which
is decoded, for its annotations are lost (`openai/answer`, `openai/fields`, `kvrouter/workers`);
that inherit from a library's class (`tokenize/sandbox`); in which an exception is raised from
outside, which comes between two instructions of Python (`tokenize/time_limit`); and that look, in a
thread of their own, at each of the many things that a client may send (`tokenize/chat`, `messages`,
`tokenizer`): a compiled loop lets no other thread run, the event loop's neither.

A compiled module holds values to their types. So what came from somebody else's file or request is
`Any` until it was looked at.
"""

import os

from setuptools import setup

COMPILED = [
    "indexer/guesses.py",
    "indexer/hashing.py",
    "indexer/holdings.py",
    "indexer/lookup.py",
    "indexer/predicted.py",
    "indexer/radix.py",
    "indexer/run.py",
    "indexer/tree.py",
    "kvrouter/access.py",
    "kvrouter/active_blocks.py",
    "kvrouter/breaker.py",
    "kvrouter/counts.py",
    "kvrouter/fleet.py",
    "kvrouter/http/attempt.py",
    "kvrouter/http/client.py",
    "kvrouter/http/connection.py",
    "kvrouter/http/deadline.py",
    "kvrouter/http/door.py",
    "kvrouter/http/engine.py",
    "kvrouter/http/engine_connection.py",
    "kvrouter/http/exchange.py",
    "kvrouter/http/headers.py",
    "kvrouter/http/request_reader.py",
    "kvrouter/http/response_head.py",
    "kvrouter/http/response_reader.py",
    "kvrouter/joint_predictions.py",
    "kvrouter/load.py",
    "kvrouter/metrics.py",
    "kvrouter/openai/body.py",
    "kvrouter/openai/errors.py",
    "kvrouter/openai/paths.py",
    "kvrouter/openai/scan.py",
    "kvrouter/pace.py",
    "kvrouter/policy/candidate.py",
    "kvrouter/policy/compose.py",
    "kvrouter/policy/decision.py",
    "kvrouter/policy/filters.py",
    "kvrouter/policy/pickers.py",
    "kvrouter/policy/scorers.py",
    "kvrouter/pool.py",
    "kvrouter/prefills.py",
    "kvrouter/prompt.py",
    "kvrouter/proof.py",
    "kvrouter/rank_state.py",
    "kvrouter/scheduler.py",
    "kvrouter/sticky.py",
    "kvrouter/token_counts.py",
    "kvrouter/tokenize/encoding_threads.py",
    "kvrouter/tokenize/fast.py",
    "kvrouter/tokenize/given.py",
    "kvrouter/tokenize/guarded.py",
    "kvrouter/tokenize/hash_runs.py",
    "kvrouter/tokenize/pieces.py",
    "kvrouter/tokenize/stretches.py",
    "kvrouter/tokenize/template.py",
]

extensions = []
if os.environ.get("KVROUTER_COMPILED") == "1":
    from mypyc.build import mypycify

    extensions = mypycify(COMPILED, opt_level="2")

setup(ext_modules=extensions)
