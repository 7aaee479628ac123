"""`graftrl export`: models of a run as folders for `from_pretrained`."""
