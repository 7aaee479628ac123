"""`graftrl plan`: memory, tokens and time of a recipe's step on given devices, before anything is bought or trained."""
