"""The core of the SAO harness: everything between a task and a recorded trajectory. Never imports torch."""

__version__ = "0.1.0"
