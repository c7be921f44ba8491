"""What every test gets."""

from hypothesis import HealthCheck, settings

# Whatever comes first in a new clone has tables of characters made, which takes a second or two.
settings.register_profile("usual", suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("usual")

# `pytest --hypothesis-profile thorough tests/property/...`: for a change of what they are about.
settings.register_profile("thorough", max_examples=10_000, deadline=None)
