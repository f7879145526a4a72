"""Task factory: SWE tasks from public package releases, without a git host (`docs/swe.md`)."""
