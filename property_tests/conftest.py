"""Hypothesis profiles, chosen by HYPOTHESIS_PROFILE or --hypothesis-profile: few, dev, ci or nightly."""

import os

from hypothesis import HealthCheck, settings

# Laws call torch and write files; a slow first example says nothing about the law.
COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}

settings.register_profile("few", max_examples=10, **COMMON)
settings.register_profile("dev", max_examples=50, **COMMON)
settings.register_profile("ci", max_examples=100, derandomize=False, print_blob=True, **COMMON)
settings.register_profile("nightly", max_examples=10_000, print_blob=True, **COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))
