"""What a machine and some models are like, and what about them has cost others a run: `graftrl doctor`."""
