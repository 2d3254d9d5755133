"""How long tests wait."""

# Seconds that a test waits for something that must happen. Only a hang takes this long, so tests do not fail on a slow
# or busy machine; speed is measured in benchmarks/.
PATIENCE = 1800
