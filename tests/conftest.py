"""What every test gets."""

from hypothesis import settings

# `pytest --hypothesis-profile thorough tests/property/...`: for a change of what they are about.
settings.register_profile("thorough", max_examples=10_000, deadline=None)
