"""Choosing: what speed is worth, what this machine can reach, what a first request costs.

Everything here works on what ``chabok.measure`` measured, on published shapes of models, and on models and
endpoints alike; nothing is shown that cannot be computed again.
"""
