"""A local page to look at what models said and what became of it: `graftrl view`."""
