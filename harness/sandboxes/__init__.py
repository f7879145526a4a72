"""Where commands run: a process group on this machine, a container, or memory (tests)."""
