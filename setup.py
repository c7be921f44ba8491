"""Builds the package; with `KVROUTER_COMPILED=1` what a decision runs through is compiled first.

mypyc makes C of typed Python, which needs a C compiler, and mypy and setuptools where this runs
(`make compiled`). The modules stay what they are: whatever passes here without it passes with it.

Only modules without comparisons of `msgspec.Struct` values can be compiled: mypyc does not know
that those have an `__eq__`, and compares their identity. Nor can those that define such a class
(`openai/fields`), that inherit from a library's (`tokenize/sandbox`), or in which an exception is
raised from outside, which comes between two instructions of Python (`tokenize/time_limit`).

A compiled module holds values to their types. So what came from somebody else's file or request is
`Any` until it was looked at.
"""

import os

from setuptools import setup

COMPILED = [
    "indexer/guesses.py",
    "indexer/hashing.py",
    "indexer/lookup.py",
    "indexer/predicted.py",
    "kvrouter/active_blocks.py",
    "kvrouter/load.py",
    "kvrouter/openai/body.py",
    "kvrouter/pace.py",
    "kvrouter/policy/candidate.py",
    "kvrouter/policy/compose.py",
    "kvrouter/policy/decision.py",
    "kvrouter/policy/filters.py",
    "kvrouter/policy/pickers.py",
    "kvrouter/policy/scorers.py",
    "kvrouter/prompt.py",
    "kvrouter/scheduler.py",
    "kvrouter/tokenize/chat.py",
    "kvrouter/tokenize/encoding_threads.py",
    "kvrouter/tokenize/fast.py",
    "kvrouter/tokenize/given.py",
    "kvrouter/tokenize/guarded.py",
    "kvrouter/tokenize/hash_runs.py",
    "kvrouter/tokenize/messages.py",
    "kvrouter/tokenize/pieces.py",
    "kvrouter/tokenize/stretches.py",
    "kvrouter/tokenize/template.py",
    "kvrouter/tokenize/tokenizer.py",
]

extensions = []
if os.environ.get("KVROUTER_COMPILED") == "1":
    from mypyc.build import mypycify

    extensions = mypycify(COMPILED, opt_level="2")

setup(ext_modules=extensions)
