"""Tells what an update is doing: on XLA its first phases compile for minutes, without any other sign of life."""

import time


class Phases:
    """Prints the phases of every update, if it is on."""

    def __init__(self, on: bool):
        self.on, self.step, self.running, self.since = on, 0, "", 0.0

    def tell(self, what: str) -> None:
        if self.on:
            print(f"[Step {self.step}] {what}", flush=True)

    def start(self, step: int) -> None:
        self.step = step
        self.tell("Starting...")

    def begin(self, phase: str) -> None:
        """End the phase that is running, and begin another."""
        self.end()
        self.running, self.since = phase, time.monotonic()
        self.tell(f"{phase} starting...")

    def end(self) -> None:
        if self.running:
            self.tell(f"{self.running} done ({time.monotonic() - self.since:.1f}s)")
        self.running = ""
