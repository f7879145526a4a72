"""Repository repair as SWE-bench poses it: an issue, a container with the repository, hidden tests as the judge."""
