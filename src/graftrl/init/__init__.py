"""A recipe from a few answers: `graftrl init`."""
