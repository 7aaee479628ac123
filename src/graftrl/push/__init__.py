"""A trained model as others can use it: `graftrl push`."""
