"""A soak: worlds of ranks save while one of them is killed, fails or is late at a random effect; see `soak.main`."""
