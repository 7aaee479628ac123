"""The probe: what an exchange between models could win, measured on a few hundred prompts before anyone trains."""
