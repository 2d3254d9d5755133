"""How long tests wait."""

# Seconds that a test waits for something that must happen. Only a hang takes this long: a slow or busy machine fails no
# test, and speed is measured in benchmarks/.
PATIENCE = 1800
