"""Finding, loading and looking up plugins."""
