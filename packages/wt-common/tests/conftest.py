"""Settings of the property tests."""

from hypothesis import settings

# No deadline: a busy machine is not a failure. Derandomized: a failure here is a failure everywhere.
settings.register_profile("wt", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("wt")
